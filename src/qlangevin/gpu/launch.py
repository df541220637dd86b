"""Launches of the kernels on one tensor, as `quantization.backend.Kernels` names them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..quantization.code_memory import describe_memory
from ..quantization.formats import FP32, Format, GridKind, KernelGrid
from ..quantization.random import Key
from . import kernels, split
from .grids import grid_numbers, grid_of, is_aligned, is_tiny
from .means import MOVE, NO_DRIFT, How
from .tables import Item, Table

ROUNDINGS = {"nearest": 0, "stochastic": 1, "corrected": 2}
COUNTERS = 512  # of a program that rounds elements one by one: sixteen elements a thread
ELEMENTS = 1024  # of a program that encodes or decodes
MOST_BLOCKS = 2**31 - 256
MOST_ELEMENTS = 2**33  # four elements share a counter of 32 bits
OPTIONS = {"enable_fp_fusion": False}  # a product and a sum in one instruction round once: other bits
# NVIDIA's assembler would rather put a few numbers of these kernels into local memory than have fewer warps in work.
MOST_REGISTERS = {
    "quantize_blocks": 128, "step_elements": 160, "step_blocks": 128, "split_draw": 128, "prepare": 64, "kick": 64, "follow": 64,
}  # fmt: skip

launches = 0  # since the process began, for those who count


class BlockShape(NamedTuple):
    """Blocks and counters that a program takes at once, and its warps."""

    rows: int
    counters: int
    warps: int


def block_shape(length: int) -> BlockShape:
    """Return the shape of a program for blocks of this length.

    A warp has a block, so that nothing is passed between warps, and one block in need of care does not hold up others; several if
    they are short. Long blocks have many warps, so that those in work at a time fit in the cache: they are read twice.
    """
    if length > 10240:
        return BlockShape(1, 1024, 8 if torch.version.hip else 16)  # 512 threads: AMD's warps have 64
    if length > 4608:  # the longest rows of a ResNet-18, whose step is one launch
        return BlockShape(1, 256, 2 if torch.version.hip else 4)
    return BlockShape(1, 64, 1) if length > 128 else BlockShape(4, 16, 1)


def lengths(grid: KernelGrid) -> tuple[int, int]:
    """Return the lengths of lines and blocks, in units of 64 if they are multiples of it."""
    unit = 64 if is_aligned(grid) else 1
    return grid.line // unit, grid.size // unit


def run(
    kernel: Any, programs: int, device: torch.device, *args: Any, warps: int = 4, sharing: int = 1, **constants: Any
) -> None:
    """Launch a kernel on a device, on its current stream; ``sharing`` is the number of programs along the second axis."""
    global launches
    if programs == 0:
        return
    launches += 1
    options: dict[str, Any] = OPTIONS
    if device.type == "cuda" and torch.version.hip is None and kernel.fn.__name__ in MOST_REGISTERS:
        options = OPTIONS | {"maxnreg": MOST_REGISTERS[kernel.fn.__name__]}
    with _on(device):
        kernel[(programs, sharing)](*args, **constants, num_warps=warps, **options)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def check_memory(like: Tensor, *others: Tensor | None) -> None:
    """Raise ValueError for tensors that a kernel, which sees addresses alone, would misread: others are like the first."""
    if like.numel() > MOST_ELEMENTS:
        raise ValueError(f"kernels take tensors of at most 2^33 elements, got {like.numel()}; cut it into several")
    for t in (like, *others):
        if t is not None and not (
            t.is_contiguous() and t.shape == like.shape and t.device == like.device and not t.is_neg()
        ):
            raise ValueError(
                f"kernels need contiguous tensors of shape {tuple(like.shape)} on {like.device}, got {describe_memory(t)}"
            )


@lru_cache(maxsize=64)
def no_step(device: torch.device) -> Tensor:
    """Return an int64 that stands in for the step on a device where there is none."""
    return torch.zeros(1, dtype=torch.int64, device=device)


def check_blocks(format: Format, shape: torch.Size) -> None:
    """Raise ValueError for blocks that the kernels cannot count in 32 bits."""
    grid, blocks = grid_of(format, shape), format.block_count(shape)
    if max(grid.line, blocks) >= MOST_BLOCKS:
        raise ValueError(
            f"kernels count blocks, and the elements of a row, in 31 bits; {format} of shape {tuple(shape)} has {blocks} blocks "
            f"in rows of {grid.line}; cut the tensor into several"
        )


def signed_words(x: int) -> tuple[int, int]:
    """Return the two halves of a 64-bit number as signed 32-bit integers, low first."""
    low, high = x & 0xFFFFFFFF, x >> 32
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


@lru_cache(maxsize=65536)
def _key_words(seed: int, stream: int) -> tuple[int, int]:
    low, high = Key(seed, stream).bits
    return signed_words(low | high << 32)


def key_words(key: Key) -> tuple[int, int]:
    """Return the generator's key, two words."""
    return _key_words(key.seed, key.stream)


