"""Tables of tensors for launches that work on many of them: rows of int64, uploaded once and kept as long as addresses last."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantization.formats import Format, KernelGrid
from ..quantization.random import Key
from .grids import grid_numbers, grid_of
from .step_kernels import Row

__all__ = ["Item", "Table", "addresses_of", "float_bits", "grid_row", "make_table"]

MOST_TABLES = 64
_uploaded: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
_captured: list[Tensor] = []  # CUDA graphs read these when they are replayed
_spare: dict[tuple[int, int], list[Tensor]] = {}  # pinned memory for tables of so many rows and columns
SPARE = 4


class Item(NamedTuple):
    """One tensor of a launch: x is read, and written unless there is an ``out``."""

    x: Tensor
    key: Key
    format: Format | None
    shape: torch.Size
    other: Tensor | None = None  # a gradient
    out: Tensor | None = None
    exponents: Tensor | None = None
    gradients: Format | None = None
    weights: Format | None = None
    slot: int = 0
    codes: Tensor | None = None  # these five of blocks that programs share
    variances: Tensor | None = None
    positive: Tensor | None = None
    spoiled: Tensor | None = None
    stats: Tensor | None = None
    counted: int = 0  # the address of the number of the step on the device; 0: that of the key


class Table(NamedTuple):
    """A table on the device, and the number of programs that it is for."""

    rows: Tensor
    tensors: int
    programs: int
    aligned: bool


@lru_cache(maxsize=4096)
def grid_row(format: Format | None, shape: torch.Size) -> tuple[int, ...]:
    """Return the numbers of a grid as the table holds them: floats as their bits."""
    numbers = grid_numbers(KernelGrid() if format is None else grid_of(format, shape))
    return tuple(n if isinstance(n, int) else float_bits(n) for n in numbers)


def float_bits(x: float) -> int:
    """Return the bits of a float32 as a table holds them."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def make_table(items: Sequence[Item], per_program: Sequence[int], more: Sequence[tuple[int, ...]] = ()) -> Table:
    """Return the table of some tensors, of which item i has per_program[i] programs; upload it unless it is there already.

    ``more`` are further columns of each row.
    """
    rows, first, aligned = [], 0, True
    for i, (item, programs) in enumerate(zip(items, per_program, strict=True)):
        rows.append((*_row(item, first), *more[i]) if more else _row(item, first))
        first += programs
        aligned = aligned and all(address % 16 == 0 for address in rows[-1][: Row.EXPONENTS])
    return Table(_upload(tuple(rows), items[0].x.device), len(rows), first, aligned)


def _row(item: Item, first: int) -> tuple[int, ...]:
    grid = KernelGrid() if item.format is None else grid_of(item.format, item.shape)
    blocks = 0 if item.format is None else item.format.block_count(item.shape)
    addresses = addresses_of(item.x, item.other, item.out, item.exponents)
    shared = addresses_of(item.codes, item.variances, item.positive, item.spoiled, item.stats)
    low, high = item.key.bits
    key, step = (n - (n >> 63 << 64) for n in (low | high << 32, item.key.step))
    return (
        *addresses, item.x.numel(), key, 0 if item.counted else step, item.counted, first, blocks, grid.line, grid.size,
        item.slot, *shared, *grid_row(item.format, item.shape), *grid_row(item.gradients, item.shape),
        *grid_row(item.weights, item.shape),
    )  # fmt: skip


def addresses_of(*tensors: Tensor | None) -> list[int]:
    """Return the addresses of tensors; 0 where there is none."""
    return [0 if t is None else t.data_ptr() for t in tensors]


def _upload(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """Return the rows on a device, copied there on its current stream; the host does not wait."""
    if device.type == "cpu":
        return torch.tensor(rows, dtype=torch.int64, device="cpu")
    if is_capturing(
        device
    ):  # the copy is made when the graph is replayed: not for anybody else, and both are kept for it
        _captured.append(_take_spare(rows))
        _captured.append(_copy_to(device, _captured[-1]))
        return _captured[-1]
    key = (device, torch.get_device_module(device).current_stream(device).stream_id, rows)
    table = _uploaded.get(key)
    if table is None:
        table = _copy_to(device, torch.tensor(rows, dtype=torch.int64, device="cpu").pin_memory())
        _uploaded[key] = table
        if len(_uploaded) > MOST_TABLES:
            _uploaded.popitem(last=False)
    else:
        _uploaded.move_to_end(key)
    _set_aside(len(rows), len(rows[0]))
    return table


def _copy_to(device: torch.device, pinned: Tensor) -> Tensor:
    return torch.empty_like(pinned, device=device, pin_memory=False).copy_(pinned, non_blocking=True)


def _set_aside(count: int, width: int) -> None:
    """Have pinned memory for tables of this size, as many as are in use and some more: a capture can allocate none."""
    spare = _spare.setdefault((count, width), [])
    in_use = sum((len(key[2]), len(key[2][0])) == (count, width) for key in _uploaded)
    while len(spare) < in_use + SPARE:
        spare.append(torch.empty((count, width), dtype=torch.int64, device="cpu", pin_memory=True))


def _take_spare(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return rows in memory that was set aside."""
    spare = _spare.get((len(rows), len(rows[0])))
    if not spare:
        raise RuntimeError(
            "a CUDA graph that is captured needs memory that earlier steps set aside, and there is none left; take one more step "
            "of the same kind before each capture"
        )
    return spare.pop().copy_(torch.tensor(rows, dtype=torch.int64, device="cpu"))


def is_capturing(device: torch.device) -> bool:
    """Return True while a CUDA graph is being captured on the current stream of a device."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())
