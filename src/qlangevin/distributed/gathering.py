"""All of a model of which each process holds a part: what a sample is made of."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .._dtensor import local
from ..quantization.formats import FP32, Format, parse
from ..quantization.qtensor import QTensor, encode_on_grid
from ..storage.model_tensors import named_tensors
from .shards import QShard, joined, place

__all__ = ["gathered"]


def gathered(model: nn.Module, sampler: Optimizer | None = None) -> nn.Module | None:
    """All of a sharded model's parameters and buffers, packed, for `SampleStore.append`; every process calls this.

    The first process gets a module that has the names of the model, and no forward; the others get None. Parameters that are
    not packed are, if the sampler keeps them on a grid. Buffers are those of the first process.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    groups = sampler.param_groups if sampler is not None else []
    known = {id(p): parse(group["weights"]) for group in groups if group.get("weights") for p in group["params"]}
    meshes = [cast(Any, p).device_mesh for p in model.parameters() if local(p) is not p]
    first = place(meshes[0]) == 0 if meshes else dist.get_rank() == 0
    tree = nn.Module() if first else None
    for name, t in named_tensors(model).items():
        values = _gather(t)
        if tree is not None and values is not None:
            _put(tree, name, _packed(name, values, known.get(id(t), FP32)), t)
    return tree


@torch.no_grad()
def _gather(t: Tensor) -> Tensor | None:
    """All of a tensor; of shards of codes only where the first of them is."""
    part = local(t)
    if part is t:
        return t.detach().clone()
    if not isinstance(part, QShard):
        return cast(Tensor, cast(Any, t).full_tensor().detach())
    mesh, placements = cast(Any, t).device_mesh, cast(Any, t).placements
    [dim] = [d for d, placement in enumerate(placements) if not placement.is_replicate()]
    group, ranks, lines = mesh.get_group(dim), mesh.size(dim), []
    for line in part.padded(ranks):
        found = [torch.empty_like(line) for _ in range(ranks)] if mesh.get_local_rank(dim) == 0 else None
        dist.gather(line.contiguous(), found, dist.get_global_rank(group, 0), group)
        lines += [torch.cat(found)] if found else []
    return joined(part, lines, t.dtype) if lines else None


def _packed(name: str, values: Tensor, format: Format) -> Tensor:
    if isinstance(values, QTensor) or format.storage_bits >= 32:
        return values
    found = encode_on_grid(values, format)
    if found is None:
        raise ValueError(f"{name!r} is not on the grid of {format}: something other than the sampler wrote it")
    return found


def _put(tree: nn.Module, name: str, values: Tensor, like: Tensor) -> None:
    """Give a bare module a parameter or buffer of a dotted name."""
    *where, last = name.split(".")
    for step in where:
        if step not in tree._modules:
            tree.add_module(step, nn.Module())
        tree = tree.get_submodule(step)
    if isinstance(like, nn.Parameter):
        tree.register_parameter(last, nn.Parameter(values, like.requires_grad))
    else:
        tree.register_buffer(last, values)