# ---- rounding


def quantize(
    x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, variance: Tensor | None = None,
    out: Tensor | None = None, positive: Tensor | None = None, move: Tensor | None = None, *, step: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return Q(x) of a contiguous tensor, or Q(x + move), written to ``out`` if given, which may be x itself.

    Where ``positive``, int8 codes, is zero or less, the result is zero. ``step`` takes the place of the key's.
    """
    out = torch.empty_like(x) if out is None else out
    _round(x, out, format, rounding_, key, purpose, variance, move, positive=positive, step=step)
    return out


def quantize_with_codes(
    x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, codes: tuple[Tensor, Tensor], *,
    spoiled: Tensor | None = None, step: Tensor | None = None,
) -> bool:  # fmt: skip
    """Round x in place and write codes and exponents of the result; note in ``spoiled`` if it holds a NaN, which has no code."""
    spoiled = x.new_zeros(1, dtype=torch.int32) if spoiled is None else spoiled
    _round(x, x, format, rounding_, key, purpose, None, None, codes=codes, spoiled=spoiled, step=step)
    return True


def _round(
    x: Tensor, out: Tensor, format: Format, rounding: str, key: Key, purpose: int, variance: Tensor | None, move: Tensor | None,
    *, positive: Tensor | None = None, codes: tuple[Tensor, Tensor] | None = None, spoiled: Tensor | None = None,
    step: Tensor | None = None,
) -> None:  # fmt: skip
    grid, each = grid_of(format, x.shape), variance is not None and variance.dim() > 0
    check_blocks(format, x.shape)
    check_memory(x, out, move, positive, variance if each else None, None if codes is None else codes[0])
    if grid.kind == GridKind.BLOCK and grid.size > split.LONGEST:
        _round_split(x, out, format, rounding, key, purpose, variance, move, positive, codes, spoiled, step)
        return
    written, exponents = codes if codes is not None else (x, x)
    pointers = [t if t is not None else x for t in (move, variance if each else None, out, written)]
    number = no_step(x.device) if step is None else step
    rest = (x if positive is None else positive, x if spoiled is None else spoiled, number, int(step is not None))
    v = 0.0 if variance is None or each else float(variance)
    words = (*key_words(key), *signed_words(key.step), v, *grid_numbers(grid))
    coded, masked = codes is not None, positive is not None
    if grid.kind != GridKind.BLOCK:
        run(
            kernels.quantize_elements, triton.cdiv(x.numel(), 4 * COUNTERS), x.device, x, *pointers, *rest, x.numel(), *words,
            KIND=int(grid.kind), ROUNDING=ROUNDINGS[rounding], PURPOSE=purpose, MOVED=move is not None, EACH=each,
            TINY=is_tiny(grid), HAS_CODES=coded, MASKED=masked, C=COUNTERS,
        )  # fmt: skip
        return
    shape, blocks = block_shape(grid.size), format.block_count(x.shape)
    drift = (NO_DRIFT if move is None else MOVE).value
    how = How(
        ROUNDINGS[rounding], purpose, drift, is_tiny(grid), each, values=True, coded=coded, masked=masked,
        aligned=is_aligned(grid),
    )  # fmt: skip
    run(
        kernels.quantize_blocks, triton.cdiv(blocks, shape.rows), x.device, x, *pointers, exponents, *rest, blocks,
        *lengths(grid), *words, HOW=how, R=shape.rows, C=shape.counters, warps=shape.warps,
    )  # fmt: skip


def _round_split(
    x: Tensor, out: Tensor | None, format: Format, rounding: str, key: Key, purpose: int, variance: Tensor | None,
    move: Tensor | None, positive: Tensor | None, codes: tuple[Tensor, Tensor] | None, spoiled: Tensor | None,
    step: Tensor | None,
) -> None:  # fmt: skip
    """Round blocks that programs share; a table has the one tensor."""
    each = variance is not None and variance.dim() > 0
    item = Item(
        x, key, format, x.shape, move, out, None if codes is None else codes[1], codes=None if codes is None else codes[0],
        variances=variance if each else None, positive=positive, spoiled=spoiled, counted=0 if step is None else step.data_ptr(),
    )  # fmt: skip
    v = 0.0 if variance is None or each else float(variance)
    drift, tiny = (NO_DRIFT if move is None else MOVE).value, is_tiny(grid_of(format, x.shape))
    how = How(
        ROUNDINGS[rounding], purpose, drift, tiny, each, values=out is not None, coded=codes is not None,
        masked=positive is not None,
    )  # fmt: skip
    split.round_split(_launch_on_table, [item], how, (0.0, 0.0, 0.0, v))


def _launch_on_table(kernel: Any, table: Table, *numbers: float, warps: int, **constants: Any) -> None:
    rows = table.rows
    run(
        kernel,
        table.programs,
        rows.device,
        rows,
        rows,
        table.tensors,
        *numbers,
        warps=warps,
        FLAGGED=False,
        **constants,
    )


# ---- codes


def encode(values: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> None:
    """Write codes and exponents of values on the grid. All contiguous, one code an element."""
    if format == FP32:
        codes.view(torch.float32).copy_(values)
    else:
        _encode(values, values, codes, exponents, format, None)


def relu_with_codes(
    x: Tensor, out: Tensor, codes: Tensor, exponents: Tensor, format: Format, *, spoiled: Tensor | None = None
) -> bool:
    """Write relu(x) to ``out``, which may be x, and its codes, for x on the grid; note in ``spoiled`` if it holds a NaN."""
    _encode(x, out, codes, exponents, format, x.new_zeros(1, dtype=torch.int32) if spoiled is None else spoiled)
    return True


def _encode(x: Tensor, out: Tensor, codes: Tensor, exponents: Tensor, format: Format, spoiled: Tensor | None) -> None:
    grid, relu = grid_of(format, x.shape), spoiled is not None
    check_blocks(format, x.shape)
    check_memory(x, out, codes)
    if grid.kind == GridKind.BLOCK and grid.size > split.LONGEST:
        source, values = (torch.clamp_min(x, 0, out=out), out) if relu else (x, None)
        nothing = Key(0), 0, None, None, None  # numbers on the grid stay where they are
        _round_split(source, values, format, "nearest", *nothing, (codes, exponents), spoiled, None)
        return
    flag = x if spoiled is None else spoiled
    numbers, constants = grid_numbers(grid), {"TINY": is_tiny(grid), "RELU": relu}
    if grid.kind != GridKind.BLOCK:
        run(
            kernels.encode_elements, triton.cdiv(x.numel(), ELEMENTS), x.device, x, out, codes, flag, x.numel(), *numbers,
            KIND=int(grid.kind), E=ELEMENTS, **constants,
        )  # fmt: skip
        return
    shape, blocks = block_shape(grid.size), format.block_count(x.shape)
    run(
        kernels.encode_blocks, triton.cdiv(blocks, shape.rows), x.device, x, out, codes, exponents, flag, blocks,
        *lengths(grid), *numbers, ALIGNED=is_aligned(grid), R=shape.rows, C=shape.counters, warps=shape.warps, **constants,
    )  # fmt: skip


def decode(
    values: Tensor, codes: Tensor, exponents: Tensor | None, format: Format, *, spoiled: Tensor | None = None
) -> None:
    """Write the values that codes and exponents stand for; NaN throughout if the tensor was spoiled."""
    if format == FP32:
        values.copy_(codes.view(torch.float32))
        return
    check_blocks(format, codes.shape)
    check_memory(codes, values)
    grid, flag, constants = (
        grid_of(format, codes.shape),
        codes if spoiled is None else spoiled,
        {"FLAGGED": spoiled is not None},
    )
    if grid.kind != GridKind.BLOCK:
        run(
            kernels.decode_elements, triton.cdiv(codes.numel(), ELEMENTS), codes.device, codes, values, flag, codes.numel(),
            *grid_numbers(grid), KIND=int(grid.kind), TINY=is_tiny(grid), E=ELEMENTS, **constants,
        )  # fmt: skip
        return
    shape, blocks = block_shape(grid.size), format.block_count(codes.shape)
    run(
        kernels.decode_blocks, triton.cdiv(blocks, shape.rows), codes.device, codes, exponents, values, flag, blocks,
        *lengths(grid), grid.shift, ALIGNED=is_aligned(grid), R=shape.rows, C=shape.counters, warps=shape.warps,
        sharing=min(triton.cdiv(grid.size, 4 * 4 * shape.counters), 4096), **constants,
    )  # fmt: skip


def encode_exactly(values: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> bool:
    """Write codes and exponents of any values; return True if they decode to the same bits. Waits for the device."""
    encode(values, codes, exponents, format)
    back = torch.empty_like(values)
    decode(back, codes, exponents, format)
    in_range = values.isfinite() & (values >= format.low) & (values <= format.high)
    bits = torch.int32 if values.itemsize == 4 else torch.int16
    return bool((in_range & (back.view(bits) == values.view(bits))).all())


def first_not_finite(tensors: list[Tensor]) -> int:
    """Return the index of the first tensor that holds an infinity or a NaN, or -1. Waits for the device, once."""
    if not tensors:
        return -1
    found = torch.stack([~t.isfinite().all() for t in tensors]).to("cpu").nonzero()
    return int(found[0]) if len(found) else -1
