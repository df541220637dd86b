"""Kernels that step many tensors in one launch: θ' = Q(θ + δ, v), δ = -lr (Q_G(g) + λ θ). See `sampling.step.update`.

A table has a row of int64 for each tensor, in the order of `Row`: addresses, sizes, the key, and the numbers of its grids, floats
as their bits. Row i has the programs from its FIRST to that of the next. ``flags`` are two int32, (now, before): NO_ERROR, or the
number of the first tensor whose gradient is not finite, in this step and in those before. A step is taken only if there is none.
"""

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl

from ..quantization import random
from ..quantization.backend import NO_ERROR
from .codes import float_value
from .elements import CORRECTED, FIXED, NEAREST, NONE, STOCHASTIC, round_code, round_element
from .generator import NOISE, bits_of, centered, normal
from .kernels import elements_of, encode_element
from .laws import V0, from_gaps, gap_of, variance_in_gaps
from .round_rows import round_rows


class Row(IntEnum):
    """Columns of a table."""

    X, OTHER, OUT, EXPONENTS, NUMEL, KEY, STEP, COUNT, FIRST, BLOCKS, LINE, SIZE, SLOT = range(13)
    CODES_OUT, VARIANCES, POSITIVE, SPOILED, STATS = range(13, 18)  # of blocks that programs share
    GRID, GRADIENTS, WEIGHTS, WIDTH = 18, 27, 36, 45  # nine numbers each


X, OTHER, OUT, EXPONENTS = (tl.constexpr(int(i)) for i in (Row.X, Row.OTHER, Row.OUT, Row.EXPONENTS))
NUMEL, KEY, STEP, COUNT, FIRST = (tl.constexpr(int(i)) for i in (Row.NUMEL, Row.KEY, Row.STEP, Row.COUNT, Row.FIRST))
BLOCKS, LINE, SIZE, SLOT = (tl.constexpr(int(i)) for i in (Row.BLOCKS, Row.LINE, Row.SIZE, Row.SLOT))
CODES_OUT, VARIANCES, POSITIVE = (tl.constexpr(int(i)) for i in (Row.CODES_OUT, Row.VARIANCES, Row.POSITIVE))
SPOILED, STATS = tl.constexpr(int(Row.SPOILED)), tl.constexpr(int(Row.STATS))
GRID, GRADIENTS, WEIGHTS, WIDTH = (tl.constexpr(int(i)) for i in (Row.GRID, Row.GRADIENTS, Row.WEIGHTS, Row.WIDTH))
CLEAR = tl.constexpr(NO_ERROR)
ROUNDING_BITS, GRADIENT_BITS, WEIGHT_BITS = (tl.constexpr(p) for p in (random.ROUNDING, random.GRADIENT, random.WEIGHT))


@triton.jit
def find_row(table, count, ROW: tl.constexpr = WIDTH):
    """Return the row of the tensor that this program works on, and the number of the program among those of the tensor.

    Rows have ROW columns, those of `Row` first.
    """
    pid = tl.program_id(0)
    low, high = 0, count
    while high - low > 1:  # times 6: a ResNet-18 has 62 tensors
        middle = (low + high) // 2
        if tl.load(table + middle * ROW + FIRST) <= pid:
            low = middle
        else:
            high = middle
    row = table + low * ROW
    return row, pid - tl.load(row + FIRST).to(tl.int32)


