"""Rounding of whole blocks by one program: the passes of `rows` and `blocks` over R blocks, then their draws.

``target`` is a tuple (values, codes, exponents, positive, spoiled) of pointers; HAS_VALUES, HAS_CODES and MASKED tell which are used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .block_draws import draw_decided, draw_simply
from .blocks import COIN, bits_in_order, decide, find_landings, find_risks, no_risk, place_of
from .elements import CORRECTED, NEAREST
from .generator import NOISE, bits_of, centered, centered_at, float_of, normal
from .laws import V0, bounded, from_gaps, gap_of, in_gaps, positive, reaches, variance_in_gaps
from .means import NO_DRIFT, load_drift, load_start
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
def settle_gaps(mean, v, greatest, variances, rows, chunks, old, own, enough, source, grid, C: tl.constexpr, CODES: tl.constexpr,
                DRIFT: tl.constexpr, EACH: tl.constexpr, TINY: tl.constexpr, ROUNDING: tl.constexpr, PURPOSE: tl.constexpr):  # fmt: skip
    """Return the decision on each block: search the least gap on which all outcomes fit, downwards from one that is sufficient."""
    start, length = rows
    coarse, count = enough, own * 0
    largest = count.to(tl.int64)
    while tl.max(((coarse > own) & (count == 0)).to(tl.int32)) > 0:
        found, where = find_risks(
            mean, v, variances, rows, 0, chunks, old, coarse - 1, grid, C, CODES, DRIFT, EACH, TINY
        )
        searching = (coarse > own) & (count == 0)
        count, largest = tl.where(searching, found, count), tl.where(searching, where, largest)
        coarse = tl.where(searching & (found == 0), coarse - 1, coarse)
    place = tl.where(count > 0, place_of(largest), 0)
    landings = find_landings(
        mean, v, variances, rows, 0, chunks, old, coarse - 1, place, source, grid, C, CODES, DRIFT, EACH, TINY, ROUNDING, PURPOSE
    )  # fmt: skip
    at, inside = start + place, length > 0
    x = load_start(mean[0], at, inside, old, CODES, TINY)
    move = load_drift(mean, at, inside, x, DRIFT)
    each = tl.load(variances + at, mask=inside, other=0.0) if EACH else v
    MOVED: tl.constexpr = DRIFT != NO_DRIFT
    decided = decide(
        x, move, each, greatest, start, coarse - 1, count, place, landings, source, grid, TINY, MOVED, ROUNDING, PURPOSE
    )  # fmt: skip
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
def write(value, at, inside, spoiled, unit, grid, target, TINY: tl.constexpr, HAS_VALUES: tl.constexpr, HAS_CODES: tl.constexpr,
          MASKED: tl.constexpr):  # fmt: skip
    """Write values, and their codes in units of a gap; return the bits of |value|. A block that is spoiled is NaN throughout."""
    _, _, _, _, low, high, _, _, _ = grid
    value = tl.where(spoiled, float("nan"), bounded(value, low, high) + 0.0)
    if HAS_CODES:
        n = tl.where(spoiled, 0.0, in_gaps(value, unit, TINY))
        tl.store(target[1] + at, n.to(tl.int32).to(target[1].dtype.element_ty), mask=inside)
    if HAS_VALUES:
        shown = value
        if MASKED:
            shown = tl.where(tl.load(target[3] + at, mask=inside, other=0) > 0, value, 0.0)
        tl.store(target[0] + at, shown.to(target[0].dtype.element_ty), mask=inside)
    return tl.where(inside, bits_of(tl.abs(value)).to(tl.int32, bitcast=True), 0)


@triton.jit
def draw_rows(mean, v, variances, rows, first, last, old, own, spoiled, noisy, source, grid, target, C: tl.constexpr,
              CODES: tl.constexpr, DRIFT: tl.constexpr, EACH: tl.constexpr, TINY: tl.constexpr, ROUNDING: tl.constexpr,
              PURPOSE: tl.constexpr, HAS_VALUES: tl.constexpr, HAS_CODES: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Draw blocks for which `draw_simply` does, on the gap that their largest number sets; return their largest |value|, as bits."""
    start, _ = rows
    MOVED: tl.constexpr = DRIFT != NO_DRIFT
    gap = gap_of(own, TINY)
    s = variance_in_gaps(v, gap, TINY)
    amplitude, left = tl.where(s > V0, tl.sqrt_rn(positive(s - V0)), 0.0), tl.minimum(s, V0)
    most = tl.zeros([start.shape[0], C], tl.int32)
    for chunk in range(first, last):
        tile, lane = tiles_of(rows, chunk, C)
        nothing = tl.zeros([start.shape[0], C], tl.float32)
        h, xi = (nothing, nothing, nothing, nothing), (nothing, nothing, nothing, nothing)
        if ROUNDING != NEAREST:
            h = centered(source, PURPOSE, tile, lane)
        if ROUNDING == CORRECTED:
            if noisy:
                xi = normal(source, NOISE, tile, lane)
        for k in tl.static_range(4):
            place, inside = places_of(rows, chunk, k, C)
            at = start + place
            x = load_start(mean[0], at, inside, old, CODES, TINY)
            move = load_drift(mean, at, inside, x, DRIFT)
            if EACH:
                left = variance_in_gaps(tl.load(variances + at, mask=inside, other=0.0), gap, TINY)
            n = draw_simply(x, move, left, amplitude, h[k], xi[k], gap, grid[3], ROUNDING, MOVED, TINY)
            bits = write(
                from_gaps(n, gap, TINY), at, inside, spoiled, gap, grid, target, TINY, HAS_VALUES, HAS_CODES, MASKED
            )
            most = tl.maximum(most, bits)
    return tl.max(most, 1)[:, None]


