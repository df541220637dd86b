"""Kernels that work on one tensor: rounding, with and without codes, and codes alone. Launched by `gpu.launch`.

Numbers of a grid, the key and the step come as arguments. A step can also be an int64 on the device (on_device), so that
a CUDA graph reads it anew each time it is replayed; kernels are the same for both, because a capture can load no new ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import float_code, float_value, integer_code
from .elements import CORRECTED, FIXED, NEAREST, NONE, round_element
from .generator import NOISE, bits_of, centered, normal
from .laws import V0, from_gaps, gap_of, variance_in_gaps
from .round_rows import round_rows
from .rows import INFINITY, chunk_count, in_order, own_gap, places_of

# Kernels are not compiled anew for special values of what changes with calls and formats; and a 1 would be no number to them.
WORDS = ["on_device", "key0", "key1", "step0", "step1"]
GRID = ["shift", "min_gap", "max_gap"]
BLOCKS = ["blocks", "line", "size"]


@triton.jit
def source_of(key0, key1, step0, step1, step, on_device):
    """Return key and step as four words; the step is a number, or counted on the device."""
    counted = tl.load(step, mask=on_device != 0, other=0)
    low = tl.where(on_device != 0, counted.to(tl.uint32), step0.to(tl.uint32))
    high = tl.where(on_device != 0, (counted >> 32).to(tl.uint32), step1.to(tl.uint32))
    return key0.to(tl.uint32), key1.to(tl.uint32), low, high


@triton.jit(do_not_specialize=[*WORDS, *GRID, "numel"])
def quantize_elements(
    x, other, variances, out, codes, positive, spoiled, step, on_device, numel, key0, key1, step0, step1, v, shift, min_gap,
    max_gap, top, low, high, fit, fit_three, fit_noise, KIND: tl.constexpr, ROUNDING: tl.constexpr, PURPOSE: tl.constexpr,
    MOVED: tl.constexpr, EACH: tl.constexpr, TINY: tl.constexpr, HAS_CODES: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Round the elements of a tensor, each on its own: C counters, that is 4 C elements, in a program."""
    source = source_of(key0, key1, step0, step1, step, on_device)
    grid = (shift, min_gap, max_gap, top, low, high, fit, fit_three, fit_noise)
    c = tl.arange(0, C)
    first = tl.program_id(0).to(tl.int64) * (4 * C)
    left = tl.minimum(numel - first, 4 * C).to(tl.int32)
    tile, lane = tl.program_id(0) * (C // 16) + c // 16, c % 16
    nothing = tl.zeros([C], tl.float32)
    h, xi = (nothing, nothing, nothing, nothing), (nothing, nothing, nothing, nothing)
    if ROUNDING != NEAREST and KIND != NONE:
        h = centered(source, PURPOSE, tile, lane)
    if ROUNDING == CORRECTED:
        noisy = True
        if KIND == FIXED and not EACH:
            noisy = variance_in_gaps(v, gap_of(min_gap, TINY), TINY) > V0
        if noisy:
            xi = normal(source, NOISE, tile, lane)
    spoils = tl.zeros([C], tl.int32)
    for k in tl.static_range(4):
        place = c // 16 * 64 + 16 * k + lane
        at, inside = first + place, place < left
        start = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        move = tl.load(other + at, mask=inside, other=0).to(tl.float32) if MOVED else start
        each = tl.load(variances + at, mask=inside, other=0.0) if EACH else v
        value = round_element(start, move, each, h[k], xi[k], grid, KIND, ROUNDING, MOVED, TINY)
        if HAS_CODES:
            code = encode_element(value, grid, KIND, TINY, codes.dtype.element_ty.primitive_bitwidth)
            tl.store(codes + at, code.to(codes.dtype.element_ty), mask=inside)
            spoils = spoils | ((value != value) & inside).to(tl.int32)
        if MASKED:
            value = tl.where(tl.load(positive + at, mask=inside, other=0) > 0, value, 0.0)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    if HAS_CODES:
        if tl.max(spoils) > 0:  # seldom
            tl.store(spoiled, 1)


@triton.jit
def elements_of(part, numel, E: tl.constexpr):
    """Return the indices of E elements, and a mask of those that there are; 64-bit numbers are compared once."""
    first, place = part.to(tl.int64) * E, tl.arange(0, E)
    return first + place, place < tl.minimum(numel - first, E).to(tl.int32)


@triton.jit
def encode_element(value, grid, KIND: tl.constexpr, TINY: tl.constexpr, BITS: tl.constexpr):
    """Return the code of a number on the grid of fixed or floating point."""
    if KIND == FIXED:
        return integer_code(value, gap_of(grid[1], TINY), TINY)
    return float_code(value, grid, BITS)


@triton.jit
def rows_of(blocks, line, size, R: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the numbers of the blocks of this program, and (start, length); lines are cut into blocks, the last shorter.

    Lengths of ALIGNED lines and blocks come in units of 64, so that the compiler knows that they are multiples of it.
    """
    number = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    if ALIGNED:
        line, size = line * 64, size * 64
    pieces = (line + size - 1) // size
    begin = number % pieces * size
    start = (number // pieces).to(tl.int64) * line + begin
    return number, (start, tl.where(number < blocks, tl.minimum(size, line - begin), 0))


@triton.jit(do_not_specialize=[*WORDS, *GRID, *BLOCKS])
def quantize_blocks(
    x, other, variances, out, codes, exponents, positive, spoiled, step, on_device, blocks, line, size, key0, key1, step0, step1,
    v, shift, min_gap, max_gap, top, low, high, fit, fit_three, fit_noise, HOW: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Round blocks of a tensor, R in a program."""
    source = source_of(key0, key1, step0, step1, step, on_device)
    grid = (shift, min_gap, max_gap, top, low, high, fit, fit_three, fit_noise)
    numbers, rows = rows_of(blocks, line, size, R, HOW.aligned)
    mean = (x, other, gap_of(numbers * 0, False), v, variances, source, 0.0, 0.0, 0.0, 0.0)
    round_rows(mean, rows, numbers, grid, (out, codes, exponents, positive, spoiled), HOW, C)


# ---- codes


@triton.jit(do_not_specialize=[*GRID, "numel"])
def encode_elements(
    x, out, codes, spoiled, numel, shift, min_gap, max_gap, top, low, high, fit, fit_three, fit_noise, KIND: tl.constexpr,
    TINY: tl.constexpr, RELU: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Write codes of numbers on the grid; with RELU those of relu(x), which is written too."""
    grid = (shift, min_gap, max_gap, top, low, high, fit, fit_three, fit_noise)
    at, inside = elements_of(tl.program_id(0), numel, E)
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0.0, 0.0, value)  # a NaN stays one
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
        if tl.max((inside & (value != value)).to(tl.int32)) > 0:  # seldom
            tl.store(spoiled, 1)
    code = encode_element(value, grid, KIND, TINY, codes.dtype.element_ty.primitive_bitwidth)
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*GRID, *BLOCKS])
def encode_blocks(
    x, out, codes, exponents, spoiled, blocks, line, size, shift, min_gap, max_gap, top, low, high, fit, fit_three, fit_noise,
    TINY: tl.constexpr, RELU: tl.constexpr, ALIGNED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The same for blocks, R in a program."""
    grid = (shift, min_gap, max_gap, top, low, high, fit, fit_three, fit_noise)
    numbers, rows = rows_of(blocks, line, size, R, ALIGNED)
    start, length = rows
    chunks = chunk_count(rows, C)
    most = tl.zeros([R, C], tl.int32)
    for chunk in range(chunks):
        for k in tl.static_range(4):
            place, inside = places_of(rows, chunk, k, C, ALIGNED)
            value = load_positive(x, start + place, inside, RELU)
            most = tl.maximum(most, bits_of(tl.abs(value)).to(tl.int32, bitcast=True))
    largest = tl.max(most, 1)[:, None]
    spoils = (largest > INFINITY) & (length > 0)
    if RELU:
        if tl.max(spoils.to(tl.int32)) > 0:  # seldom
            tl.store(spoiled, 1)
    own = own_gap(tl.minimum(largest, INFINITY).to(tl.float32, bitcast=True), grid)
    gap = gap_of(own, TINY)
    tl.store(exponents + numbers, (own + shift).to(tl.int8), mask=length > 0)
    for chunk in range(chunks):
        for k in tl.static_range(4):
            place, inside = places_of(rows, chunk, k, C, ALIGNED)
            value = load_positive(x, start + place, inside, RELU)
            tl.store(codes + start + place, integer_code(value, gap, TINY).to(codes.dtype.element_ty), mask=inside)
            if RELU:
                tl.store(out + start + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def load_positive(x, at, inside, RELU: tl.constexpr):
    """Return x, or relu(x)."""
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if RELU:
        value = tl.where(value < 0.0, 0.0, value)
    return value


@triton.jit
def write_decoded(out, at, inside, value, spoiled, FLAGGED: tl.constexpr):
    if FLAGGED:
        value = tl.where(tl.load(spoiled) != 0, float("nan"), value)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*GRID, "numel"])
def decode_elements(
    codes, out, spoiled, numel, shift, min_gap, max_gap, top, low, high, fit, fit_three, fit_noise, KIND: tl.constexpr,
    TINY: tl.constexpr, FLAGGED: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Write the numbers that codes of fixed or floating point stand for; NaN throughout if the tensor was spoiled."""
    grid = (shift, min_gap, max_gap, top, low, high, fit, fit_three, fit_noise)
    at, inside = elements_of(tl.program_id(0), numel, E)
    code = tl.load(codes + at, mask=inside, other=0)
    if KIND == FIXED:
        value = from_gaps(code.to(tl.float32), gap_of(min_gap, TINY), TINY)
    else:
        value = float_value(code, grid, codes.dtype.element_ty.primitive_bitwidth)
    write_decoded(out, at, inside, value, spoiled, FLAGGED)


@triton.jit(do_not_specialize=["shift", *BLOCKS])
def decode_blocks(
    codes, exponents, out, spoiled, blocks, line, size, shift, FLAGGED: tl.constexpr, ALIGNED: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The same for blocks, R in a program; programs along the second axis share them."""
    numbers, rows = rows_of(blocks, line, size, R, ALIGNED)
    start, length = rows
    # An exponent that no block has, in a damaged file say, may be below those of float32.
    e = tl.load(exponents + numbers, mask=length > 0, other=0).to(tl.int32) - shift
    gap = gap_of(tl.maximum(e, -149), True)
    for chunk in range(tl.program_id(1), (tl.max(length) + (4 * C - 1)) // (4 * C), tl.num_programs(1)):
        place, inside = in_order(rows, chunk, 4 * C)
        code = tl.load(codes + start + place, mask=inside, other=0)
        value = tl.where(e < -149, 0.0, from_gaps(code.to(tl.float32), gap, True))
        write_decoded(out, start + place, inside, value, spoiled, FLAGGED)
