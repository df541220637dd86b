"""Blocks that share an exponent: decisions about a block before it is drawn. The functions of `quantization.block_rounding`.

Nearly all blocks are drawn on the gap that their largest number sets. A block some of whose outcomes might not fit there needs
the two gaps, fine and coarse, of `block_rounding`: a program finds them by passes over the block (`find_risks`, `find_landings`),
and decides (`decide`). A decision is a tuple of columns

    (fine, coarse, is_coarse, tossed, spared, q, place, last)

log2 of both gaps; whether the block landed on the coarse one; whether a coin was tossed for it; whether those that are not at
risk get what is left of the variance, and the probability q of that; and the place in the block of the coordinate that was drawn
alone, -1 if none was, and its value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantization import random
from .elements import CORRECTED
from .generator import bits_of, centered_at, normal_at
from .laws import (
    V0,
    away,
    bounded,
    feasible,
    from_gaps,
    gap_of,
    nearest_to,
    outcomes,
    picks,
    point_of,
    positive,
    settle_wide,
    spread,
    variance_in_gaps,
    with_noise,
)
from .means import NO_DRIFT, total_of
from .rows import in_order, is_gaussian, load_in_order, may_leave

COIN = tl.constexpr(random.COIN)
UNIT = tl.constexpr(2.0**-36)  # of probabilities that are added up


@triton.jit
def mean_point(start, move, gap, HOW: tl.constexpr):
    """Return a mean in gaps."""
    return point_of(start, move, gap, HOW.tiny, HOW.drift != NO_DRIFT)


@triton.jit
def draw_on(start, move, v, gap, grid, h, xi, HOW: tl.constexpr):
    """Return Q^vc(start + move, v) on one gap, as a value within the range."""
    _, _, _, top, low, high, _, _, _ = grid
    point = mean_point(start, move, gap, HOW)
    s = variance_in_gaps(v, gap, HOW.tiny)
    noisy, left = with_noise(point, s, is_gaussian(point, s, top), xi)
    n, r = nearest_to(noisy)
    return bounded(from_gaps(spread(n, r, left, h), gap, HOW.tiny), low, high) + 0.0


# ---- passes over the blocks


@triton.jit
def find_risks(mean, rows, first, last, fine, grid, HOW: tl.constexpr, C: tl.constexpr):
    """Return columns: how many coordinates are at risk on the fine gap, and the largest of them.

    The largest is its size's bits, above the bits of minus its place, so that of equals the first is the greatest.
    """
    start, _ = rows
    top, gap = grid[3], gap_of(fine, HOW.tiny)
    count = tl.zeros([start.shape[0], C], tl.int32)
    largest = tl.zeros([start.shape[0], C], tl.int64)
    for chunk in range(first, last):
        place, inside = in_order(rows, chunk, C)
        x, move, each = load_in_order(mean, rows, chunk, HOW, C)
        s = variance_in_gaps(each, gap, HOW.tiny)
        risk = may_leave(mean_point(x, move, gap, HOW), s, top) & inside
        size = bits_of(tl.abs(total_of(x, move, HOW))).to(tl.int64)
        count += risk.to(tl.int32)
        largest = tl.maximum(largest, tl.where(risk, (size << 32) | (0xFFFFFFFF - place.to(tl.int64)), 0))
    return tl.sum(count, 1)[:, None], tl.max(largest, 1)[:, None]


@triton.jit
def place_of(largest):
    """Return the place in `find_risks`'s largest."""
    return (0xFFFFFFFF - (largest & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def find_landings(mean, rows, first, last, fine, place_alone, grid, HOW: tl.constexpr, C: tl.constexpr):
    """Return columns about the coordinates at risk: how many but the one drawn alone land outside of the fine grid if drawn on
    the coarse one; and, if a coin is tossed, the Q that they need, how many jump, and Σ b and Σ b² in units.
    """
    start, _ = rows
    R: tl.constexpr = start.shape[0]
    top, gap, coarse = grid[3], gap_of(fine, HOW.tiny), gap_of(fine + 1, HOW.tiny)
    limit = from_gaps(top, gap, HOW.tiny)
    outside, jumps = tl.zeros([R, C], tl.int32), tl.zeros([R, C], tl.int32)
    needed = tl.zeros([R, C], tl.float32)
    total, squares = tl.zeros([R, C], tl.int64), tl.zeros([R, C], tl.int64)
    for chunk in range(first, last):
        place, inside = in_order(rows, chunk, C)
        x, move, each = load_in_order(mean, rows, chunk, HOW, C)
        h, xi = bits_in_order(mean[5], start + place, HOW)
        s = variance_in_gaps(each, gap, HOW.tiny)
        point = mean_point(x, move, gap, HOW)
        risk = may_leave(point, s, top) & inside
        landed = draw_on(x, move, each, coarse, grid, h, xi, HOW)
        outside += (risk & (place != place_alone) & (tl.abs(landed) > limit)).to(tl.int32)

        n, r = nearest_to(point)
        by, sign = beyond(n, r, top), away(n)
        b, a = tl.where(risk & (by > 0.0), by, 0.0), positive(-by)
        inner = tl.div_rn(positive(s - a * (2.0 - a)), tl.maximum(1.0 - (a + a), 0.5))
        needed = tl.maximum(needed, tl.where(risk, tl.where(by > 0.0, s + b * b, inner), 0.0))
        total += (b * 2.0**36).to(tl.int64)
        squares += (b * b * 2.0**36).to(tl.int64)
        jumps += (risk & (by > 0.0) & picks(b, h * sign)).to(tl.int32)
    return (
        tl.sum(outside, 1)[:, None], tl.max(needed, 1)[:, None], tl.sum(jumps, 1)[:, None],
        tl.sum(total, 1)[:, None], tl.sum(squares, 1)[:, None],
    )  # fmt: skip


@triton.jit
def beyond(n, r, top):
    """Return |y| - N."""
    return r * away(n) + (tl.abs(n) - top)


# ---- one coordinate


@triton.jit
def bits_in_order(source, index, HOW: tl.constexpr):
    """Return (h, ξ) of elements given by their index; ξ is not used unless the rounding is corrected."""
    h = centered_at(source, index, HOW.purpose)
    return h, (normal_at(source, index) if HOW.rounding == CORRECTED else h)


@triton.jit
def draw_alone(point, s, h, gap, grid, HOW: tl.constexpr):
    """Return (draw, probability, possible) of one coordinate on the union of both grids.

    The probability is that of landing outside; it is possible if three outcomes there can have the variance.
    """
    _, _, _, top, low, high, _, _, _ = grid
    n, r = nearest_to(point)
    size, edge = tl.abs(n), top + 1.0
    possible = feasible(n, r, s, edge) & (tl.where(size == edge, size + 2.0, size) <= 2.0 * top)
    p_in, p_out = outcomes(r * away(n), s, size * 0.0 + 1.0, tl.where(size == edge, 2.0, 1.0))
    outside = tl.where(size == top, p_out, tl.where(size == edge, 1.0 - p_in, tl.where(size > top, 1.0, 0.0)))
    value = bounded(from_gaps(settle_wide(n, r, s, h, edge), gap, HOW.tiny), low, high) + 0.0
    return value, outside, possible


# ---- decisions


@triton.jit
def no_risk(gap):
    """Return the decision on a block that is drawn on one gap."""
    never = gap < -1000
    return gap, gap, never, never, never, gap * 0.0, gap * 0 - 1, gap * 0.0


@triton.jit
def decide(x, move, v, greatest, start, fine, count, place, landings, source, grid, HOW: tl.constexpr):
    """Return the decision on blocks of which some coordinates are at risk: `draw_in_turn` and `draw_tossed`.

    x, move and v are those of the coordinate at ``place``, the largest at risk; ``greatest`` is the largest v of the block.
    """
    outside, needed, jumps, total, squares = landings
    top, gap, coarse = grid[3], gap_of(fine, HOW.tiny), gap_of(fine + 1, HOW.tiny)
    quiet = variance_in_gaps(greatest, gap, HOW.tiny) <= V0
    tossed = (count > 1) & quiet

    h, xi = bits_in_order(source, start + place, HOW)
    s = variance_in_gaps(v, gap, HOW.tiny)
    alone, p_outside, possible = draw_alone(mean_point(x, move, gap, HOW), s, h, gap, grid, HOW)
    last = tl.where(possible & (outside == 0), alone, draw_on(x, move, v, coarse, grid, h, xi, HOW))
    is_outside = (outside > 0) | (tl.abs(last) > from_gaps(top, gap, HOW.tiny))

    sum_b, sum_squares = total.to(tl.float32) * UNIT, squares.to(tl.float32) * UNIT
    jump = bounded(sum_b - (sum_b * sum_b - sum_squares) * 0.5, 0.0, 1.0)  # 1 - P
    q_coarse = tl.maximum(needed, jump)
    coin = tl.div_rn(q_coarse - jump, tl.maximum(1.0 - jump, UNIT))
    heads = tl.abs(centered_at(source, start, COIN)) < coin * 0.5

    is_coarse = tl.where(tossed, heads | (jumps > 0), is_outside)
    spared = tossed | ((count == 1) & quiet & possible)
    q = tl.where(tossed, q_coarse, p_outside)
    return fine, fine + 1, is_coarse, tossed, spared, q, tl.where(tossed, -1, place), last
