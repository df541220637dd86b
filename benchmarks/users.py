"""Users' networks in 8 bits against FP32: the peak memory and the time of a training step, without a change to their code.

The networks are those of `user_models`. Memory is measured as in `memory`: a process for each contestant, and the peak of its
resident memory over a step, less that before the model was built. Time is that of a step against `torch.optim.SGD` in FP32.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import qlangevin as ql

from .memory import ENVIRONMENT, MB, can_measure, reset_peak, resident
from .timing import PROCESSOR, WALL, Contestant, Goal, Row, measure
from .training import FP32, LOWERED, LR, PACKED, THREADS, Batch, images, make_sampler
from .user_models import WORDS, HuggingFaceGPT2, PlainEncoder, PlainGPT, PlainResNet18, TorchEncoder

FORMAT = "bfp8"
Name = Literal["resnet", "resnet_channels_last", "encoder", "plain_encoder", "decoder", "gpt2"]


@dataclass(frozen=True)
class Case:
    """A network, its batches for memory and time, and its goals; ``small`` is the same network, small enough to warm up."""

    title: str
    model: Callable[[], nn.Module]
    small: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    sizes: tuple[int, int]
    peak: Goal
    times: dict[str, Goal]


def texts(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (count, 129), generator=generator)
    return words[:, :-1], words[:, 1:]


def _resnet(layout: torch.memory_format, width: int = 64) -> nn.Module:
    return PlainResNet18(width=width).to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


def _images(layout: torch.memory_format, count: int) -> Batch:
    x, y = images(count)
    return x.contiguous(memory_format=layout), y


def _resnet_case(layout: torch.memory_format, words: str) -> Case:
    small, batch = partial(_resnet, layout, 8), partial(_images, layout)
    goals = {LOWERED: Goal("<=", 1.10), PACKED: Goal("<=", 1.15)}
    return Case(f"plain ResNet-18, {words}", partial(_resnet, layout), small, batch, (128, 32), Goal("<=", 0.40), goals)


def _text_case(title: str, model: Callable[..., nn.Module]) -> Case:
    goals = {PACKED: Goal("<=", 1.20)}
    return Case(title, model, partial(model, 1, 64), texts, (8, 8), Goal("<=", 0.50), goals)


CASES: dict[Name, Case] = {
    "resnet": _resnet_case(torch.contiguous_format, "contiguous"),
    "resnet_channels_last": _resnet_case(torch.channels_last, "channels-last"),
    "encoder": _text_case("nn.TransformerEncoder, 6 layers of 384", TorchEncoder),
    "plain_encoder": _text_case("encoder like Bert, 6 layers of 384", PlainEncoder),
    "decoder": _text_case("decoder like GPT-2, 6 layers of 384", PlainGPT),
    "gpt2": _text_case("GPT-2 of transformers, 6 layers of 384", HuggingFaceGPT2),
}


def known_cases() -> list[Name]:
    """Return the cases whose libraries are installed."""
    return [name for name in CASES if name != "gpt2" or find_spec("transformers") is not None]


@dataclass(frozen=True)
class Options:
    """The contestant that a process measures."""

    case: Name
    contestant: Literal["fp32", "packed"]
    steps: int = 3
    """Only the last step counts: the first learns which activations are saved."""


class Training:
    """A model that is trained on one batch."""

    def __init__(self, model: nn.Module, batch: Batch, kind: str) -> None:
        self.model, (self.x, self.y) = model, batch
        self.optimizer: Optimizer = SGD(model.parameters(), LR) if kind == FP32 else self.lowered(kind == PACKED)

    def lowered(self, packed: bool) -> ql.SGLD:
        ql.lower(self.model, FORMAT, FORMAT)
        if packed:
            ql.pack(self.model, FORMAT)
        return make_sampler(self.model, FORMAT, packed)

    def loss(self) -> Tensor:
        logits = self.model(self.x)
        return nn.functional.cross_entropy(logits.flatten(0, -2), self.y.flatten())

    def run(self) -> None:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        if not bool(loss.isfinite()):
            raise RuntimeError(f"the loss is {loss.item()}")


# ---- memory


def run_contestant(options: Options) -> float:
    """Return the peak of a contestant's step in bytes, after a small model has loaded all code and kernels into the base."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case, kind = CASES[options.case], FP32 if options.contestant == "fp32" else PACKED
    Training(case.small(), case.batch(2), kind).run()
    gc.collect()
    base = resident("VmRSS")
    full = Training(case.model(), case.batch(case.sizes[0]), kind)
    for _ in range(options.steps):
        reset_peak()
        full.run()
    return resident("VmHWM") - base


def measure_contestant(options: Options) -> float:
    """Return the peak of a contestant from a process of its own."""
    arguments = [f"--{name}={value}" for name, value in asdict(options).items()]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.users", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | ENVIRONMENT,
    )
    return float(json.loads(done.stdout))


def peak(name: Name, steps: int) -> Row:
    case = CASES[name]
    ours, theirs = (measure_contestant(Options(name, kind, steps)) for kind in ("packed", "fp32"))
    group = f"peak memory of a training step in {FORMAT}, networks of users, one thread"
    title = f"{case.title}, batch {case.sizes[0]}"
    return Row(group, title, ours / MB, "MB", "FP32", theirs / MB, "memory", case.peak)


# ---- time


def time_case(name: Name, threads: int, seconds: float) -> list[Row]:
    case, clock = CASES[name], PROCESSOR if threads == 1 else WALL
    torch.manual_seed(0)
    model, batch = case.model(), case.batch(case.sizes[1])
    trainings = {kind: Training(copy.deepcopy(model), batch, kind) for kind in (FP32, *case.times)}
    times = measure({kind: Contestant(t.run, threads) for kind, t in trainings.items()}, seconds, clock)
    group = f"training step in {FORMAT}, {case.title}, batch {case.sizes[1]}, {THREADS[threads]}"
    return [Row(group, kind, times[kind], "s", FP32, times[FP32], "time", goal) for kind, goal in case.times.items()]


def run(seconds: float, quick: bool) -> list[Row]:
    """Measure peaks, and times with as many threads as there are processors, two at most."""
    cases, threads = known_cases(), min(2, os.cpu_count() or 1)
    rows = [peak(name, 2 if quick else 3) for name in cases] if can_measure() else []
    return rows + [row for name in cases for row in time_case(name, threads, seconds / len(cases))]


if __name__ == "__main__":
    print(json.dumps(run_contestant(tyro.cli(Options, prog="python -m benchmarks.users"))))
