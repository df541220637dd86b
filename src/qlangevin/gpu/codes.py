"""Numbers to codes and back, lossless on the grid: `encode` and `decode` of the format classes. See `native/codes.h`."""

from __future__ import annotations

import triton
import triton.language as tl

from .elements import FIXED
from .generator import bits_of
from .laws import gap_of, in_gaps, power_of_two


@triton.jit
def integer_code(value, gap, TINY: tl.constexpr):
    """Return value / gap as an integer; numbers that are on no grid, NaN too, are bounded: converting them is undefined."""
    y = in_gaps(value, gap, TINY)
    return tl.where(y == y, y, 0.0).to(tl.int32)


@triton.jit
def float_code(value, grid, BITS: tl.constexpr):
    """Return the sign bit, and the rank of |value| among the numbers of a floating format, counted from zero."""
    shift, min_gap, _, top, _, _, _, _, _ = grid
    size = tl.abs(value)
    lift, inverse, gap, down = gap_of(min_gap, True)
    normal = gap * down * top * 0.5  # 2^emin, where gradual underflow ends
    under = (tl.where(size < normal, size, 0.0) * lift * inverse).to(tl.int32)
    tiny = size < 2.0**-100
    bits = bits_of(tl.where(tiny, size * 2.0**64, size))
    above = (bits >> (23 - shift).to(tl.uint32)).to(tl.int32)
    over = above - ((min_gap + shift - 1 + 127 + tl.where(tiny, 64, 0)) << shift)
    sign = ((bits_of(value) >> 31) << (BITS - 1)).to(tl.int32, bitcast=True)
    return sign | tl.where(size < normal, under, over)


@triton.jit
def float_value(code, grid, BITS: tl.constexpr):
    """Return the number that a code of a floating format stands for."""
    shift, min_gap, _, _, _, _, _, _, _ = grid
    bits = code.to(tl.int32)
    rank = bits & ((1 << (BITS - 1)) - 1)
    binade = rank >> shift
    first = (binade * 0 + 1) << shift
    digits = (rank & (first - 1)) + tl.where(binade > 0, first, 0)
    e = min_gap + tl.where(binade > 0, binade - 1, 0)
    low = e < -100
    # A code that stands for no number may have any e: from 128 on 2^e is infinite.
    gap = power_of_two(tl.minimum(e, 128) + tl.where(low, 64, 0)) * tl.where(low, 2.0**-64, 1.0)
    return tl.where(bits < 0, -1.0, 1.0) * digits.to(tl.float32) * gap


@triton.jit
def code_of(value, gap, grid, KIND: tl.constexpr, BITS: tl.constexpr, TINY: tl.constexpr):
    """Return the code of a number on the grid; ``gap`` is that of fixed point or of a block."""
    if KIND == FIXED:
        return integer_code(value, gap, TINY)
    return float_code(value, grid, BITS)
