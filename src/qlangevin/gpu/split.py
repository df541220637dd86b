"""Launches for blocks so long that many programs share one; `split_kernels` has the passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import split_kernels
from .split_kernels import Stat
from .tables import Item, make_table

__all__ = ["LONGEST", "TYPES", "SplitRun", "round_split"]

LONGEST = 65536  # elements of a block that one program takes
COUNTERS, PIECE, WARPS = 512, 8, 8  # a program takes up to 16384 elements

TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8: tl.int8,
    torch.int16: tl.int16, torch.int32: tl.int32,
}  # fmt: skip


class SplitRun(NamedTuple):
    """Settings of one call: ``launch`` launches a kernel on a table; the numbers are rate, sign, decay and v, the last of the law."""

    launch: Callable[..., None]
    numbers: tuple[float, ...]
    rounding: int
    purpose: int
    drift: int
    tiny: bool


def round_split(run: SplitRun, items: Sequence[Item], reads_codes: bool) -> None:
    """Round the blocks of tensors that have all the same dtypes and outputs: to ``out``, to ``codes``, or to both."""
    items = [item._replace(stats=_new_stats(item)) for item in items]
    table, some = make_table(items, [_programs(item) for item in items]), items[0]
    other, out, codes = (some.x if t is None else t for t in (some.other, some.out, some.codes))
    corrected = run.rounding == 2
    read = {
        "TYPE": TYPES[some.x.dtype], "CODES": reads_codes, "OTHER_TYPE": TYPES[other.dtype], "TINY": run.tiny, "DRIFT": run.drift,
        "EACH": some.variances is not None,
    }  # fmt: skip
    draws = {"ROUNDING": run.rounding, "PURPOSE": run.purpose}
    numbers, law = run.numbers, (*run.numbers, run.numbers[3] if corrected else 0.0)

    def launch(kernel: Any, *arguments: float, **constants: Any) -> None:
        run.launch(kernel, table, *arguments, warps=WARPS, PIECE=PIECE, C=COUNTERS, **constants)

    launch(split_kernels.split_extents, *numbers, **read)
    if run.rounding != 0:
        launch(split_kernels.split_risks, *law, ROUNDING=run.rounding, **read)
        launch(split_kernels.split_landings, *law, **draws, **read)
    launch(
        split_kernels.split_draw, *law, OUT_TYPE=TYPES[out.dtype], CODES_TYPE=TYPES[codes.dtype],
        HAS_VALUES=some.out is not None, HAS_CODES=some.codes is not None, MASKED=some.positive is not None, **draws, **read,
    )  # fmt: skip
    if some.codes is not None:
        launch(split_kernels.split_finish, CODES_TYPE=TYPES[codes.dtype])


def _new_stats(item: Item) -> torch.Tensor:
    assert item.format is not None
    size = item.format.block_count(item.shape), int(Stat.WIDTH)
    return torch.zeros(size, dtype=torch.int64, device=item.x.device)


def _programs(item: Item) -> int:
    assert item.format is not None
    size, tiles = item.format.kernel_grid(item.shape).size, PIECE * (COUNTERS // 16)
    return item.format.block_count(item.shape) * triton.cdiv((size + 126) // 64, tiles)
