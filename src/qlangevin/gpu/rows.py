"""Blocks as rows of a matrix of counters, and what a block must know before any of it is drawn.

A program takes R blocks at once, and of each a chunk of C counters at a time, that is 4 C consecutive elements that begin at a
multiple of 64; what lies outside of the block is masked. ``rows`` is a tuple of columns (start, length): the index of a block's
first element in its tensor, and its number of elements, which is zero for rows that are no block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .generator import bits_of
from .laws import (
    FAR,
    NORMAL_BOUND,
    V0,
    binade,
    ceil_log2,
    feasible,
    nearest_to,
    reaches,
)
from .means import load_drift, load_start, load_variance, total_of

SQRT_4_3 = tl.constexpr(1.1547006)  # up to σ = Δ/sqrt(4/3), that is s <= 3/4, three outcomes are always feasible
INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def chunk_count(rows, C: tl.constexpr):
    """Return how many chunks the longest of these blocks has."""
    start, length = rows
    tiles = ((start + length + 63) >> 6) - (start >> 6)
    return (tl.max(tiles.to(tl.int32)) + (C // 16 - 1)) // (C // 16)


@triton.jit
def tiles_of(rows, chunk, C: tl.constexpr):
    """Return the tiles and the lanes of a chunk of every block."""
    start, _ = rows
    c = tl.arange(0, C)[None, :]
    return (start >> 6).to(tl.int32) + chunk * (C // 16) + c // 16, c % 16


@triton.jit
def places_of(rows, chunk, k, C: tl.constexpr):
    """Return (place, inside) of elements k of a chunk: the number of an element in its block, and if it belongs to it."""
    start, length = rows
    c = tl.arange(0, C)[None, :]
    place = (chunk * (C // 16) + c // 16) * 64 + (16 * k + c % 16) - (start & 63).to(tl.int32)
    return place, (place >= 0) & (place < length)


@triton.jit
def in_order(rows, chunk, C: tl.constexpr):
    """Return (place, inside) of a chunk of C elements in a row, for passes that few blocks need: these draw bits one by one."""
    _, length = rows
    place = chunk * C + tl.arange(0, C)[None, :]
    return place, place < length


@triton.jit
def load_in_order(mean, rows, chunk, HOW: tl.constexpr, C: tl.constexpr):
    """Return (start, move, v) of such elements."""
    place, inside = in_order(rows, chunk, C)
    at = rows[0] + place
    x = load_start(mean, at, inside, HOW)
    return x, load_drift(mean, at, inside, x, HOW), load_variance(mean, at, inside, HOW)


@triton.jit
def extents(mean, rows, first, last, HOW: tl.constexpr, C: tl.constexpr):
    """Return columns: the bits of the largest |mean|, which are above `INFINITY` if there is a NaN, and the largest v.

    Like all passes it goes over the chunks first .. last - 1.
    """
    start, _ = rows
    most = tl.zeros([start.shape[0], C], tl.int32)
    v = tl.zeros([start.shape[0], C], tl.float32)
    for chunk in range(first, last):
        for k in tl.static_range(4):
            place, inside = places_of(rows, chunk, k, C)
            at = start + place
            x = load_start(mean, at, inside, HOW)
            total = total_of(x, load_drift(mean, at, inside, x, HOW), HOW)
            most = tl.maximum(most, bits_of(tl.abs(total)).to(tl.int32, bitcast=True))
            if HOW.each:
                v = tl.maximum(v, load_variance(mean, at, inside, HOW))
    if not HOW.each:
        v += mean[3]
    return tl.max(most, 1)[:, None], tl.max(v, 1)[:, None]


@triton.jit
def own_gap(most, grid):
    """Return log2 of the gap that the largest number of a block sets."""
    shift, min_gap, max_gap, _, _, _, _, _, _ = grid
    return tl.minimum(tl.maximum(binade(most) - shift, min_gap), max_gap)


@triton.jit
def sufficient_gap(most, v, grid, own):
    """Return log2 of a gap on which no outcome exceeds N, given the largest |μ| and v of a block."""
    _, _, max_gap, top, _, _, fit, fit_three, fit_noise = grid
    sigma = tl.sqrt_rn(v)
    three = tl.maximum(most * fit_three, sigma * SQRT_4_3)
    room = tl.where(top > 1.0, tl.minimum(three, (most + sigma * NORMAL_BOUND) * fit_noise), three)
    enough = ceil_log2(tl.where(sigma == 0.0, most * fit, room))
    return tl.minimum(tl.maximum(enough, own), max_gap)


@triton.jit
def is_gaussian(point, s, top):
    """Return a mask: True where Gaussian noise is added, because no outcome then exceeds ``top``."""
    return (s > V0) & (reaches(point[0] + point[1], s) <= top)


@triton.jit
def may_leave(point, s, top):
    """Return a mask of the coordinates that, drawn on a gap, might leave the codes -N .. N."""
    n, r = nearest_to(point)
    side = tl.abs(r)
    outward = (r * n > 0.0) | (s > side * (1.0 - side))
    fits = feasible(n, r, s, FAR) & (tl.abs(n) + tl.where(outward, 1.0, 0.0) <= top)
    return (is_gaussian(point, s, top) | fits) == 0
