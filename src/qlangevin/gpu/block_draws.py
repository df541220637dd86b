"""Draws of the elements of blocks, after the decision on the block."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import beyond, draw_on, mean_point
from .elements import CORRECTED, NEAREST
from .laws import (
    away,
    bounded,
    from_gaps,
    gap_of,
    in_gaps,
    nearest_integer,
    nearest_to,
    picks,
    positive,
    settle_quiet,
    settle_stochastic,
    spread,
    variance_in_gaps,
)
from .means import total_of
from .rows import may_leave


@triton.jit
def draw_simply(start, move, s, amplitude, h, xi, gap, top, HOW: tl.constexpr):
    """Return codes on one gap if no element needs a choice of its own: the variance is s <= 1/4 after noise of this amplitude."""
    if HOW.rounding == NEAREST:
        return bounded(nearest_integer(in_gaps(total_of(start, move, HOW), gap, HOW.tiny)), -top, top)
    integer, rest = mean_point(start, move, gap, HOW)
    if HOW.rounding == CORRECTED:
        n, r = nearest_to((integer, rest + amplitude * xi))
        return settle_quiet(n, r, s, h)
    n, r = nearest_to((integer, rest))
    return settle_stochastic(n, r, h)


@triton.jit
def draw_compensated(start, move, v, q, h, gap, coarse, top, HOW: tl.constexpr):
    """Return codes on the fine gap, of outcomes that stay inside, with what is left of the variance: (s - Q w)/(1 - Q)."""
    n, r = nearest_to(mean_point(start, move, gap, HOW))
    _, beside = nearest_to(mean_point(start, move, coarse, HOW))
    side = tl.abs(beside)
    w = tl.maximum(variance_in_gaps(v, coarse, HOW.tiny), side * (1.0 - side)) * 4.0
    left = positive(tl.div_rn(variance_in_gaps(v, gap, HOW.tiny) - q * w, tl.maximum(1.0 - q, 2.0**-20)))
    a, sign = tl.abs(r), away(n)
    twice = tl.minimum(positive(left - a * (1.0 - a)), a) * 0.5
    inwards = -h * sign
    steps = tl.where((inwards > 0.0) & (inwards < a - twice), tl.where(inwards < twice, 2.0, 1.0), 0.0)
    return tl.where(tl.abs(n) == top, n - sign * steps, spread(n, r, left, h))


@triton.jit
def draw_decided(start, move, v, place, decision, h, xi, coins, grid, HOW: tl.constexpr):
    """Return values of the elements of any block: the last lines of `draw_in_turn` and `draw_tossed`."""
    fine, coarse, is_coarse, tossed, spared, q, alone, last = decision
    _, _, _, top, low, high, _, _, _ = grid
    gap, wide_gap = gap_of(fine, HOW.tiny), gap_of(coarse, HOW.tiny)
    point = mean_point(start, move, gap, HOW)
    risk = may_leave(point, variance_in_gaps(v, gap, HOW.tiny), top) & (fine < coarse)
    on_fine = draw_on(start, move, v, gap, grid, h, xi, HOW)
    on_coarse = draw_on(start, move, v, wide_gap, grid, h, xi, HOW)
    left = draw_compensated(start, move, v, q, h, gap, wide_gap, top, HOW)
    left = bounded(from_gaps(left, gap, HOW.tiny), low, high) + 0.0

    in_turn = tl.where(is_coarse | risk, on_coarse, tl.where(spared, left, on_fine))
    in_turn = tl.where(place == alone, last, in_turn)

    n, r = nearest_to(point)
    by, sign = beyond(n, r, top), away(n)
    b = tl.where(risk, positive(by), 0.0)
    aside = tl.where(picks(b, h * sign) | (coins >= 0.0), 1.0, -1.0)
    edge = from_gaps(sign * tl.where(is_coarse, top + aside, top), gap, HOW.tiny)
    after_toss = tl.where(b > 0.0, bounded(edge, low, high) + 0.0, tl.where(is_coarse, on_coarse, left))
    return tl.where(tossed, after_toss, in_turn)
