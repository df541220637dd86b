"""Rounding of whole blocks by one program: the passes of `rows` and `blocks` over R blocks, then their draws.

``target`` is a tuple (values, codes, exponents, positive, spoiled) of pointers; HOW tells which of them are used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .block_draws import draw_decided, draw_simply
from .blocks import COIN, bits_in_order, decide, find_landings, find_risks, no_risk, place_of
from .elements import CORRECTED, NEAREST
from .generator import NOISE, bits_of, centered, centered_at, float_of, normal
from .laws import V0, bounded, from_gaps, gap_of, in_gaps, positive, reaches, variance_in_gaps
from .means import load_drift, load_start, load_variance
from .rows import (
    INFINITY,
    chunk_count,
    extents,
    in_order,
    load_in_order,
    own_gap,
    places_of,
    sufficient_gap,
    tiles_of,
)


@triton.jit
def settle_gaps(mean, greatest, rows, chunks, own, enough, grid, HOW: tl.constexpr, C: tl.constexpr):
    """Return the decision on each block: search the least gap on which all outcomes fit, downwards from a sufficient one."""
    start, length = rows
    coarse, count = enough, own * 0
    largest = count.to(tl.int64)
    while tl.max(((coarse > own) & (count == 0)).to(tl.int32)) > 0:
        found, where = find_risks(mean, rows, 0, chunks, coarse - 1, grid, HOW, C)
        searching = (coarse > own) & (count == 0)
        count, largest = tl.where(searching, found, count), tl.where(searching, where, largest)
        coarse = tl.where(searching & (found == 0), coarse - 1, coarse)
    place = tl.where(count > 0, place_of(largest), 0)
    landings = find_landings(mean, rows, 0, chunks, coarse - 1, place, grid, HOW, C)
    at, inside = start + place, length > 0
    x = load_start(mean, at, inside, HOW)
    move, v = load_drift(mean, at, inside, x, HOW), load_variance(mean, at, inside, HOW)
    decided = decide(x, move, v, greatest, start, coarse - 1, count, place, landings, mean[5], grid, HOW)
    return where_risky(count > 0, decided, no_risk(own))


@triton.jit
def where_risky(risky, decided, plain):
    """Return one decision or the other for each block."""
    return (
        tl.where(risky, decided[0], plain[0]), tl.where(risky, decided[1], plain[1]), tl.where(risky, decided[2], plain[2]),
        tl.where(risky, decided[3], plain[3]), tl.where(risky, decided[4], plain[4]), tl.where(risky, decided[5], plain[5]),
        tl.where(risky, decided[6], plain[6]), tl.where(risky, decided[7], plain[7]),
    )  # fmt: skip


@triton.jit
def write(value, at, inside, spoiled, unit, grid, target, HOW: tl.constexpr):
    """Write values, and their codes in units of a gap; return the bits of |value|. A block that is spoiled is NaN throughout."""
    _, _, _, _, low, high, _, _, _ = grid
    value = tl.where(spoiled, float("nan"), bounded(value, low, high) + 0.0)
    if HOW.coded:
        n = tl.where(spoiled, 0.0, in_gaps(value, unit, HOW.tiny))
        tl.store(target[1] + at, n.to(tl.int32).to(target[1].dtype.element_ty), mask=inside)
    if HOW.values:
        shown = value
        if HOW.masked:
            shown = tl.where(tl.load(target[3] + at, mask=inside, other=0) > 0, value, 0.0)
        tl.store(target[0] + at, shown.to(target[0].dtype.element_ty), mask=inside)
    return tl.where(inside, bits_of(tl.abs(value)).to(tl.int32, bitcast=True), 0)


@triton.jit
def draw_rows(mean, rows, first, last, own, spoiled, noisy, grid, target, HOW: tl.constexpr, C: tl.constexpr):
    """Draw blocks for which `draw_simply` does, on the gap of their largest number; return their largest |value|, as bits."""
    start, _ = rows
    gap = gap_of(own, HOW.tiny)
    s = variance_in_gaps(mean[3], gap, HOW.tiny)
    amplitude, left = tl.where(s > V0, tl.sqrt_rn(positive(s - V0)), 0.0), tl.minimum(s, V0)
    most = tl.zeros([start.shape[0], C], tl.int32)
    for chunk in range(first, last):
        tile, lane = tiles_of(rows, chunk, C)
        nothing = tl.zeros([start.shape[0], C], tl.float32)
        h, xi = (nothing, nothing, nothing, nothing), (nothing, nothing, nothing, nothing)
        if HOW.rounding != NEAREST:
            h = centered(mean[5], HOW.purpose, tile, lane)
        if HOW.rounding == CORRECTED:
            if noisy:
                xi = normal(mean[5], NOISE, tile, lane)
        for k in tl.static_range(4):
            place, inside = places_of(rows, chunk, k, C, HOW.aligned)
            at = start + place
            x = load_start(mean, at, inside, HOW)
            move = load_drift(mean, at, inside, x, HOW)
            own_left = variance_in_gaps(load_variance(mean, at, inside, HOW), gap, HOW.tiny) if HOW.each else left
            n = draw_simply(x, move, own_left, amplitude, h[k], xi[k], gap, grid[3], HOW)
            bits = write(from_gaps(n, gap, HOW.tiny), at, inside, spoiled, gap, grid, target, HOW)
            most = tl.maximum(most, bits)
    return tl.max(most, 1)[:, None]


@triton.jit
def draw_rows_decided(mean, rows, first, last, decision, spoiled, grid, target, HOW: tl.constexpr, C: tl.constexpr):
    """Draw any blocks, after the decision on them. Codes are in units of the gap a block landed on: `finish_codes` follows."""
    start, _ = rows
    unit = gap_of(tl.where(decision[2], decision[1], decision[0]), HOW.tiny)
    most = tl.zeros([start.shape[0], C], tl.int32)
    for chunk in range(first, last):
        place, inside = in_order(rows, chunk, C)
        x, move, each = load_in_order(mean, rows, chunk, HOW, C)
        h, xi = bits_in_order(mean[5], start + place, HOW)
        coins = h
        if tl.max(decision[3].to(tl.int32)) > 0:  # a coin was tossed
            coins = centered_at(mean[5], start + place, COIN)
        value = draw_decided(x, move, each, place, decision, h, xi, coins, grid, HOW)
        bits = write(value, start + place, inside, spoiled, unit, grid, target, HOW)
        most = tl.maximum(most, bits)
    return tl.max(most, 1)[:, None]


@triton.jit
def finish_codes(rows, first, last, numbers, most, unit, grid, target, C: tl.constexpr):
    """Write exponents of blocks that have these numbers in the tensor, and codes anew where their largest value sets another."""
    start, length = rows
    shift = grid[0]
    own = own_gap(float_of(tl.minimum(most, INFINITY).to(tl.uint32, bitcast=True)), grid)
    tl.store(target[2] + numbers, (own + shift).to(tl.int8), mask=tl.where(first == 0, length, 0) > 0)
    up = tl.minimum(unit - own, 30)
    if tl.max(tl.where(most == 0, 0, up)) > 0:  # seldom
        tl.debug_barrier()  # the codes may have been written by other threads
        for chunk in range(first, last):
            for k in tl.static_range(4):
                place, inside = places_of(rows, chunk, k, C, False)
                code = tl.load(target[1] + start + place, mask=inside, other=0).to(tl.int32) << up
                tl.store(target[1] + start + place, code.to(target[1].dtype.element_ty), mask=inside)


@triton.jit
def is_careful(most, greatest, own, enough, grid, HOW: tl.constexpr):
    """Return 1 if `draw_simply` may not do for one of these blocks."""
    top, gap = grid[3], gap_of(own, HOW.tiny)
    s = variance_in_gaps(greatest, gap, HOW.tiny)
    fits = reaches(in_gaps(most, gap, HOW.tiny), s) <= top
    if HOW.each:
        fits = fits & (s <= V0)
    return tl.max((((s > V0) & (fits == 0)) | (enough > own)).to(tl.int32))


@triton.jit
def round_rows(mean, rows, numbers, grid, target, HOW: tl.constexpr, C: tl.constexpr):
    """Round R blocks: Q^d, Q^s or Q^vc."""
    _, length = rows
    chunks = chunk_count(rows, C)
    most_bits, greatest = extents(mean, rows, 0, chunks, HOW, C)
    spoiled = most_bits > INFINITY
    most = float_of(tl.minimum(most_bits, INFINITY).to(tl.uint32, bitcast=True))
    own = own_gap(most, grid)
    unit, enough, careful, noisy = own, own, 0, 0
    if HOW.rounding != NEAREST:
        enough = tl.where(spoiled, own, sufficient_gap(most, greatest, grid, own))
        careful = is_careful(most, greatest, own, enough, grid, HOW)
        noisy = tl.max((variance_in_gaps(greatest, gap_of(own, HOW.tiny), HOW.tiny) > V0).to(tl.int32))
    if careful > 0:  # seldom
        E: tl.constexpr = C // 2  # one element a thread: few blocks come here, and registers count
        last = (tl.max(length) + (E - 1)) // E
        decision = settle_gaps(mean, greatest, rows, last, own, enough, grid, HOW, E)
        unit = tl.where(decision[2], decision[1], decision[0])
        tl.debug_barrier()  # every warp has read the number that was drawn alone before one overwrites it
        largest = draw_rows_decided(mean, rows, 0, last, decision, spoiled, grid, target, HOW, E)
    else:
        largest = draw_rows(mean, rows, 0, chunks, own, spoiled, noisy, grid, target, HOW, C)
    if HOW.coded:
        finish_codes(rows, 0, chunks, numbers, tl.where(spoiled, 0, largest), unit, grid, target, C)
        if HOW.values:  # those of a step are finite, and it has no flag
            if tl.max((spoiled & (length > 0)).to(tl.int32)) > 0:  # seldom
                tl.store(target[4], 1)
