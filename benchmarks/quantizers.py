"""Time of rounding 4 million floats, per element and on one thread, against qtorch, torchao, eager PyTorch and a plain copy."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch

import qlangevin as ql

from . import baselines
from .timing import Contestant, Goal, Row, measure

GROUP = "quantizers, 4M floats, one thread"
FORMATS = ("fixed8.6", "bfp8", "fp8_e5m2")
EAGER_32, EAGER_16, TORCHAO, COPY = "eager PyTorch", "eager, 16 random bits", "torchao int8 rows", "torch.Tensor.clone"


def run(seconds: float, qtorch: ModuleType | None) -> list[Row]:
    x = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    contestants = {COPY: Contestant(x.clone)}
    for format in FORMATS:
        contestants[f"{format} nearest"] = Contestant(partial(ql.quantize, x, format, "nearest"))
        contestants[f"{format} stochastic"] = Contestant(partial(ql.quantize, x, format, "stochastic", ql.Key(0)))
        contestants[f"{format} {EAGER_32}"] = Contestant(partial(baselines.EAGER[format], x, torch.int32))
        contestants[f"{format} {EAGER_16}"] = Contestant(partial(baselines.EAGER[format], x, torch.int16))
        if qtorch is not None:
            contestants[f"{format} qtorch"] = Contestant(
                partial(baselines.qtorch_quantizers(qtorch, "stochastic")[format], x)
            )
    torchao = baselines.import_baseline("torchao.prototype.quantized_training.int8")
    if isinstance(torchao, ModuleType):
        contestants[f"bfp8 {TORCHAO}"] = Contestant(partial(torchao.quantize_int8_rowwise, x, stochastic_rounding=True))
    times = measure(contestants, seconds)
    return rows({name: time / x.numel() * 1e9 for name, time in times.items()})


def rows(times: dict[str, float]) -> list[Row]:
    """Return the comparisons, given nanoseconds by name."""
    goals = {"qtorch": Goal(">=", 20), EAGER_32: Goal(">=", 4), EAGER_16: None, TORCHAO: Goal(">=", 4)}
    out = []
    for format in FORMATS:
        ours = times[f"{format} stochastic"]
        for baseline, goal in goals.items():
            if (name := f"{format} {baseline}") in times:
                out.append(Row(GROUP, f"{format} stochastic", ours, "ns", baseline, times[name], "speed", goal))
    for format in FORMATS:
        ours = times[f"{format} nearest"]
        out.append(Row(GROUP, f"{format} nearest", ours, "ns", COPY, times[COPY], "time", Goal("<=", 4)))
    return out
