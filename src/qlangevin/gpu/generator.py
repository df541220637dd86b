"""Random bits: Philox4x32-7 and Box-Muller, the same numbers as `quantization.random`, operation for operation.

A tile is 64 elements: counter 16 t + l yields four words, and word k is that of element 64 t + 16 k + l. So a program takes a
vector of counters, and whatever it does with random numbers it does four times, for k = 0 .. 3, on vectors of elements that
lie 16 apart. No word changes its lane. `native/philox.h` has the same functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantization import random

ACTIVATION = tl.constexpr(random.ACTIVATION)
ERROR = tl.constexpr(random.ERROR)
NOISE = tl.constexpr(random.NOISE)
REST = tl.constexpr(random.ACTIVATION_REST - random.ACTIVATION)  # from a narrow purpose to that of its further bits
SQRT_HALF = tl.constexpr(0x3F3504F3)  # the bits of sqrt(1/2)


@triton.jit
def bits_of(x):
    """Return the bits of a float32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    """Return the float32 that has these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def words(source, PURPOSE: tl.constexpr, counter):
    """Return the four words of each counter; ``source`` is the key and the step, two words each."""
    key0, key1, step0, step1 = source
    c0 = counter.to(tl.uint32)
    c1, c2, c3 = c0 * 0 + (PURPOSE << 24), c0 * 0 + step0, c0 * 0 + step1
    for _ in tl.static_range(7):
        product0, product1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0, (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key0, key1 = key0 + 0x9E3779B9, key1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def signed_odd(word):
    """Return a word as a signed integer, made odd."""
    return (word | 1).to(tl.int32, bitcast=True)


@triton.jit
def centered(source, PURPOSE: tl.constexpr, tile, lane):
    """Return `random.centered` of the elements of tiles, for k = 0 .. 3; lanes are 0 .. 15."""
    if PURPOSE == ACTIVATION or PURPOSE == ERROR:
        w = words(source, PURPOSE, (tile >> 1) * 16 + lane)  # two numbers in a word: an even tile has the low halves
        rest = words(source, PURPOSE + REST, tile * 16 + lane)
        up = 16 - (tile & 1) * 16
        return (
            narrow(w[0], rest[0], up),
            narrow(w[1], rest[1], up),
            narrow(w[2], rest[2], up),
            narrow(w[3], rest[3], up),
        )
    w = words(source, PURPOSE, tile * 16 + lane)
    return wide(w[0]), wide(w[1]), wide(w[2]), wide(w[3])


@triton.jit
def wide(word):
    """Return h of a word: a signed integer, made odd, times 2^-32."""
    return signed_odd(word).to(tl.float32) * 2.0**-32


@triton.jit
def narrow(word, rest, up):
    """Return h of one half of a word and 32 more bits: (j + (k + 1/2) 2^-32) 2^-16; ``up`` is 16 for the low half, else 0."""
    j = (word << up.to(tl.uint32)).to(tl.int32, bitcast=True) >> 16
    return (j.to(tl.float32) + (rest.to(tl.float32) + 0.5) * 2.0**-32) * 2.0**-16


@triton.jit
def negative_log(k):
    """Return -ln u for u = (k + 1/2) / 2^31.

    u = 2^e (1 + f), ln(1 + f) = f - f^2/2 + f^3 P(f); near 1, f comes from 2^31 - 1 - k.
    """
    shifted = bits_of(k.to(tl.float32) + 0.5) - (SQRT_HALF + (31 << 23))
    e = (shifted.to(tl.int32, bitcast=True) >> 23).to(tl.float32)
    complement = ((0x7FFFFFFF - k).to(tl.float32) + 0.5) * -(2.0**-31)
    f = tl.where(e == 0.0, complement, float_of((shifted & 0x7FFFFF) + SQRT_HALF) - 1.0)
    p = f * -0.0869833380 + 0.142670542  # of -P, which saves a negation at the end
    p = p * f + -0.149152264
    p = p * f + 0.165776476
    p = p * f + -0.199630320
    p = p * f + 0.250013351
    p = p * f + -0.333339125
    return (p * f + 0.5) * (f * f) - f - e * 0.69314718


@triton.jit
def normal_pair(a, b):
    """Return two standard normal numbers from two words."""
    rho = tl.sqrt_rn(negative_log((a >> 1).to(tl.int32, bitcast=True)))
    angle = ((b >> 2).to(tl.int32, bitcast=True) - (1 << 29)).to(tl.float32) * 1.46291807927e-9  # pi 2^-31
    square = angle * angle
    c = (square * -0.00135978230 + 0.0416562930) * square + -0.499998957
    s = (square * -0.000195172994 + 0.00833217800) * square + -0.166666552
    cosine, sine = c * square + 1.0, (s * square + 1.0) * angle
    # the two lowest bits are the signs
    first = float_of(bits_of(rho * (cosine - sine)) ^ (b << 31))
    second = float_of(bits_of(rho * (cosine + sine)) ^ ((b & 2) << 30))
    return first, second


@triton.jit
def normal(source, PURPOSE: tl.constexpr, tile, lane):
    """Return `random.normal` of the elements of tiles, for k = 0 .. 3."""
    w = words(source, PURPOSE, tile * 16 + lane)
    x0, x1 = normal_pair(w[0], w[1])
    x2, x3 = normal_pair(w[2], w[3])
    return x0, x1, x2, x3


# ---- elements one by one, given by their index in the tensor


@triton.jit
def pick_word(w, index):
    """Return the word of each element, by its index in the tensor."""
    k = (index >> 4) & 3
    return tl.where(k == 0, w[0], tl.where(k == 1, w[1], tl.where(k == 2, w[2], w[3])))


@triton.jit
def centered_at(source, index, PURPOSE: tl.constexpr):
    """Return `random.centered` of elements given by their index."""
    tile, lane = (index >> 6).to(tl.int32), (index & 15).to(tl.int32)
    if PURPOSE == ACTIVATION or PURPOSE == ERROR:
        first = pick_word(words(source, PURPOSE, (tile >> 1) * 16 + lane), index)
        rest = pick_word(words(source, PURPOSE + REST, tile * 16 + lane), index)
        return narrow(first, rest, 16 - (tile & 1) * 16)
    return wide(pick_word(words(source, PURPOSE, tile * 16 + lane), index))


@triton.jit
def normal_at(source, index):
    """Return `random.normal` of elements given by their index."""
    w = words(source, NOISE, (index >> 6).to(tl.int32) * 16 + (index & 15).to(tl.int32))
    upper = (index & 32) != 0
    first, second = normal_pair(tl.where(upper, w[2], w[0]), tl.where(upper, w[3], w[1]))
    return tl.where((index & 16) != 0, second, first)
