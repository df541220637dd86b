"""Rounding of formats in which every element stands alone: fixed point, floating point, and none at all.

A grid is a tuple (shift, min_gap, max_gap, top, low, high, fit, fit_three, fit_noise): the fields of `KernelGrid`, and SLACK
over top, top - 1/2 and top - 3/2, which bound how many gaps a law needs. `native/draw.h` has the same functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantization.formats import GridKind
from .generator import bits_of
from .laws import (
    NORMAL_BOUND,
    V0,
    binade,
    bounded,
    ceil_log2,
    feasible,
    from_gaps,
    gap_of,
    in_gaps,
    nearest_integer,
    nearest_part,
    nearest_to,
    point_of,
    settle_quiet,
    settle_stochastic,
    settle_wide,
    variance_in_gaps,
    with_noise,
)

NONE = tl.constexpr(int(GridKind.NONE))
FIXED = tl.constexpr(int(GridKind.FIXED))
BLOCK = tl.constexpr(int(GridKind.BLOCK))
FLOAT = tl.constexpr(int(GridKind.FLOAT))
NEAREST, STOCHASTIC, CORRECTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def onto(value, grid, total):
    """Return a value within the range of a grid; -0 becomes 0. It is NaN where ``total``, the number that was rounded, is."""
    _, _, _, _, low, high, _, _, _ = grid
    return tl.where(total == total, bounded(value, low, high) + 0.0, total)


@triton.jit
def float_gap(x, grid):
    """Return log2 of the gap of a floating format at x."""
    shift, min_gap, max_gap, _, _, _, _, _, _ = grid
    return tl.minimum(tl.maximum(binade(tl.abs(x)) - shift, min_gap), max_gap)


@triton.jit
def round_element(start, move, v, h, xi, grid, KIND: tl.constexpr, ROUNDING: tl.constexpr, MOVED: tl.constexpr,
                  TINY: tl.constexpr):  # fmt: skip
    """Return Q(start + move) of single elements: Q^d, Q^s for random numbers h, Q^vc(., v) for h and ξ."""
    total = start
    if MOVED:
        total = start + move
    if KIND == NONE:
        if ROUNDING == CORRECTED:
            noise = tl.sqrt_rn(v) * xi
            return start + ((move + noise) if MOVED else noise)
        return total
    if KIND == FIXED:
        return round_fixed(start, move, total, v, h, xi, grid, ROUNDING, MOVED, TINY)
    if ROUNDING == CORRECTED:
        return correct_float(start, move, total, v, h, xi, grid, MOVED, TINY)
    gap = gap_of(float_gap(total, grid), TINY)
    code = nearest_or_stochastic(start, move, total, h, gap, ROUNDING, MOVED, TINY)
    return onto(from_gaps(code, gap, TINY), grid, total)


@triton.jit
def nearest_or_stochastic(start, move, total, h, gap, ROUNDING: tl.constexpr, MOVED: tl.constexpr, TINY: tl.constexpr):
    """Return Q^d or Q^s on the multiples of a gap, in gaps."""
    if ROUNDING == NEAREST:
        return nearest_integer(in_gaps(total, gap, TINY))
    n, r = nearest_to(point_of(start, move, gap, TINY, MOVED))
    return settle_stochastic(n, r, h)


@triton.jit
def round_fixed(start, move, total, v, h, xi, grid, ROUNDING: tl.constexpr, MOVED: tl.constexpr, TINY: tl.constexpr):
    _, e, _, _, _, _, _, _, _ = grid
    gap = gap_of(e, TINY)
    if ROUNDING == CORRECTED:
        s = variance_in_gaps(v, gap, TINY)
        point, left = with_noise(point_of(start, move, gap, TINY, MOVED), s, s > V0, xi)
        n, r = nearest_to(point)
        code = settle_quiet(n, r, left, h)
    else:
        code = nearest_or_stochastic(start, move, total, h, gap, ROUNDING, MOVED, TINY)
    return onto(from_gaps(code, gap, TINY), grid, total)


@triton.jit
def nearest_float(point, e, grid):
    """Return (n, r) on a gap 2^e: the nearest number that is a float, as are n - 1 and n + 1; `laws.parts`."""
    shift, min_gap, _, top, _, _, _, _, _ = grid
    z = tl.maximum(tl.abs(point[0] + point[1]) + 1.0, tl.abs(point[1]) * (top * 2.0**-23))
    level = shift + 127 - (bits_of(z) >> 23).to(tl.int32)
    return nearest_part(point, tl.minimum(tl.maximum(level, 0), e - min_gap))


@triton.jit
def correct_float(start, move, total, v, h, xi, grid, MOVED: tl.constexpr, TINY: tl.constexpr):
    """Return Q^vc: Gaussian noise where the gap leaves room for it, then one of three outcomes; `Float.law`."""
    _, _, max_gap, top, _, _, _, fit, _ = grid
    sigma = tl.sqrt_rn(v)
    reach = (tl.abs(total) + sigma * NORMAL_BOUND) * fit
    e = tl.minimum(tl.maximum(float_gap(total, grid), ceil_log2(tl.minimum(sigma, reach))), max_gap)
    gap = gap_of(e, TINY)
    s = variance_in_gaps(v, gap, TINY)
    point = point_of(start, move, gap, TINY, MOVED)
    lift, _, size, _ = gap
    gaussian = (s > V0) & ((reach * lift if TINY else reach) <= size)
    n, r = nearest_float(point, e, grid)
    # Without room for Gaussian noise three outcomes must do; where even they are too narrow, twice the gap is enough.
    e += ((gaussian == 0) & (feasible(n, r, s, top) == 0) & (e < max_gap)).to(tl.int32)
    gap = gap_of(e, TINY)
    point = point_of(start, move, gap, TINY, MOVED)
    noisy, left = with_noise(point, variance_in_gaps(v, gap, TINY), gaussian, xi)
    n, r = nearest_float(noisy, e, grid)
    return onto(from_gaps(settle_wide(n, r, left, h, top), gap, TINY), grid, total)


@triton.jit
def round_code(code, move, v, h, xi, grid, ROUNDING: tl.constexpr):
    """Return the code of Q(start + move) in fixed point, where the start has this code, so that there is nothing to divide.

    For gaps that are normal numbers, and so are their inverses.
    """
    _, e, _, _, low, high, _, _, _ = grid
    gap = gap_of(e, False)
    rest = in_gaps(move, gap, False)
    if ROUNDING == CORRECTED:
        s = variance_in_gaps(v, gap, False)
        (code, rest), left = with_noise((code, rest), s, s > V0, xi)
        n, r = nearest_to((code, rest))
        n = settle_quiet(n, r, left, h)
    else:
        n, r = nearest_to((code, rest))
        n = settle_stochastic(n, r, h)
    return bounded(n, low * gap[1], high * gap[1]).to(tl.int32)
