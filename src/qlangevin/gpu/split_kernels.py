"""Blocks so long that many programs share one, such as whole tensors: two passes over memory, and two more for the few at risk.

    extents    the largest |mean| and variance of each block
    risks      for blocks that may not fit: how many coordinates are at risk, on up to three gaps
    landings   for those at risk: where they land
    draw       decide on each block, and draw it
    finish     exponents of codes

Programs of one pass meet in the statistics of the block, a row of `Stat`, by atomic operations whose order does not matter. The
least gap is among the three below `sufficient_gap`: on a gap eight times smaller the largest mean, or the noise, does not fit
(docs/gpu.md has the proof).
"""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl

from .blocks import decide, find_landings, find_risks, no_risk, place_of
from .elements import NEAREST
from .generator import float_of
from .laws import V0, gap_of, variance_in_gaps
from .means import load_drift, load_start, load_variance
from .round_rows import draw_rows, draw_rows_decided, finish_codes, is_careful, where_risky
from .rows import INFINITY, chunk_count, extents, own_gap, sufficient_gap
from .step_kernels import (
    CODES_OUT,
    EXPONENTS,
    GRID,
    LINE,
    OUT,
    POSITIVE,
    SIZE,
    SPOILED,
    STATS,
    find_row,
    is_clear,
    load_grid,
    load_mean,
    pointer,
)


class Stat(IntEnum):
    """Columns of the statistics of a block, int64; floats as their bits."""

    MOST, VARIANCE, COUNT = 0, 1, 2  # three counts, one for each gap that is tried
    LARGEST = 5  # and three of these
    OUTSIDE, NEEDED, JUMPS, TOTAL, SQUARES, START, MOVE, V, RESULT, UNIT = range(8, 18)
    WIDTH = 18


MOST, VARIANCE, COUNT, LARGEST = (tl.constexpr(int(i)) for i in (Stat.MOST, Stat.VARIANCE, Stat.COUNT, Stat.LARGEST))
OUTSIDE, NEEDED, JUMPS = (tl.constexpr(int(i)) for i in (Stat.OUTSIDE, Stat.NEEDED, Stat.JUMPS))
TOTAL, SQUARES, START, MOVE = (tl.constexpr(int(i)) for i in (Stat.TOTAL, Stat.SQUARES, Stat.START, Stat.MOVE))
EACH_V, RESULT, UNIT, STATS_WIDTH = (tl.constexpr(int(i)) for i in (Stat.V, Stat.RESULT, Stat.UNIT, Stat.WIDTH))


