"""Times and memory on a GPU, against FP32 and against `torch.randn`. Nothing here runs in the interpreter."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ...experiments.models import ResNet18
from ...lowering.layers import lower
from ...quantization.operators import Rounding, quantize
from ...quantization.random import Key
from ...sampling.packing import pack
from ...sampling.sgld import SGLD

__all__ = ["Measurement", "measure_all"]

MIB = 2**20


@dataclass(frozen=True)
class Measurement:
    """A time in milliseconds, and what it is compared with; or memory in MiB."""

    what: str
    value: float
    unit: str
    beside: str = ""  # the name of the other
    other: float = 0.0

    @property
    def ratio(self) -> float:
        return self.value / self.other if self.other else 0.0


def measure_all(device: torch.device, batch: int = 128) -> Iterator[Measurement]:
    """Yield times of steps and of quantizers, and time and memory of a training step of a ResNet-18."""
    module = torch.get_device_module(device)
    weights = sum(p.numel() for p in ResNet18().parameters())
    drawing = _time(lambda: torch.randn(weights, device=device), module)
    yield Measurement(f"torch.randn, {weights / 1e6:.2f}M numbers", drawing, "ms")
    model, sgd = _plain(device)
    _give_gradients(model)
    yield Measurement("torch.optim.SGD step, FP32, ResNet-18", _time(sgd.step, module), "ms", "randn", drawing)
    for format, num_data in (("fixed8.6", 50_000), ("fixed8.6", 1000), ("bfp8", 50_000)):
        model, sampler = _packed(device, format, num_data)
        _give_gradients(model)
        what = f"SGLD step on codes, {format}, N = {num_data}"
        yield Measurement(what, _time(sampler.step, module), "ms", "randn", drawing)
    yield from _quantizers(device, module, weights)
    yield from _training(device, module, batch)


def _quantizers(device: torch.device, module: object, count: int) -> Iterator[Measurement]:
    x = torch.randn(count // 576, 576, device=device)
    copying = _time(x.clone, module)
    yield Measurement(f"torch.Tensor.clone, {x.numel() / 1e6:.2f}M numbers", copying, "ms")
    roundings: tuple[Rounding, ...] = ("nearest", "stochastic")
    for format in ("fixed8.6", "bfp8", "fp8_e5m2"):
        for rounding in roundings:
            taken = _time(lambda f=format, r=rounding: quantize(x, f, r, Key(0)), module)  # type: ignore[misc]
            yield Measurement(f"quantize, {rounding}, {format}", taken, "ms", "clone", copying)


def _training(device: torch.device, module: object, batch: int) -> Iterator[Measurement]:
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    taken, peaks = [], []
    for model, optimizer in (_plain(device), _packed(device, "bfp8", 50_000, lowered=True)):

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        taken.append(_time(step, module, repeats=5))
        module.reset_peak_memory_stats()  # type: ignore[attr-defined]
        step()
        peaks.append(module.max_memory_allocated() / MIB)  # type: ignore[attr-defined]
        del model, optimizer, step
    what = f"training step, ResNet-18, batch {batch}, lowered and packed in bfp8"
    yield Measurement(what, taken[1], "ms", "FP32, SGD", taken[0])
    yield Measurement("peak memory of it", peaks[1], "MiB", "FP32, SGD", peaks[0])


def _time(action: Callable[[], object], module: object, repeats: int = 11) -> float:
    """Return the median of milliseconds between two events on the device, after some runs that compile."""
    taken: list[float] = []
    for run in range(3 + repeats):
        begin, end = (module.Event(enable_timing=True) for _ in range(2))  # type: ignore[attr-defined]
        begin.record()
        action()
        end.record()
        end.synchronize()
        if run >= 3:
            taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


def _plain(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ResNet18().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)


def _packed(
    device: torch.device, format: str, num_data: int, lowered: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = ResNet18().to(device)
    if lowered:
        lower(model, activations="bfp8", errors="bfp8", functions=False)
    pack(model, format)
    return model, SGLD(model.parameters(), lr=0.1, num_data=num_data, weight_decay=1e-4, gradients="bfp8")


def _give_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn(p.shape, device=p.device) * 1e-3
