"""The laws of `quantization.laws` on vectors, operation for operation, and the gaps of formats.

A number in gaps is a point (whole, rest): an integer, and a rest that keeps its digits beside it. A gap 2^e is a tuple
(lift, inverse, gap, down): x · lift · inverse is x in gaps, n · gap · down is n gaps. Near the ends of the range of float32 a
gap or its inverse is no normal number, so numbers are lifted by 2^64 or 2^-64 first. `native/rounding.h` has the same functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantization import laws, random
from .generator import bits_of, float_of

FAR = tl.constexpr(laws.FAR)
WIDE = tl.constexpr(laws.WIDE)
V0 = tl.constexpr(laws.V0)
NORMAL_BOUND = tl.constexpr(random.NORMAL_BOUND)
SIGN = tl.constexpr(0x80000000)
ONE = tl.constexpr(0x3F800000)  # the bits of 1


@triton.jit
def with_sign_of(size, x):
    """Return a number that is not negative with the sign of x."""
    return float_of(bits_of(size) | (bits_of(x) & SIGN))


@triton.jit
def sign_of(x):
    """Return -1 where x is negative, else 1; -0 is negative."""
    return float_of((bits_of(x) & SIGN) | ONE)


@triton.jit
def away(n):
    """Return the direction away from zero: -1 where n < 0, else 1."""
    return tl.where(n < 0.0, -1.0, 1.0)


@triton.jit
def positive(x):
    return tl.maximum(x, 0.0)


@triton.jit
def bounded(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def whole(x):
    """Return the integer part of x."""
    return with_sign_of(tl.floor(tl.abs(x)), x)


@triton.jit
def nearest_integer(x):
    """Return the nearest integer, half away from zero: the largest float below 1/2 is added, halves and all."""
    return with_sign_of(tl.floor(tl.abs(x) + 0.49999997), x)


# ---- gaps


@triton.jit
def gap_of(e, TINY: tl.constexpr):
    """Return the gap 2^e; formats whose gaps lie between 2^-100 and 2^100 (TINY is False) are spared the lifting."""
    if TINY:
        by = tl.where(e < -100, 64, tl.where(e > 100, -64, 0))
        lift, down = power_of_two(by), power_of_two(-by)
    else:
        by, lift, down = 0, 1.0, 1.0
    return lift, power_of_two(-e - by), power_of_two(e + by), down


@triton.jit
def power_of_two(e):
    """Return 2^e for exponents of normal numbers."""
    return float_of(((e + 127) << 23).to(tl.uint32, bitcast=True))


@triton.jit
def in_gaps(x, gap, TINY: tl.constexpr):
    """Return x in gaps, bounded; a NaN becomes a number here and is put back at the end."""
    lift, inverse, _, _ = gap
    if TINY:
        x = x * lift
    return bounded(x * inverse, -FAR, FAR)


@triton.jit
def variance_in_gaps(v, gap, TINY: tl.constexpr):
    """Return v in squared gaps, bounded."""
    lift, inverse, _, _ = gap
    if TINY:
        return tl.minimum(v * lift * inverse * lift * inverse, WIDE)
    return tl.minimum(v * inverse * inverse, WIDE)


@triton.jit
def from_gaps(n, gap, TINY: tl.constexpr):
    """Return the value of n gaps."""
    _, _, size, down = gap
    value = n * size
    if TINY:
        value = value * down
    return value


@triton.jit
def point_of(start, move, gap, TINY: tl.constexpr, MOVED: tl.constexpr):
    """Return start + move in gaps as (whole, rest)."""
    y = in_gaps(start, gap, TINY)
    n = whole(y)
    rest = y - n
    if MOVED:
        rest = rest + in_gaps(move, gap, TINY)
    return n, rest


@triton.jit
def nearest_to(point):
    """Return (n, r): the nearest integer, and what the point has beyond it."""
    integer, rest = point
    offset = nearest_integer(rest)
    return integer + offset, rest - offset


@triton.jit
def nearest_part(point, level):
    """Return (n, r): the multiple of 2^-level nearest to a point, and what the point has beyond it."""
    integer, rest = point
    offset = nearest_integer(rest * power_of_two(level)) * power_of_two(-level)
    return integer + offset, rest - offset


# ---- draws on the integers


@triton.jit
def picks(p, h):
    """Return a mask that has this probability for h, uniform between -1/2 and 1/2; what is beyond 1/2 is at the other end."""
    return ((h > 0.0) & (h < p)) | (h < p - 1.0)


@triton.jit
def settle_stochastic(n, r, h):
    """Draw Q^s: the neighbour on the other side of n + r is taken if h is between 0 and r."""
    return n + tl.where(h * (h - r) < 0.0, sign_of(h), 0.0)


@triton.jit
def settle_quiet(n, r, s, h):
    """Draw n + r with variance s, or that of Q^s if it is more, for s <= 1/4: one comparison does."""
    side = tl.abs(r)
    extra = positive(s - side * (1.0 - side)) * 0.5
    towards = float_of(bits_of(r) ^ (bits_of(h) & SIGN))  # r, or -r if h is negative
    return n + tl.where(tl.abs(h) < positive(towards) + extra, sign_of(h), 0.0)


@triton.jit
def spread(n, r, s, h):
    """Draw n + r with variance s, as far as three outcomes reach, or that of Q^s if it is more."""
    side = tl.abs(r)
    extra = tl.minimum(positive(s - side * (1.0 - side)), 1.0 - side) * 0.5
    up, down = picks(positive(r) + extra, h), picks(positive(-r) + extra, -h)
    return n + tl.where(up, 1.0, tl.where(down, -1.0, 0.0))


@triton.jit
def with_noise(point, s, gaussian, xi):
    """Return lines 4 of Algorithm 2 where ``gaussian``: the point with noise added, and the variance that is left, v_0."""
    integer, rest = point
    noisy = rest + tl.sqrt_rn(positive(s - V0)) * xi
    return (integer, tl.where(gaussian, noisy, rest)), tl.where(gaussian, V0, s)


@triton.jit
def outcomes(r, s, below, above):
    """Return (P(n - below), P(n + above)), with mean n + r and variance s; one of below, above may be 2, else they are 1."""
    plus, minus = positive(r), positive(-r)
    least = plus * (above - plus) + minus * (below - minus)
    up, down = plus * (1.5 - 0.5 * above), minus * (1.5 - 0.5 * below)  # plus / above, minus / below
    room = (1.0 - up - down) * (below * above)
    extra = tl.minimum(positive(s - least), room)
    both = below + above
    return down + tl.div_rn(extra, below * both), up + tl.div_rn(extra, above * both)


@triton.jit
def settle_wide(n, r, s, h, wide_at):
    """Draw n + r with variance s where the neighbour of ±wide_at on the far side is two away."""
    above, below = tl.where(n == wide_at, 2.0, 1.0), tl.where(n == -wide_at, 2.0, 1.0)
    p_down, p_up = outcomes(r, s, below, above)
    return n + tl.where(picks(p_up, h), above, tl.where(picks(p_down, -h), -below, 0.0))


@triton.jit
def reaches(y, s):
    """Return a bound on |outcome| if Gaussian noise is drawn."""
    return tl.abs(y) + tl.sqrt_rn(s) * NORMAL_BOUND + 1.5


@triton.jit
def feasible(n, r, s, wide_at):
    """Return a mask: True where three outcomes around n + r can have the variance s."""
    outwards = r * away(n)
    return s <= (1.0 + outwards) * (1.0 + tl.where(tl.abs(n) == wide_at, 1.0, 0.0) - outwards)


# ---- exponents


@triton.jit
def binade(size):
    """Return floor(log2 x) for x >= 0; very negative at zero, 127 at infinity."""
    tiny = size < 2.0**-100
    lifted = bits_of(tl.where(tiny, size * 2.0**64, size))
    e = (lifted >> 23).to(tl.int32) - tl.where(tiny, 127 + 64, 127)
    return tl.where(size == 0.0, -1000, tl.minimum(e, 127))


@triton.jit
def ceil_log2(size):
    """Return the least e with x <= 2^e; very negative at zero."""
    tiny = size < 2.0**-100
    lifted = bits_of(tl.where(tiny, size * 2.0**64, size))
    e = ((lifted + 0x7FFFFF) >> 23).to(tl.int32) - tl.where(tiny, 127 + 64, 127)
    return tl.where(size == 0.0, -1000, e)
