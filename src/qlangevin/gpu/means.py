"""Means that are rounded: where a number is, and its drift, read from memory. `Mean` of `quantization.laws`.

A mean is a tuple (x, other, rate, sign, decay, sigma, source). ``x`` points to numbers or to codes. With DRIFT = MOVE ``other`` points to the
drift itself; with GRADIENT to the gradient g of a step, whose drift is δ = rate (sign g + decay θ); with NOISY to the same, and the
drift is δ + sigma ξ, as naive rounding has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .generator import normal_at
from .laws import from_gaps

NO_DRIFT, MOVE, GRADIENT, NOISY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def load_start(x, at, inside, gap, CODES: tl.constexpr, TINY: tl.constexpr):
    """Return numbers, or those that codes in units of a gap stand for, as float32."""
    start = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if CODES:
        start = from_gaps(start, gap, TINY)
    return start


@triton.jit
def load_drift(mean, at, inside, start, DRIFT: tl.constexpr):
    """Return the drift of elements; it is not used if there is none."""
    _, other, rate, sign, decay, sigma, source = mean
    if DRIFT == NO_DRIFT:
        return start
    move = tl.load(other + at, mask=inside, other=0).to(tl.float32)
    if DRIFT != MOVE:
        move = rate * (sign * move + decay * start)
    if DRIFT == NOISY:
        move = move + sigma * normal_at(source, at)
    return move


@triton.jit
def total_of(start, move, DRIFT: tl.constexpr):
    """Return the mean, rounded: near enough to choose a gap."""
    if DRIFT == NO_DRIFT:
        return start
    return start + move
