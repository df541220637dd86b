"""Blocks so long that many programs share one, such as whole tensors: two passes over memory, and two more for the few at risk.

    extents    the largest |mean| and variance of each block
    risks      for blocks that may not fit: how many coordinates are at risk, on up to three gaps
    landings   for those at risk: where they land
    draw       decide on each block, and draw it
    finish     exponents of codes

Programs of one pass meet in the statistics of the block, a row of `Stat`, by atomic operations whose order does not matter. `sufficient_gap`
is less than twice too large or a power of two above that, so the least gap is found among three: on a gap eight times smaller
the largest mean, or the noise, does not fit (docs/gpu.md has the proof).
"""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl

from .blocks import decide, find_landings, find_risks, no_risk, place_of
from .elements import CORRECTED, NEAREST
from .generator import float_of
from .laws import V0, gap_of, variance_in_gaps
from .means import NO_DRIFT, load_drift, load_start
from .round_rows import draw_rows, draw_rows_decided, finish_codes, is_careful, where_risky
from .rows import INFINITY, chunk_count, extents, own_gap, sufficient_gap
from .step_kernels import (
    CODES_OUT,
    EXPONENTS,
    GRID,
    LINE,
    OTHER,
    OUT,
    POSITIVE,
    SIZE,
    SPOILED,
    STATS,
    VARIANCES,
    X,
    find_row,
    is_clear,
    load_grid,
    load_source,
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
    """Return the row of a tensor, the number of a block as a column, the block, its statistics, and the chunks of this program."""
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
def load_mean(row, rate, sign, decay, v, source, TYPE: tl.constexpr, OTHER_TYPE: tl.constexpr):
    return (
        pointer(row, X, TYPE, False),
        pointer(row, OTHER, OTHER_TYPE, False),
        rate,
        sign,
        decay,
        tl.sqrt_rn(v),
        source,
    )


@triton.jit
def old_gap(row, number, grid, CODES: tl.constexpr, TINY: tl.constexpr):
    """Return the gap of the codes that are read."""
    old = number * 0
    if CODES:
        old = tl.load(pointer(row, EXPONENTS, tl.int8, False) + number).to(tl.int32) - grid[0]
    return gap_of(old, TINY)


@triton.jit
def as_float(x):
    return float_of(x.to(tl.int32).to(tl.uint32, bitcast=True))


@triton.jit
def as_bits(x):
    return x.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def load_extents(stats, v, grid, ROUNDING: tl.constexpr, EACH: tl.constexpr):
    """Return (most, greatest v, whether a NaN spoils it, the gap of its largest number, a sufficient gap) of a block."""
    bits = tl.load(stats + MOST).to(tl.int32)
    spoiled = bits > INFINITY
    most = float_of(tl.minimum(bits, INFINITY).to(tl.uint32, bitcast=True))
    own = own_gap(most, grid)
    greatest = as_float(tl.load(stats + VARIANCE)) if EACH else (own * 0).to(tl.float32) + v
    enough = own if ROUNDING == NEAREST else tl.where(spoiled, own, sufficient_gap(most, greatest, grid, own))
    return most, greatest, spoiled, own, enough


@triton.jit(do_not_specialize=["count"])
def split_extents(
    table, flags, count, rate, sign, decay, v, TYPE: tl.constexpr, CODES: tl.constexpr, OTHER_TYPE: tl.constexpr, TINY: tl.constexpr,
    DRIFT: tl.constexpr, EACH: tl.constexpr, FLAGGED: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, number, rows, stats, first, last = piece_of(table, count, PIECE, C)
        grid, source = load_grid(row, GRID), load_source(row)
        mean = load_mean(row, rate, sign, decay, v, source, TYPE, OTHER_TYPE)
        variances = pointer(row, VARIANCES, tl.float32, False)
        most, greatest = extents(
            mean, variances, rows, first, last, old_gap(row, number, grid, CODES, TINY), C, CODES, DRIFT, EACH, TINY
        )
        tl.atomic_max(stats + MOST, most.to(tl.int64))
        if EACH:
            tl.atomic_max(stats + VARIANCE, as_bits(greatest))


@triton.jit(do_not_specialize=["count"])
def split_risks(
    table, flags, count, rate, sign, decay, v, spread, TYPE: tl.constexpr, CODES: tl.constexpr, OTHER_TYPE: tl.constexpr,
    TINY: tl.constexpr, ROUNDING: tl.constexpr, DRIFT: tl.constexpr, EACH: tl.constexpr, FLAGGED: tl.constexpr, PIECE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, number, rows, stats, first, last = piece_of(table, count, PIECE, C)
        grid, source = load_grid(row, GRID), load_source(row)
        mean = load_mean(row, rate, sign, decay, v, source, TYPE, OTHER_TYPE)
        variances, old = pointer(row, VARIANCES, tl.float32, False), old_gap(row, number, grid, CODES, TINY)
        _, _, _, own, enough = load_extents(stats, spread, grid, ROUNDING, EACH)
        for j in range(3):
            if tl.max(enough - own) > j:
                found, largest = find_risks(
                    mean, spread, variances, rows, first * 4, last * 4, old, enough - (j + 1), grid, C, CODES,
                    DRIFT, EACH, TINY,
                )  # fmt: skip
                tl.atomic_add(stats + COUNT + j, found.to(tl.int64))
                tl.atomic_max(stats + LARGEST + j, largest)


@triton.jit
def load_risks(stats, own, enough):
    """Return (count, largest, coarse) on the largest gap on which a coordinate is at risk; a count of 0 if there is none."""
    count, largest, coarse = tl.load(stats + COUNT), tl.load(stats + LARGEST), enough
    for j in tl.static_range(1, 3):
        lower = (count == 0) & (coarse > own)
        count, largest = (
            tl.where(lower, tl.load(stats + COUNT + j), count),
            tl.where(lower, tl.load(stats + LARGEST + j), largest),
        )
        coarse = tl.where(lower, coarse - 1, coarse)
    return count.to(tl.int32), largest, coarse


@triton.jit(do_not_specialize=["count"])
def split_landings(
    table, flags, count, rate, sign, decay, v, spread, TYPE: tl.constexpr, CODES: tl.constexpr, OTHER_TYPE: tl.constexpr,
    TINY: tl.constexpr, ROUNDING: tl.constexpr, PURPOSE: tl.constexpr, DRIFT: tl.constexpr, EACH: tl.constexpr,
    FLAGGED: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, number, rows, stats, first, last = piece_of(table, count, PIECE, C)
        grid, source = load_grid(row, GRID), load_source(row)
        _, _, _, own, enough = load_extents(stats, spread, grid, ROUNDING, EACH)
        risks, largest, coarse = load_risks(stats, own, enough)
        if tl.max(risks) > 0:
            mean = load_mean(row, rate, sign, decay, v, source, TYPE, OTHER_TYPE)
            variances, old = pointer(row, VARIANCES, tl.float32, False), old_gap(row, number, grid, CODES, TINY)
            place = place_of(largest)
            outside, needed, jumps, total, squares = find_landings(
                mean, spread, variances, rows, first * 4, last * 4, old, coarse - 1, place, source, grid, C, CODES, DRIFT, EACH, TINY,
                ROUNDING, PURPOSE,
            )  # fmt: skip
            tl.atomic_add(stats + OUTSIDE, outside.to(tl.int64))
            tl.atomic_max(stats + NEEDED, as_bits(needed))
            tl.atomic_add(stats + JUMPS, jumps.to(tl.int64))
            tl.atomic_add(stats + TOTAL, total)
            tl.atomic_add(stats + SQUARES, squares)
            at, here = rows[0] + place, number >= 0
            x = load_start(mean[0], at, here, old, CODES, TINY)
            tl.store(stats + START, as_bits(x))  # every program the same: the draws may overwrite it
            tl.store(stats + MOVE, as_bits(load_drift(mean, at, here, x, DRIFT)))
            if EACH:
                tl.store(stats + EACH_V, as_bits(tl.load(variances + at)))


@triton.jit
def load_decision(stats, spread, greatest, rows, own, enough, source, grid, TINY: tl.constexpr, MOVED: tl.constexpr,
                  ROUNDING: tl.constexpr, PURPOSE: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """Return the decision on a block, from its statistics."""
    count, largest, coarse = load_risks(stats, own, enough)
    landings = (
        tl.load(stats + OUTSIDE).to(tl.int32), as_float(tl.load(stats + NEEDED)), tl.load(stats + JUMPS).to(tl.int32),
        tl.load(stats + TOTAL), tl.load(stats + SQUARES),
    )  # fmt: skip
    x, move = as_float(tl.load(stats + START)), as_float(tl.load(stats + MOVE))
    each = as_float(tl.load(stats + EACH_V)) if EACH else (count * 0).to(tl.float32) + spread
    decided = decide(
        x, move, each, greatest, rows[0], coarse - 1, count, place_of(largest), landings, source, grid, TINY, MOVED, ROUNDING, PURPOSE
    )  # fmt: skip
    return where_risky(count > 0, decided, no_risk(own))


@triton.jit(do_not_specialize=["count"])
def split_draw(
    table, flags, count, rate, sign, decay, v, spread, TYPE: tl.constexpr, CODES: tl.constexpr, OTHER_TYPE: tl.constexpr,
    OUT_TYPE: tl.constexpr, CODES_TYPE: tl.constexpr, TINY: tl.constexpr, ROUNDING: tl.constexpr, PURPOSE: tl.constexpr,
    DRIFT: tl.constexpr, EACH: tl.constexpr, HAS_VALUES: tl.constexpr, HAS_CODES: tl.constexpr, MASKED: tl.constexpr,
    FLAGGED: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, number, rows, stats, first, last = piece_of(table, count, PIECE, C)
        grid, source = load_grid(row, GRID), load_source(row)
        mean = load_mean(row, rate, sign, decay, v, source, TYPE, OTHER_TYPE)
        variances, old = pointer(row, VARIANCES, tl.float32, False), old_gap(row, number, grid, CODES, TINY)
        most, greatest, spoiled, own, enough = load_extents(stats, spread, grid, ROUNDING, EACH)
        target = (
            pointer(row, OUT, OUT_TYPE, False), pointer(row, CODES_OUT, CODES_TYPE, False), pointer(row, EXPONENTS, tl.int8, False),
            pointer(row, POSITIVE, tl.int8, False), pointer(row, SPOILED, tl.int32, False),
        )  # fmt: skip
        careful, noisy, unit = 0, 0, own
        if ROUNDING != NEAREST:
            careful = is_careful(most, greatest, own, enough, grid, EACH, TINY)
        if ROUNDING == CORRECTED:
            noisy = tl.max((variance_in_gaps(greatest, gap_of(own, TINY), TINY) > V0).to(tl.int32))
        if careful > 0:
            decision = load_decision(
                stats, spread, greatest, rows, own, enough, source, grid, TINY, DRIFT != NO_DRIFT, ROUNDING, PURPOSE, EACH
            )  # fmt: skip
            unit = tl.where(decision[2], decision[1], decision[0])
            largest = draw_rows_decided(
                mean, spread, variances, rows, first * 4, last * 4, old, decision, spoiled, source, grid, target, C, CODES, DRIFT,
                EACH, TINY, ROUNDING, PURPOSE, HAS_VALUES, HAS_CODES, MASKED,
            )  # fmt: skip
        else:
            largest = draw_rows(
                mean, spread, variances, rows, first, last, old, own, spoiled, noisy, source, grid, target, C, CODES, DRIFT, EACH,
                TINY, ROUNDING, PURPOSE, HAS_VALUES, HAS_CODES, MASKED,
            )  # fmt: skip
        if HAS_CODES:
            tl.atomic_max(stats + RESULT, tl.where(spoiled, 0, largest).to(tl.int64))
            tl.store(stats + UNIT, unit.to(tl.int64))
            if HAS_VALUES:
                if tl.max(spoiled.to(tl.int32)) > 0:
                    tl.store(target[4], 1)


@triton.jit(do_not_specialize=["count"])
def split_finish(
    table, flags, count, CODES_TYPE: tl.constexpr, FLAGGED: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr
):
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, number, rows, stats, first, last = piece_of(table, count, PIECE, C)
        codes = pointer(row, CODES_OUT, CODES_TYPE, False)
        target = codes, codes, pointer(row, EXPONENTS, tl.int8, False), codes, codes
        most, unit = tl.load(stats + RESULT).to(tl.int32), tl.load(stats + UNIT).to(tl.int32)
        finish_codes(rows, first, last, number, most, unit, load_grid(row, GRID), target, C)
