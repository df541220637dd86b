"""``python -m benchmarks.full_scale``: estimate the hours of `qlangevin sweep` at the paper's own scale on a GPU.

Nothing is measured, and nothing runs on a GPU. Of one training example

    arithmetic   floating-point operations of forward and backward / (published FP32 rate of the GPU · share that is reached)
    rounding     activations and errors, each read and written once as float32 / published bandwidth
    step         time of a step as in docs/gpu-cost.md / batch

The share of the peak that convolutions of this size reach is not known without a GPU: two are printed, 1, which is a bound from
below, and 0.4, a usual figure. Memory-bound layers (batch norm, ReLU) are within that share.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.roofline import GPUS
from qlangevin.experiments.models import ResNet18
from qlangevin.experiments.presets import Cifar10

__all__ = ["Work", "hours", "main", "work_of"]

TRAINING, TESTING = 50_000, 10_000  # CIFAR-10, and CIFAR-100 just as well
# FP32 without tensor cores, as published, and the step of ResNet-18 in bfp8 from docs/gpu-cost.md.
FP32_RATE = {"A100": 19.5e12, "H100": 66.9e12}
STEP_SECONDS = {"A100": 90e-6, "H100": 54e-6}


@dataclass(frozen=True)
class Work:
    """Work for one example: operations of a forward and a training pass, and numbers that layers put out."""

    forward: float
    training: float
    outputs: int


def work_of(model: nn.Module, example: Tensor) -> Work:
    """Count the work of a model for a batch of two, on the meta device; per example."""
    outputs = 0

    def count(_: nn.Module, __: object, result: Tensor) -> None:
        nonlocal outputs
        outputs += result.numel()

    hooks = [m.register_forward_hook(count) for m in model.modules() if not list(m.children())]
    with FlopCounterMode(display=False) as forward:
        loss = model(example).sum()
    for hook in hooks:
        hook.remove()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    n, there, back = len(example), forward.get_total_flops(), backward.get_total_flops()
    return Work(there / n, (there + back) / n, outputs // n)


def hours(gpu: str, share: float) -> tuple[float, int]:
    """Return the hours of one run of ``cifar10``, and the number of its runs with three seeds."""
    config = Cifar10()
    with torch.device("meta"):
        work = work_of(ResNet18(10, "cifar"), torch.empty(2, 3, 32, 32))
    examples = TRAINING * config.epochs
    arithmetic = work.training * examples + work.forward * TESTING * config.samples
    rounding = 2 * 8 * work.outputs * examples / GPUS[gpu].bandwidth
    steps = examples / config.batch * STEP_SECONDS[gpu]
    return (arithmetic / (FP32_RATE[gpu] * share) + rounding + steps) / 3600, 3 * len(config.rows)


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(prog="full_scale", description=__doc__.splitlines()[0]).parse_args()
    print("| GPU | share of the peak | hours a run | hours, all rows, three seeds |\n|---|---|---|---|")
    for gpu in FP32_RATE:
        for share in (1.0, 0.4):
            each, runs = hours(gpu, share)
            print(f"| {gpu} | {share:g} | {each:.1f} | {each * runs:.0f} |")


if __name__ == "__main__":
    main()
