"""Steps of samplers that are more than SGLD's: localization, masks, gains and velocities, against SGLD on the same weights.

One matrix of 2M weights in 8 bits, two regimes: noise below v_0 of the grid, where no Gaussian is drawn, and above. Learning
rates are such that weights get the same noise in each. Then, if devinterp is installed, its SGLD with localization and its
RMSprop against ours: float32 parameters, and bfloat16 ones against bf16 and packed bfp8. Bytes are of weights and state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.quantization.qtensor import QTensor

from .timing import Contestant, Goal, Row, measure

SHAPE = (2048, 1024)
COUNT = SHAPE[0] * SHAPE[1]
DATA = 50_000
GRADIENT = 1e-3
RMS_GAIN = 500.0  # of gradients of this size with eps = 1e-3
QUIET, NOISY = 0.01, 1.0  # learning rates
GOALS = {
    "localization": Goal("<=", 1.15), "a variance for each weight": Goal("<=", 1.3), "RMS": Goal("<=", 1.6),
    "SGHMC": Goal("<=", 2.2),
}  # fmt: skip


class Model(nn.Module):
    """One matrix with a gradient that stays."""

    def __init__(self, format: str | None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter((torch.randn(SHAPE, generator=draw) * 0.05).to(dtype))
        if format is not None:
            ql.pack(self, format)
        self.weight.grad = (torch.randn(SHAPE, generator=draw) * GRADIENT).to(dtype)


def contestants(format: str | None, lr: float) -> dict[str, Contestant]:
    """Return SGLD and what is compared with it, each on weights of its own."""
    moves = torch.ones(SHAPE, dtype=torch.bool)
    moves[:, : SHAPE[1] // 8] = False  # as a mask that leaves out a head
    made: dict[str, Callable[[Any], Any]] = {
        "SGLD": lambda p: ql.SGLD(p, lr, DATA),
        "localization": lambda p: ql.SGLD(p, lr, DATA, localization=100.0),
        "a variance for each weight": lambda p: ql.SGLD(p, lr, DATA, mask=[moves]),
        "RMS": lambda p: ql.SGLD(p, lr / RMS_GAIN, DATA, preconditioner="rms"),
        "RMS, frozen": lambda p: ql.SGLD(p, lr / RMS_GAIN, DATA, preconditioner=ql.RMS(freeze_after=1)),
        "SGHMC": lambda p: ql.SGHMC(p, lr, DATA),
        "SGHMC, velocity fixed8.4": lambda p: ql.SGHMC(p, lr, DATA, velocity="fixed8.4"),
    }
    return {name: _contestant(make(Model(format).parameters())) for name, make in made.items()}


def _contestant(sampler: Any) -> Contestant:
    sampler.step()
    sampler.step()
    return Contestant(sampler.step)


def run(seconds: float) -> list[Row]:
    """Time all of it with one thread."""
    rows = []
    for format in ("bfp8", "fixed8.6", "bf16"):
        for lr, regime in ((QUIET, "noise below v0"), (NOISY, "noise above v0")):
            times = _ns(measure(contestants(format, lr), seconds / 6))
            group = f"one step, {format}, {regime}, one thread"
            rows += [
                Row(group, name, t, "ns", "SGLD", times["SGLD"], "time", GOALS.get(name) if format == "bfp8" else None)
                for name, t in times.items() if name != "SGLD"
            ]  # fmt: skip
    return rows + devinterp(seconds)


def _ns(times: dict[str, float]) -> dict[str, float]:
    return {name: t / COUNT * 1e9 for name, t in times.items()}


# ---- devinterp


def devinterp(seconds: float) -> list[Row]:
    """Time devinterp's samplers and ours in one process; no rows if it is not installed."""
    try:
        from devinterp.optim.sgmcmc import SGMCMC
    except ImportError:
        return []
    theirs = {"SGLD with localization": SGMCMC.sgld, "RMSprop": SGMCMC.rmsprop_sgld}
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, make in theirs.items():
            rival = make(list(Model(None, dtype).parameters()), lr=1e-5, nbeta=1000.0, localization=100.0)
            rms = "rms" if name == "RMSprop" else None
            ours = {
                f"{which}, {name}": ql.SGLD(Model(packed, dtype).parameters(), 1e-3, DATA, localization=100.0, preconditioner=rms)
                for which, packed in (("float32" if dtype == torch.float32 else "bf16", None), ("packed bfp8", "bfp8"))
            }  # fmt: skip
            all_ = {n: _contestant(s) for n, s in ours.items()} | {"devinterp": _contestant(rival)}
            times = _ns(measure(all_, seconds / 4))
            group = (
                f"one step beside devinterp, {str(dtype)[6:]} parameters, {bytes_of(rival):.1f} bytes a weight there"
            )
            for which, sampler in ours.items():
                label = f"{which}, {bytes_of(sampler):.1f} bytes"
                rows.append(
                    Row(group, label, times[which], "ns", "devinterp", times["devinterp"], "time", Goal("<=", 1 / 3))
                )
    return rows


def bytes_of(sampler: Any) -> float:
    """Return the bytes of weights and of all tensors in the state, a weight."""
    params = [p for group in sampler.param_groups for p in group["params"]]
    state = [t for p in params for t in sampler.state[p].values() if isinstance(t, Tensor) and t.numel() > 1]
    tensors = {_address(t): t.nbytes for t in (*params, *state)}
    return float(sum(tensors.values())) / COUNT


def _address(t: Tensor) -> int:
    return t.codes.data_ptr() if isinstance(t, QTensor) else t.data_ptr()
