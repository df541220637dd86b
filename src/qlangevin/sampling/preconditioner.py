"""Preconditioning by a running mean of squared gradients, as RMSprop does, kept in one byte a weight.

    G_i = 1 / (eps + sqrt(V_i))                     the gain of weight i: its drift and its variance are multiplied by it
    V'  = Q^s(decay V + (1 - decay) g²)             after the step, g = Q_G(∇loss), until ``freeze_after`` steps were taken

V of a step is made of the gradients of earlier steps alone, so that G does not depend on the gradient it multiplies; only the
first step, which has none before it, begins with V = g². Stochastic rounding keeps V unbiased in a format with two digits.

Squares of gradients leave the range of 8-bit floats easily. So a tensor keeps V in units of its own: (g · scale)² with a power
of two that is chosen from its first gradient, and lowered when a look now and then finds V near the end of the range.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .._validate import check_integer
from ..quantization import operators, random
from ..quantization.formats import FP32, Float, Format, parse
from ..quantization.qtensor import decoded_as
from ..quantization.random import Key, root

__all__ = [
    "RMS",
    "begin_moments",
    "choose_scale",
    "gain",
    "next_moments",
    "parse_preconditioner",
    "rescale",
    "rescale_in_place",
]

FIRST = 3  # log2 of the largest gradient of the first step, times the scale
ROOM = 16.0  # a scale is changed when V is this close to the end of its format's range


@dataclass(frozen=True)
class RMS:
    """Precondition each weight by G = 1 / (eps + sqrt(V)), V the running mean of its squared gradients.

    A step is θ' = θ - lr G (∇loss + λθ + ...) with noise of variance 2 lr T G / N. While V changes, the law is that of
    preconditioned SGLD without the term Γ = ∂G/∂θ (Li et al., 2016), which is small if V changes slowly; from ``freeze_after``
    steps on G is constant, and the chain samples the posterior as SGLD does.

    Args:
        decay: of the running mean, at least 0 and below 1.
        eps: added to sqrt(V), in units of the gradient of the mean loss. Gradients smaller than this are not told apart, and no
            gain is larger than 1/eps: weights that have no gradients, such as those of words that do not occur, have that gain.
        format: V's, floating point; one byte by default.
        freeze_after: the number of steps after which V stays as it is; None: never.
    """

    decay: float = 0.99
    eps: float = 1e-3
    format: str | Format = "fp8_e5m2"
    freeze_after: int | None = None

    def __post_init__(self) -> None:
        if not (_is_real(self.decay) and 0 <= self.decay < 1):
            raise ValueError(f"decay must be at least 0 and below 1, got {self.decay!r}")
        if not (_is_real(self.eps) and 0 < self.eps < math.inf):
            raise ValueError(
                f"eps must be a positive number, got {self.eps!r}; without it weights without gradients have no G"
            )
        parsed = parse(self.format)
        if not isinstance(parsed, Float):
            raise ValueError(
                f"format must be floating point, such as 'fp8_e5m2' or 'bf16', got {parsed}: squares of gradients differ by "
                "orders of magnitude"
            )
        if self.freeze_after is not None:
            object.__setattr__(self, "freeze_after", check_integer("freeze_after", self.freeze_after, 1))
        object.__setattr__(self, "decay", float(self.decay))
        object.__setattr__(self, "eps", float(self.eps))
        object.__setattr__(self, "format", str(parsed))

    def __str__(self) -> str:
        return f"rms(decay={self.decay!r}, eps={self.eps!r}, format={self.format}, freeze_after={self.freeze_after})"

    def is_frozen(self, step: int) -> bool:
        """Return True if V no longer changes in this step; steps are counted from 1."""
        return self.freeze_after is not None and step > self.freeze_after


def _is_real(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


_NAME = re.compile(r"rms\(decay=([^,]+), eps=([^,]+), format=([^,]+), freeze_after=(\w+)\)")


@lru_cache(maxsize=64)
def parse_preconditioner(given: str | RMS) -> RMS:
    """Return the preconditioner that a name stands for: ``"rms"``, or what ``str`` made of one."""
    if isinstance(given, RMS):
        return given
    if given == "rms":
        return RMS()
    match = _NAME.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise ValueError(f"preconditioner must be qlangevin.RMS(...), 'rms' or None, got {given!r}")
    return RMS(float(match[1]), float(match[2]), match[3], None if match[4] == "None" else int(match[4]))


def choose_scale(gradient: Tensor, rms: RMS) -> float:
    """Return the power of two by which gradients are multiplied before they are squared."""
    largest = float(gradient.detach().abs().max()) if gradient.numel() else 0.0
    exponent = math.frexp(largest if 0 < largest < math.inf else rms.eps)[1]
    return 2.0 ** min(max(FIRST - exponent, -60), 60)


def begin_moments(g: Tensor, scale: float, rms: RMS, key: Key) -> Tensor:
    """Return Q^s(g²), in units of the scale, in float32 or float64."""
    return _round((g * scale) * (g * scale), rms, key)


def next_moments(moments: Tensor, g: Tensor, scale: float | Tensor, rms: RMS, key: Key) -> Tensor:
    """Return V' = Q^s(decay V + (1 - decay) g²), in units of the scale."""
    scaled = g * scale
    return _round(rms.decay * moments + (1 - rms.decay) * (scaled * scaled), rms, key)


def gain(moments: Tensor, scale: float | Tensor, rms: RMS) -> Tensor:
    """Return G = 1 / (eps + sqrt(V)) for V in units of the scale."""
    return 1.0 / (rms.eps + root(moments) * (1 / scale))


def rescale(moments: Tensor, gradient: Tensor, scale: float, rms: RMS) -> tuple[Tensor, float] | None:
    """Return V, as a plain tensor, and a smaller scale; None if V and the gradient are far from the end of the range."""
    values = decoded_as(moments, torch.float32)
    if values.numel() == 0:
        return None
    largest = max(float(values.max()), (float(gradient.detach().abs().max()) * scale) ** 2)
    if largest < parse(rms.format).high / ROOM:
        return None
    smaller = min(scale / ROOM, choose_scale(gradient, rms))
    return values * (smaller / scale) ** 2, smaller


def rescale_in_place(moments: Tensor, gradient: Tensor, scale: Tensor, rms: RMS, clear: Tensor | None = None) -> None:
    """Do as `rescale` says to V and to a scale on its device, without waiting for it; nothing unless ``clear``, if given."""
    values = decoded_as(moments, torch.float32)
    if values.numel() == 0:
        return
    most = gradient.detach().abs().max().double()
    largest = torch.maximum(values.max().double(), (most * scale).square())
    due = largest >= parse(rms.format).high / ROOM
    due = due if clear is None else due & clear
    exponent = torch.frexp(torch.where(most > 0, most, rms.eps))[1]
    chosen = torch.ldexp(torch.ones_like(scale), (FIRST - exponent).clamp(-60, 60))
    smaller = torch.where(due, torch.minimum(scale / ROOM, chosen), scale)
    moments.copy_(values * (smaller / scale).square())
    scale.copy_(smaller)


def _round(values: Tensor, rms: RMS, key: Key) -> Tensor:
    format = parse(rms.format)
    if format == FP32:
        return values.clamp_max(format.high)
    rounded: Tensor = operators.quantize_op(values, str(format), "stochastic", *operators.key_bits(key), random.MOMENT)
    return rounded