@triton.jit
def pointer(row, COLUMN: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer in a column."""
    p = tl.load(row + COLUMN).to(tl.pointer_type(TYPE))
    if ALIGNED:
        p = tl.multiple_of(p, 16)
    return p


@triton.jit
def number(row, COLUMN: tl.constexpr):
    """Return the float32 in a column."""
    return tl.load(row + COLUMN).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_grid(row, COLUMN: tl.constexpr):
    """Return the grid that begins at a column."""
    shift, min_gap = tl.load(row + COLUMN).to(tl.int32), tl.load(row + COLUMN + 1).to(tl.int32)
    return (
        shift, min_gap, tl.load(row + COLUMN + 2).to(tl.int32), number(row, COLUMN + 3), number(row, COLUMN + 4),
        number(row, COLUMN + 5), number(row, COLUMN + 6), number(row, COLUMN + 7), number(row, COLUMN + 8),
    )  # fmt: skip


@triton.jit
def load_source(row):
    """Return key and step of a tensor: the step is a number in the table, or counted on the device."""
    return source_at(tl.load(row + KEY), tl.load(row + STEP), tl.load(row + COUNT))


@triton.jit
def source_at(key, step, count):
    """Return a key and a step as four words; the step is at the address ``count`` if there is one."""
    if count != 0:
        step = tl.load(count.to(tl.pointer_type(tl.int64)))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32), step.to(tl.uint32), (step >> 32).to(tl.uint32)


@triton.jit
def is_clear(flags, FLAGGED: tl.constexpr):
    """Return whether there was no error; the first program notes that this step was begun."""
    if FLAGGED:
        now = tl.load(flags)
        if tl.program_id(0) == 0:
            tl.store(flags + 1, now)
        return now == CLEAR
    return tl.program_id(0) >= 0


@triton.jit(do_not_specialize=["count"])
def begin(table, flags, count, TYPE: tl.constexpr, ALIGNED: tl.constexpr, E: tl.constexpr):
    """Count a step of each tensor, and look for gradients that are not finite; after an error do nothing."""
    if tl.load(flags + 1) == CLEAR:
        row, part = find_row(table, count)
        if part == 0:
            counted = tl.load(row + COUNT).to(tl.pointer_type(tl.int64))
            tl.store(counted, tl.load(counted) + 1)
        at, inside = elements_of(part, tl.load(row + NUMEL), E)
        g = tl.load(pointer(row, X, TYPE, ALIGNED) + at, mask=inside, other=0).to(tl.float32)
        if tl.max(bits_of(tl.abs(g)).to(tl.int32, bitcast=True)) >= 0x7F800000:  # seldom
            tl.atomic_min(flags, tl.load(row + SLOT).to(tl.int32))


@triton.jit
def load_theta(x, at, inside, grid, KIND: tl.constexpr, CODES: tl.constexpr, TINY: tl.constexpr):
    """Return numbers, or those that codes of fixed or floating point stand for."""
    loaded = tl.load(x + at, mask=inside, other=0)
    if not CODES:
        return loaded.to(tl.float32)
    if KIND == FIXED:
        return from_gaps(loaded.to(tl.float32), gap_of(grid[1], TINY), TINY)
    return float_value(loaded, grid, x.dtype.element_ty.primitive_bitwidth)


@triton.jit
def store_theta(out, at, inside, value, grid, KIND: tl.constexpr, CODES: tl.constexpr, TINY: tl.constexpr):
    """Write numbers on the grid, or their codes."""
    if CODES:
        value = encode_element(value, grid, KIND, TINY, out.dtype.element_ty.primitive_bitwidth)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_gradient(row, g, at, inside, h, Q_G: tl.constexpr, TINY: tl.constexpr):
    """Return Q_G of gradients."""
    gradient = tl.load(g + at, mask=inside, other=0).to(tl.float32)
    if Q_G != NONE:
        grid = load_grid(row, GRADIENTS)
        gradient = round_element(gradient, gradient, 0.0, h, gradient, grid, Q_G, STOCHASTIC, False, TINY)
    return gradient


@triton.jit
def draw_bits(
    source, tile, lane, noisy, KIND: tl.constexpr, ROUNDING: tl.constexpr, Q_G: tl.constexpr, Q_W: tl.constexpr
):
    """Return the random numbers of rounding, of noise, of Q_G and of Q_W; zeros where they are not used."""
    nothing = (tile * 0).to(tl.float32)
    h = (nothing, nothing, nothing, nothing)
    xi, bits_g, bits_w = h, h, h
    if ROUNDING != NEAREST and KIND != NONE:
        h = centered(source, ROUNDING_BITS, tile, lane)
    if noisy:
        xi = normal(source, NOISE, tile, lane)
    if Q_G != NONE:
        bits_g = centered(source, GRADIENT_BITS, tile, lane)
    if ROUNDING != NEAREST and Q_W != NONE:
        bits_w = centered(source, WEIGHT_BITS, tile, lane)
    return h, xi, bits_g, bits_w


@triton.jit(do_not_specialize=["count"])
def step_elements(
    table, flags, count, rate, sign, decay, v, TYPE: tl.constexpr, CODES: tl.constexpr, GRADIENT_TYPE: tl.constexpr,
    KIND: tl.constexpr, TINY: tl.constexpr, ROUNDING: tl.constexpr, Q_G: tl.constexpr, TINY_G: tl.constexpr,
    WEIGHTS_TYPE: tl.constexpr, WEIGHTS_CODES: tl.constexpr, Q_W: tl.constexpr, TINY_W: tl.constexpr, THEN: tl.constexpr,
    GIVEN: tl.constexpr, EACH: tl.constexpr, FLAGGED: tl.constexpr, ALIGNED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Step tensors in which every element stands alone; Q_G, Q_W and KIND are kinds of grids.

    With THEN, x is an accumulator: its weights are rounded from it. With GIVEN the drift is read in the gradient's place, and
    naive rounding has its noise in it; with EACH every element has its own variance.
    """
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, part = find_row(table, count)
        source, grid = load_source(row), load_grid(row, GRID)
        x, g = pointer(row, X, TYPE, ALIGNED), pointer(row, OTHER, GRADIENT_TYPE, ALIGNED)
        variances = pointer(row, VARIANCES, tl.float32, True)
        c = tl.arange(0, C)
        first = part.to(tl.int64) * (4 * C)
        left = tl.minimum(tl.load(row + NUMEL) - first, 4 * C).to(tl.int32)
        tile, lane = part * (C // 16) + c // 16, c % 16
        noisy = v > 0.0
        if EACH:
            noisy = tl.program_id(0) >= 0
        elif KIND == FIXED and ROUNDING == CORRECTED:
            noisy = variance_in_gaps(v, gap_of(grid[1], TINY), TINY) > V0
        h, xi, bits_g, bits_w = draw_bits(source, tile, lane, noisy, KIND, ROUNDING, Q_G, Q_W if THEN else NONE)
        sigma = tl.sqrt_rn(v)
        NOISE_FREE: tl.constexpr = NEAREST if ROUNDING == NEAREST else STOCHASTIC
        for k in tl.static_range(4):
            place = c // 16 * 64 + 16 * k + lane
            at, inside = first + place, place < left
            theta = load_theta(x, at, inside, grid, KIND, CODES, TINY)
            move = load_gradient(row, g, at, inside, bits_g[k], Q_G, TINY_G)
            each = tl.load(variances + at, mask=inside, other=0.0) if EACH else v
            if not GIVEN:
                move = rate * (sign * move + decay * theta)
                if ROUNDING != CORRECTED:
                    if noisy:
                        move = move + sigma * xi[k]
            if CODES and KIND == FIXED and not TINY and ROUNDING != NEAREST:
                code = tl.load(x + at, mask=inside, other=0).to(tl.float32)
                tl.store(x + at, round_code(code, move, each, h[k], xi[k], grid, ROUNDING).to(TYPE), mask=inside)
            else:
                value = round_moved(theta, move, each, h[k], xi[k], grid, KIND, ROUNDING, TINY)
                store_theta(x, at, inside, value, grid, KIND, CODES, TINY)
            if THEN:
                weights, out = load_grid(row, WEIGHTS), pointer(row, OUT, WEIGHTS_TYPE, ALIGNED)
                value = round_element(value, value, 0.0, bits_w[k], value, weights, Q_W, NOISE_FREE, False, TINY_W)
                store_theta(out, at, inside, value, weights, Q_W, WEIGHTS_CODES, TINY_W)


@triton.jit
def round_moved(theta, move, v, h, xi, grid, KIND: tl.constexpr, ROUNDING: tl.constexpr, TINY: tl.constexpr):
    """Return Q(theta + move)."""
    if ROUNDING == NEAREST:
        total = theta + move
        return round_element(total, total, v, h, xi, grid, KIND, NEAREST, False, TINY)
    return round_element(theta, move, v, h, xi, grid, KIND, ROUNDING, True, TINY)


@triton.jit(do_not_specialize=["count"])
def step_blocks(
    table, flags, count, rate, sign, decay, v, TYPE: tl.constexpr, OTHER_TYPE: tl.constexpr, OUT_TYPE: tl.constexpr,
    HOW: tl.constexpr, FLAGGED: tl.constexpr, ALIGNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Step tensors in which blocks share an exponent; or, without a drift, round their numbers."""
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, part = find_row(table, count)
        grid, out = load_grid(row, GRID), pointer(row, OUT, OUT_TYPE, ALIGNED)
        line, size = tl.load(row + LINE).to(tl.int32), tl.load(row + SIZE).to(tl.int32)
        numbers = part * R + tl.arange(0, R)[:, None]
        pieces = (line + size - 1) // size
        begins = numbers % pieces * size
        inside = numbers < tl.load(row + BLOCKS)
        rows = (numbers // pieces).to(tl.int64) * line + begins, tl.where(inside, tl.minimum(size, line - begins), 0)
        exponents = pointer(row, EXPONENTS, tl.int8, False)
        mean = load_mean(row, numbers, inside, grid, rate, sign, decay, v, TYPE, OTHER_TYPE, ALIGNED, HOW)
        round_rows(mean, rows, numbers, grid, (out, out, exponents, out, flags), HOW, C)


@triton.jit
def load_mean(row, numbers, inside, grid, rate, sign, decay, v, TYPE: tl.constexpr, OTHER_TYPE: tl.constexpr,
              ALIGNED: tl.constexpr, HOW: tl.constexpr):  # fmt: skip
    """Return the means of blocks that have these numbers in their tensor: see `means`."""
    old = numbers * 0
    if HOW.codes:
        old = tl.load(pointer(row, EXPONENTS, tl.int8, False) + numbers, mask=inside, other=0).to(tl.int32) - grid[0]
    spread = v if HOW.rounding == CORRECTED else 0.0  # naive rounding has added the noise
    return (
        pointer(row, X, TYPE, ALIGNED), pointer(row, OTHER, OTHER_TYPE, ALIGNED), gap_of(old, HOW.tiny), spread,
        pointer(row, VARIANCES, tl.float32, False), load_source(row), rate, sign, decay, tl.sqrt_rn(v),
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def round_elements(
    table, flags, count, TYPE: tl.constexpr, OUT_TYPE: tl.constexpr, OUT_CODES: tl.constexpr, KIND: tl.constexpr,
    TINY: tl.constexpr, ROUNDING: tl.constexpr, PURPOSE: tl.constexpr, FLAGGED: tl.constexpr, ALIGNED: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Round numbers of tensors in which every element stands alone."""
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, part = find_row(table, count)
        grid, x, out = load_grid(row, GRID), pointer(row, X, TYPE, ALIGNED), pointer(row, OUT, OUT_TYPE, ALIGNED)
        c = tl.arange(0, C)
        first = part.to(tl.int64) * (4 * C)
        left = tl.minimum(tl.load(row + NUMEL) - first, 4 * C).to(tl.int32)
        tile, lane = part * (C // 16) + c // 16, c % 16
        h = centered(load_source(row), PURPOSE, tile, lane)
        for k in tl.static_range(4):
            place = c // 16 * 64 + 16 * k + lane
            at, inside = first + place, place < left
            from_ = tl.load(x + at, mask=inside, other=0).to(tl.float32)
            value = round_element(from_, from_, 0.0, h[k], from_, grid, KIND, ROUNDING, False, TINY)
            store_theta(out, at, inside, value, grid, KIND, OUT_CODES, TINY)
