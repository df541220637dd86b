"""Steps with a centre, a mask, a preconditioner or velocities, as `operations`: their launches, and the bytes that they move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import qlangevin as ql
from qlangevin.gpu import split
from qlangevin.gpu.functions import this_module
from qlangevin.quantization.backend import NO_ERROR, Moments, TensorStep, Velocity, suspended
from qlangevin.quantization.qtensor import QTensor
from qlangevin.sampling.kernel_step import Counters, step_by_kernels
from qlangevin.sampling.localization import hold
from qlangevin.sampling.masks import pack_mask
from qlangevin.sampling.settings import StepSettings

__all__ = ["steps_beside"]

BIT = 0.125
RMS = {"preconditioner": "rms"}
MOST_IMPORTANT = ("fixed8.6", "fp8_e4m3", "bfp8, rows of 2304", "bfp8/tensor")  # layouts that have all kinds


class Kind(NamedTuple):
    """A step that is more than SGLD's."""

    settings: dict[str, Any]
    center: str | None = None
    masked: bool = False


KINDS = {
    "gains": Kind(RMS),
    "velocities of bfp8, gains": Kind({"friction": 0.1, "velocity": "bfp8", **RMS}),
    "localization": Kind({}, center="bf16"),
    "localization, stochastic": Kind({"rounding": "stochastic"}, center="bfp8"),
    "gains, a mask, gradients fp8_e5m2": Kind({**RMS, "gradients": "fp8_e5m2"}, masked=True),
    "velocities": Kind({"friction": 0.1}),
    "velocities, nearest": Kind({"friction": 0.1, "rounding": "nearest"}),
    "velocities, a mask, localization": Kind({"friction": 0.1, "velocity": "fixed8.4"}, center="fixed8.6", masked=True),
}
Step = tuple[str, float, Callable[[], None], int, int, float, float]


def steps_beside(name: str, format: str, shape: tuple[int, ...]) -> Iterator[Step]:
    """Yield steps as fields of `Operation`: all kinds for the most important layouts, else those of most registers."""
    x = (torch.randn(shape) * 0.1).clamp(-0.12, 0.12)  # as in `operations`
    for kind in KINDS if name in MOST_IMPORTANT else [*KINDS][:2]:
        with suspended(this_module):  # making tensors takes the interpreter longer than a step
            t, settings = _make(x, format, KINDS[kind])
        long = shape[1] > split.LONGEST
        label = f"step on codes, {name}, {kind}"
        yield label, _least(t), partial(_step, t, settings), 0, 0, _again(t, settings, long), _scratch(t, settings)


def _make(x: Tensor, format: str, kind: Kind) -> tuple[TensorStep, StepSettings]:
    localization = 1.0 if kind.center else 0.0
    s = StepSettings(1e-3, 1e6, localization=localization, masked=kind.masked, **kind.settings)
    theta, moments, velocity = ql.encode(x, format), None, None
    if s.rms is not None:
        moments = Moments(hold(torch.ones_like(x), str(s.rms.format)), 1.0)
    if s.friction is not None:
        velocity = Velocity(hold(x * 0, s.velocity_format(theta)), 1.0, ql.Key(1))
    center = hold(ql.quantize(x, kind.center), kind.center) if kind.center else None
    mask = pack_mask(x > 0, x.shape, x.device) if kind.masked else None
    return TensorStep(theta, x * 1e-3, ql.Key(0), None, center, mask, moments, velocity), s


def _step(t: TensorStep, settings: StepSettings) -> None:
    """Step one tensor as a sampler does: begin, then the step."""
    counts, flags = torch.zeros(1, dtype=torch.int64), torch.full((2,), NO_ERROR, dtype=torch.int32)
    this_module.begin_step([t.gradient], [0], counts, flags)
    step_by_kernels(this_module, [t], settings, Counters([0], counts, flags))


def _size(t: Tensor | None) -> int:
    """Return the bytes of one element."""
    return 0 if t is None else t.codes.itemsize if isinstance(t, QTensor) else t.itemsize


def _least(t: TensorStep) -> float:
    """Return the bytes an element without scratch memory: all is read once, the gradient twice, and what changes is written."""
    changed = [t.theta, *(kept.values for kept in (t.moments, t.velocity) if kept is not None)]
    return 8 + 2 * sum(map(_size, changed)) + _size(t.center) + (0 if t.mask is None else BIT)


def _scratch(t: TensorStep, s: StepSettings) -> float:
    """Return the bytes of moves, variances, old velocities and gains, and of what is read again because of them."""
    corrected, masked, gains = s.rounding == "corrected", t.mask is not None, t.moments is not None
    spread = 8 if corrected and (masked or gains) else 0
    if t.velocity is None:
        return 8 + spread + _size(t.theta)
    velocity = _size(t.velocity.values)
    moves, rest = 16 + (4 if corrected else 0), 16 + (8 if gains else 0)  # rest: what `kick` leaves to `follow`
    kicked = velocity + (velocity if corrected else 0) + (BIT if masked else 0)
    return moves + rest + spread + (8 if corrected and masked else 0) + kicked + _size(t.theta)


def _again(t: TensorStep, s: StepSettings, long: bool) -> float:
    """Return the bytes that are read twice if blocks are long: those of weights, and of velocities that are blocks, too."""
    corrected, masked, gains = s.rounding == "corrected", t.mask is not None, t.moments is not None
    again = _size(t.theta) + 4 + (4 if corrected and (masked or gains) else 0)
    if t.velocity is not None and long and getattr(t.velocity.values, "exponents", None) is not None:
        again += _size(t.velocity.values) + 4 + (4 if corrected and masked else 0)
    return again