@triton.jit
def piece_of(table, count, PIECE: tl.constexpr, C: tl.constexpr):
    """Return the row of a tensor, the number of a block, the block, its statistics, and the chunks of this program."""
    row, part = find_row(table, count)
    line, size = tl.load(row + LINE).to(tl.int32), tl.load(row + SIZE).to(tl.int32)
    pieces = ((size + 126) // 64 + (PIECE * (C // 16) - 1)) // (PIECE * (C // 16))
    per_line = (line + size - 1) // size
    number, piece = part // pieces + tl.zeros([1, 1], tl.int32), part % pieces
    begin = number % per_line * size
    rows = (number // per_line).to(tl.int64) * line + begin, tl.minimum(size, line - begin)
    stats = pointer(row, STATS, tl.int64, False) + number * STATS_WIDTH
    first = piece * PIECE
    return row, number, rows, stats, first, tl.minimum(first + PIECE, chunk_count(rows, C))


@triton.jit
def as_float(x):
    return float_of(x.to(tl.int32).to(tl.uint32, bitcast=True))


@triton.jit
def as_bits(x):
    return x.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def load_extents(stats, mean, grid, HOW: tl.constexpr):
    """Return (most, greatest v, whether a NaN spoils it, the gap of its largest number, a sufficient gap) of a block."""
    bits = tl.load(stats + MOST).to(tl.int32)
    spoiled = bits > INFINITY
    most = float_of(tl.minimum(bits, INFINITY).to(tl.uint32, bitcast=True))
    own = own_gap(most, grid)
    greatest = as_float(tl.load(stats + VARIANCE)) if HOW.each else (own * 0).to(tl.float32) + mean[3]
    enough = own if HOW.rounding == NEAREST else tl.where(spoiled, own, sufficient_gap(most, greatest, grid, own))
    return most, greatest, spoiled, own, enough


@triton.jit(do_not_specialize=["count"])
def split_extents(
    table, flags, count, rate, sign, decay, v, TYPE: tl.constexpr, OTHER_TYPE: tl.constexpr, HOW: tl.constexpr,
    FLAGGED: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Find the largest |mean| and variance of blocks."""
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, number, rows, stats, first, last = piece_of(table, count, PIECE, C)
        mean = load_mean(
            row, number, number >= 0, load_grid(row, GRID), rate, sign, decay, v, TYPE, OTHER_TYPE, False, HOW
        )
        most, greatest = extents(mean, rows, first, last, HOW, C)
        tl.atomic_max(stats + MOST, most.to(tl.int64))
        if HOW.each:
            tl.atomic_max(stats + VARIANCE, as_bits(greatest))


@triton.jit(do_not_specialize=["count"])
def split_risks(
    table, flags, count, rate, sign, decay, v, TYPE: tl.constexpr, OTHER_TYPE: tl.constexpr, HOW: tl.constexpr,
    FLAGGED: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Count the coordinates at risk, on three gaps, of blocks that may not fit."""
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, number, rows, stats, first, last = piece_of(table, count, PIECE, C)
        grid = load_grid(row, GRID)
        mean = load_mean(row, number, number >= 0, grid, rate, sign, decay, v, TYPE, OTHER_TYPE, False, HOW)
        _, _, _, own, enough = load_extents(stats, mean, grid, HOW)
        for j in range(0, 3):
            if tl.max(enough - own) > j:  # seldom
                found, largest = find_risks(mean, rows, first * 4, last * 4, enough - (j + 1), grid, HOW, C)
                tl.atomic_add(stats + COUNT + j, found.to(tl.int64))
                tl.atomic_max(stats + LARGEST + j, largest)


@triton.jit
def load_risks(stats, own, enough):
    """Return (count, largest, coarse) on the largest gap on which a coordinate is at risk; a count of 0 if there is none."""
    count, largest, coarse = tl.load(stats + COUNT), tl.load(stats + LARGEST), enough
    for j in tl.static_range(1, 3):
        lower = (count == 0) & (coarse > own)
        count = tl.where(lower, tl.load(stats + COUNT + j), count)
        largest = tl.where(lower, tl.load(stats + LARGEST + j), largest)
        coarse = tl.where(lower, coarse - 1, coarse)
    return count.to(tl.int32), largest, coarse


@triton.jit(do_not_specialize=["count"])
def split_landings(
    table, flags, count, rate, sign, decay, v, TYPE: tl.constexpr, OTHER_TYPE: tl.constexpr, HOW: tl.constexpr,
    FLAGGED: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Find out where the coordinates at risk land, and note the mean of the largest: the draws may overwrite it."""
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, number, rows, stats, first, last = piece_of(table, count, PIECE, C)
        grid = load_grid(row, GRID)
        mean = load_mean(row, number, number >= 0, grid, rate, sign, decay, v, TYPE, OTHER_TYPE, False, HOW)
        _, _, _, own, enough = load_extents(stats, mean, grid, HOW)
        risks, largest, coarse = load_risks(stats, own, enough)
        if tl.max(risks) > 0:  # seldom
            place = place_of(largest)
            outside, needed, jumps, total, squares = find_landings(
                mean, rows, first * 4, last * 4, coarse - 1, place, grid, HOW, C
            )
            tl.atomic_add(stats + OUTSIDE, outside.to(tl.int64))
            tl.atomic_max(stats + NEEDED, as_bits(needed))
            tl.atomic_add(stats + JUMPS, jumps.to(tl.int64))
            tl.atomic_add(stats + TOTAL, total)
            tl.atomic_add(stats + SQUARES, squares)
            at, here = rows[0] + place, number >= 0
            x = load_start(mean, at, here, HOW)
            tl.store(stats + START, as_bits(x))
            tl.store(stats + MOVE, as_bits(load_drift(mean, at, here, x, HOW)))
            if HOW.each:
                tl.store(stats + EACH_V, as_bits(load_variance(mean, at, here, HOW)))


@triton.jit
def load_decision(stats, mean, greatest, rows, own, enough, grid, HOW: tl.constexpr):
    """Return the decision on a block, from its statistics."""
    count, largest, coarse = load_risks(stats, own, enough)
    landings = (
        tl.load(stats + OUTSIDE).to(tl.int32), as_float(tl.load(stats + NEEDED)), tl.load(stats + JUMPS).to(tl.int32),
        tl.load(stats + TOTAL), tl.load(stats + SQUARES),
    )  # fmt: skip
    x, move = as_float(tl.load(stats + START)), as_float(tl.load(stats + MOVE))
    v = as_float(tl.load(stats + EACH_V)) if HOW.each else (count * 0).to(tl.float32) + mean[3]
    place, fine = place_of(largest), coarse - 1
    decided = decide(x, move, v, greatest, rows[0], fine, count, place, landings, mean[5], grid, HOW)
    return where_risky(count > 0, decided, no_risk(own))


@triton.jit(do_not_specialize=["count"])
def split_draw(
    table, flags, count, rate, sign, decay, v, TYPE: tl.constexpr, OTHER_TYPE: tl.constexpr, OUT_TYPE: tl.constexpr,
    CODES_TYPE: tl.constexpr, HOW: tl.constexpr, FLAGGED: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Decide on blocks, and draw them."""
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, number, rows, stats, first, last = piece_of(table, count, PIECE, C)
        grid = load_grid(row, GRID)
        mean = load_mean(row, number, number >= 0, grid, rate, sign, decay, v, TYPE, OTHER_TYPE, False, HOW)
        most, greatest, spoiled, own, enough = load_extents(stats, mean, grid, HOW)
        exponents, positive = pointer(row, EXPONENTS, tl.int8, False), pointer(row, POSITIVE, tl.int8, False)
        out, codes = pointer(row, OUT, OUT_TYPE, False), pointer(row, CODES_OUT, CODES_TYPE, False)
        target = (out, codes, exponents, positive, pointer(row, SPOILED, tl.int32, False))
        careful, noisy, unit = 0, 0, own
        if HOW.rounding != NEAREST:
            careful = is_careful(most, greatest, own, enough, grid, HOW)
            noisy = tl.max((variance_in_gaps(greatest, gap_of(own, HOW.tiny), HOW.tiny) > V0).to(tl.int32))
        if careful > 0:  # seldom
            decision = load_decision(stats, mean, greatest, rows, own, enough, grid, HOW)
            unit = tl.where(decision[2], decision[1], decision[0])
            largest = draw_rows_decided(mean, rows, first * 4, last * 4, decision, spoiled, grid, target, HOW, C)
        else:
            largest = draw_rows(mean, rows, first, last, own, spoiled, noisy, grid, target, HOW, C)
        if HOW.coded:
            tl.atomic_max(stats + RESULT, tl.where(spoiled, 0, largest).to(tl.int64))
            tl.store(stats + UNIT, unit.to(tl.int64))
            if HOW.values:
                if tl.max(spoiled.to(tl.int32)) > 0:  # seldom
                    tl.store(target[4], 1)


@triton.jit(do_not_specialize=["count"])
def split_finish(
    table, flags, count, CODES_TYPE: tl.constexpr, FLAGGED: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr
):
    """Write the exponents of blocks, and codes anew where the exponent is lower than when they were written."""
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, number, rows, stats, first, last = piece_of(table, count, PIECE, C)
        codes = pointer(row, CODES_OUT, CODES_TYPE, False)
        target = codes, codes, pointer(row, EXPONENTS, tl.int8, False), codes, codes
        most, unit = tl.load(stats + RESULT).to(tl.int32), tl.load(stats + UNIT).to(tl.int32)
        finish_codes(rows, first, last, number, most, unit, load_grid(row, GRID), target, C)
