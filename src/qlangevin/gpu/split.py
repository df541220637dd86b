"""Launches for blocks so long that many programs share one; `split_kernels` has the passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from . import split_kernels
from .elements import NEAREST
from .means import How
from .split_kernels import Stat
from .tables import Item, make_table

__all__ = ["LONGEST", "TYPES", "round_split"]

LONGEST = 65536  # elements of a block that one program takes
COUNTERS, PIECE, WARPS = 512, 8, 8  # a program takes up to 16384 elements

TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8: tl.int8,
    torch.int16: tl.int16, torch.int32: tl.int32,
}  # fmt: skip


def round_split(launch: Callable[..., None], items: Sequence[Item], how: How, numbers: tuple[float, ...]) -> None:
    """Round the blocks of tensors that have all the same dtypes and outputs: to ``out``, to ``codes``, or to both.

    ``launch`` launches a kernel on a table; the numbers are rate, sign, decay and v.
    """
    items = [item._replace(stats=_new_stats(item)) for item in items]
    table, some = make_table(items, [_programs(item) for item in items]), items[0]
    other, out, codes = (some.x if t is None else t for t in (some.other, some.out, some.codes))
    common = {"warps": WARPS, "PIECE": PIECE, "C": COUNTERS}
    read = common | {"TYPE": TYPES[some.x.dtype], "OTHER_TYPE": TYPES[other.dtype], "HOW": how}
    launch(split_kernels.split_extents, table, *numbers, **read)
    if how.rounding != NEAREST.value:
        launch(split_kernels.split_risks, table, *numbers, **read)
        launch(split_kernels.split_landings, table, *numbers, **read)
    launch(split_kernels.split_draw, table, *numbers, OUT_TYPE=TYPES[out.dtype], CODES_TYPE=TYPES[codes.dtype], **read)
    if how.coded:
        launch(split_kernels.split_finish, table, CODES_TYPE=TYPES[codes.dtype], **common)


def _new_stats(item: Item) -> torch.Tensor:
    assert item.format is not None
    size = item.format.block_count(item.shape), int(Stat.WIDTH)
    return torch.zeros(size, dtype=torch.int64, device=item.x.device)


def _programs(item: Item) -> int:
    assert item.format is not None
    size, tiles = item.format.kernel_grid(item.shape).size, PIECE * (COUNTERS // 16)
    return item.format.block_count(item.shape) * int(triton.cdiv((size + 126) // 64, tiles))