@triton.jit
def draw_rows_decided(mean, v, variances, rows, first, last, old, decision, spoiled, source, grid, target, C: tl.constexpr,
                      CODES: tl.constexpr, DRIFT: tl.constexpr, EACH: tl.constexpr, TINY: tl.constexpr, ROUNDING: tl.constexpr,
                      PURPOSE: tl.constexpr, HAS_VALUES: tl.constexpr, HAS_CODES: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Draw any blocks, after the decision on them. Codes are in units of the gap that a block landed on: `finish_codes` follows."""
    start, _ = rows
    unit = gap_of(tl.where(decision[2], decision[1], decision[0]), TINY)
    most = tl.zeros([start.shape[0], C], tl.int32)
    for chunk in range(first, last):
        place, inside = in_order(rows, chunk, C)
        x, move, each = load_in_order(mean, v, variances, rows, chunk, old, C, CODES, DRIFT, EACH, TINY)
        h, xi = bits_in_order(source, start + place, ROUNDING, PURPOSE)
        coins = centered_at(source, start + place, COIN)
        value = draw_decided(x, move, each, place, decision, h, xi, coins, grid, DRIFT != NO_DRIFT, TINY)
        bits = write(value, start + place, inside, spoiled, unit, grid, target, TINY, HAS_VALUES, HAS_CODES, MASKED)
        most = tl.maximum(most, bits)
    return tl.max(most, 1)[:, None]


@triton.jit
def finish_codes(rows, first, last, numbers, most, unit, grid, target, C: tl.constexpr):
    """Write exponents of blocks that have these numbers in the tensor, and codes anew where the largest value sets a lower one."""
    start, length = rows
    shift = grid[0]
    own = own_gap(float_of(tl.minimum(most, INFINITY).to(tl.uint32, bitcast=True)), grid)
    tl.store(target[2] + numbers, (own + shift).to(tl.int8), mask=tl.where(first == 0, length, 0) > 0)
    up = tl.minimum(unit - own, 30)
    if tl.max(tl.where(most == 0, 0, up)) > 0:  # seldom
        tl.debug_barrier()  # the codes may have been written by other threads
        for chunk in range(first, last):
            for k in tl.static_range(4):
                place, inside = places_of(rows, chunk, k, C)
                code = tl.load(target[1] + start + place, mask=inside, other=0)
                tl.store(
                    target[1] + start + place, (code.to(tl.int32) << up).to(target[1].dtype.element_ty), mask=inside
                )


@triton.jit
def is_careful(most, greatest, own, enough, grid, EACH: tl.constexpr, TINY: tl.constexpr):
    """Return 1 if `draw_simply` may not do for one of these blocks."""
    top, gap = grid[3], gap_of(own, TINY)
    s = variance_in_gaps(greatest, gap, TINY)
    fits = reaches(in_gaps(most, gap, TINY), s) <= top
    if EACH:
        fits = fits & (s <= V0)
    return tl.max((((s > V0) & (fits == 0)) | (enough > own)).to(tl.int32))


@triton.jit
def round_rows(mean, v, variances, rows, numbers, old, source, grid, target, C: tl.constexpr, CODES: tl.constexpr,
               DRIFT: tl.constexpr, EACH: tl.constexpr, TINY: tl.constexpr, ROUNDING: tl.constexpr, PURPOSE: tl.constexpr,
               HAS_VALUES: tl.constexpr, HAS_CODES: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Round R blocks: Q^d, Q^s or Q^vc."""
    start, length = rows
    chunks = chunk_count(rows, C)
    most_bits, greatest = extents(mean, variances, rows, 0, chunks, old, C, CODES, DRIFT, EACH, TINY)
    spoiled = most_bits > INFINITY
    most = float_of(tl.minimum(most_bits, INFINITY).to(tl.uint32, bitcast=True))
    own = own_gap(most, grid)
    unit, careful, noisy = own, 0, 0
    if ROUNDING != NEAREST:
        if not EACH:
            greatest = greatest + v
        enough = tl.where(spoiled, own, sufficient_gap(most, greatest, grid, own))
        careful = is_careful(most, greatest, own, enough, grid, EACH, TINY)
        noisy = tl.max((variance_in_gaps(greatest, gap_of(own, TINY), TINY) > V0).to(tl.int32))
    if careful > 0:  # seldom
        E: tl.constexpr = C // 2  # one element a thread: few blocks come here, and registers count
        last = (tl.max(length) + (E - 1)) // E
        decision = settle_gaps(
            mean, v, greatest, variances, rows, last, old, own, enough, source, grid, E, CODES, DRIFT, EACH, TINY, ROUNDING, PURPOSE
        )  # fmt: skip
        unit = tl.where(decision[2], decision[1], decision[0])
        largest = draw_rows_decided(
            mean, v, variances, rows, 0, last, old, decision, spoiled, source, grid, target, E, CODES, DRIFT, EACH, TINY, ROUNDING,
            PURPOSE, HAS_VALUES, HAS_CODES, MASKED,
        )  # fmt: skip
    else:
        largest = draw_rows(
            mean, v, variances, rows, 0, chunks, old, own, spoiled, noisy, source, grid, target, C, CODES, DRIFT, EACH, TINY,
            ROUNDING, PURPOSE, HAS_VALUES, HAS_CODES, MASKED,
        )  # fmt: skip
    if HAS_CODES:
        finish_codes(rows, 0, chunks, numbers, tl.where(spoiled, 0, largest), unit, grid, target, C)
        if HAS_VALUES:  # those of a step are finite, and it has no flag
            if tl.max((spoiled & (length > 0)).to(tl.int32)) > 0:  # seldom
                tl.store(target[4], 1)
