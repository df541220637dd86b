"""The shard of a tensor that this process holds, if `torch.distributed` has cut it into shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

__all__ = ["check_shard", "first_anywhere", "local", "shard_of", "sum_over_shards"]


def local(t: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: its shard of a DTensor, all of any other."""
    return cast(Tensor, getattr(t, "_local_tensor", t))  # to_local() gives a new tensor where gradients are kept


def shard_of(t: Tensor) -> tuple[int, ...]:
    """Return the index of the shard that this process holds; () if it holds all of the tensor. Replicas of a shard agree."""
    if local(t) is t:
        return ()
    mesh, placements = cast(Any, t).device_mesh, cast(Any, t).placements
    places = zip(mesh.get_coordinate(), mesh.shape, placements, strict=True)
    return tuple(at for at, size, placement in places if size > 1 and not placement.is_replicate())


def first_anywhere(index: int, tensors: Sequence[Tensor]) -> int:
    """Return the least index that any process with shards of these tensors has found; -1 if none has found one."""
    sharded = next((t for t in tensors if local(t) is not t), None)
    if sharded is None:
        return index
    mesh = cast(Any, sharded).device_mesh
    found = torch.tensor(index if index >= 0 else len(tensors), device=mesh.device_type)
    for dim in range(mesh.ndim):
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=mesh.get_group(dim))
    return int(found) if int(found) < len(tensors) else -1


def sum_over_shards(number: Tensor, t: Tensor) -> Tensor:
    """Return the sum of a number over the processes that hold the different shards of a tensor."""
    if local(t) is t:
        return number
    mesh, total = cast(Any, t).device_mesh, number.to(cast(Any, t).device_mesh.device_type)
    for dim, placement in enumerate(cast(Any, t).placements):
        if not placement.is_replicate():
            torch.distributed.all_reduce(total, group=mesh.get_group(dim))
    return total


class Cuttable(Protocol):
    """The one question that a format has to answer here."""

    def cuts_blocks(self, shape: torch.Size, dims: Iterable[int | None], /) -> bool:
        """Return True if cutting a tensor along these dims can cut through a block."""


def check_shard(t: Tensor, format: Cuttable) -> None:
    """Raise ValueError if a shard ends in the middle of a block, whose exponent no process would know."""
    if not shard_of(t):
        return
    cut = [getattr(placement, "dim", None) for placement in cast(Any, t).placements if not placement.is_replicate()]
    if format.cuts_blocks(t.shape, cut):
        raise ValueError(
            f"its shards cut through blocks of {format}; qlangevin.distributed.shard(model, weights={str(format)!r}) leaves "
            "vectors whole, and the blocks of a matrix must be rows ('bfp8') or parts of them ('bfp8/32')"
        )
