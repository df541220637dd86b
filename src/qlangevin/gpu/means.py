"""Means that are rounded: where a number is, and its drift, read from memory. `Mean` of `quantization.laws`.

A mean is a tuple (x, other, old, v, variances, source, rate, sign, decay, sigma). ``x`` points to numbers, or to codes in units
of the gap ``old``. With drift = MOVE ``other`` points to the drift itself; with GRADIENT to the gradient g of a step, whose drift
is δ = rate (sign g + decay θ); with NOISY to the same, and the drift is δ + sigma ξ, as naive rounding has it. v is the variance
of Q^vc, or ``variances`` points to one for each element.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .generator import normal_at
from .laws import from_gaps

NO_DRIFT, MOVE, GRADIENT, NOISY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


class How(NamedTuple):
    """All that a kernel on blocks is compiled for."""

    rounding: int  # NEAREST, STOCHASTIC or CORRECTED
    purpose: int  # of the random numbers
    drift: int
    tiny: bool  # some gaps, or their inverses, are no normal numbers
    each: bool = False  # every element has its own variance
    codes: bool = False  # codes are read, not numbers
    values: bool = False  # numbers are written
    coded: bool = False  # codes are written
    masked: bool = False  # numbers are zero where ``positive`` is not


@triton.jit
def load_start(mean, at, inside, HOW: tl.constexpr):
    """Return numbers, or those that codes stand for, as float32."""
    start = tl.load(mean[0] + at, mask=inside, other=0).to(tl.float32)
    if HOW.codes:
        start = from_gaps(start, mean[2], HOW.tiny)
    return start


@triton.jit
def load_drift(mean, at, inside, start, HOW: tl.constexpr):
    """Return the drift of elements; it is not used if there is none."""
    if HOW.drift == NO_DRIFT:
        return start
    else:
        _, other, _, _, _, source, rate, sign, decay, sigma = mean
        move = tl.load(other + at, mask=inside, other=0).to(tl.float32)
        if HOW.drift != MOVE:
            move = rate * (sign * move + decay * start)
        if HOW.drift == NOISY:
            move = move + sigma * normal_at(source, at)
        return move


@triton.jit
def load_variance(mean, at, inside, HOW: tl.constexpr):
    """Return the variance of elements, or the one of all."""
    if HOW.each:
        return tl.load(mean[4] + at, mask=inside, other=0.0)
    else:
        return mean[3]


@triton.jit
def total_of(start, move, HOW: tl.constexpr):
    """Return the mean, rounded: near enough to choose a gap."""
    if HOW.drift == NO_DRIFT:
        return start
    else:
        return start + move
