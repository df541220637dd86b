"""Packed parameters in shards, one for each process: PyTorch's `fully_shard` (FSDP2) with codes in place of floats.

Between steps each of W processes holds 1/W of the codes. Before a layer computes, in forward and again in backward, FSDP gathers
the codes of its weights, and frees them afterwards; it averages the layer's gradient over the processes, each of which keeps the
part that belongs to its codes, and `SGLD` steps those. `gathered` puts a sample together from all shards.

A shard is a run of rows, slices along the first dim. That needs a format whose blocks do not reach beyond a row. Vectors in block
floating point are one block: they stay unsharded on every process, as do scalars, and the processes step them alike.
Each shard has random bits of its own: the chain has the law of one that is not sharded, but is another one. (Where gradients or
accumulators are in block floating point, blocks that are larger than a row are those of a shard.)
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import lowering
from .._dtensor import local
from .._select import Choice, select_modules
from ..quantization.formats import FP32, Format, parse
from ..quantization.qtensor import QTensor, encode_on_grid
from ..sampling.replacing import mark_replaced, refer_to_parameters, replace_parameters
from ..storage.model_tensors import named_tensors
from .qshard import QShard, join_rows

__all__ = ["gathered", "shard"]

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M, mesh: Any = None, *, layers: Choice | None = None, skip: Choice | None = None,
    weights: str | Format | None = None, reshard_after_forward: bool = True, **options: Any,
) -> M:  # fmt: skip
    """Cut a model's parameters into shards, in place, and return the model. Every process calls this, before it makes a sampler.

    All begin with the parameters and buffers of the first process. The loss is the mean over the examples of a process, and the
    gradient the mean over the processes, so that processes with equally many examples are one with all of them.

    Args:
        model: any module, packed or not.
        mesh: of devices, as for `fully_shard`; all processes by default.
        layers, skip: the modules that gather their weights by themselves, by type, name pattern or predicate of name and module;
            by default the outermost ones that have parameters of their own. The others are gathered with the model, as are
            weights that several modules share.
        weights: the format a sampler will keep parameters in that are not packed.
        reshard_after_forward: free gathered codes between forward and backward; with False, ``model.parameters()`` are
            not the shards a sampler needs until a backward has run.
        options: of `fully_shard`, which needs PyTorch 2.7.
    """
    from torch.distributed.fsdp import fully_shard  # its import takes seconds

    format = None if weights is None else parse(weights)
    unsharded = {p for name, p in model.named_parameters() if _stays_unsharded(name, p, format)}
    chosen = _choose_modules(model, layers, skip)
    old = refer_to_parameters(model)
    mesh = _make_mesh(model) if mesh is None else mesh
    _broadcast_tensors(model, mesh)
    lowering.set_replica(model, _rank_in_mesh(mesh))
    packed = [p for p in model.parameters() if isinstance(p, QTensor) and p not in unsharded]
    replace_parameters(model, {id(p): nn.Parameter(QShard.from_tensor(p), p.requires_grad) for p in packed}, by="shard")
    del packed  # the full codes are freed as soon as fully_shard has handed them out
    for p in unsharded:
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(partial(_average_gradient, mesh=mesh))
    for module in [*reversed(chosen), cast(nn.Module, model)]:
        if any(p not in unsharded for p in module.parameters()):
            fully_shard(
                module, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=unsharded, **options
            )
    mark_replaced(old, model, by="shard")
    return model


def gathered(model: nn.Module, sampler: Optimizer | None = None) -> nn.Module | None:
    """Return all of a sharded model's parameters and buffers, packed, for `SampleStore.append`. Every process calls this.

    The first process gets a module that has the names of the model, and no forward; the others get None. Parameters that are
    not packed are encoded if the sampler keeps them on a grid. Buffers are those of the first process.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    groups = sampler.param_groups if sampler is not None else []
    formats = {id(p): parse(group["weights"]) for group in groups if group.get("weights") for p in group["params"]}
    meshes = [cast(Any, p).device_mesh for p in model.parameters() if local(p) is not p]
    first = _rank_in_mesh(meshes[0]) == 0 if meshes else dist.get_rank() == 0
    sample = nn.Module() if first else None
    for name, t in named_tensors(model).items():
        values = _gather_tensor(t)
        if sample is not None and values is not None:
            _register(sample, name, _encode(name, values, formats.get(id(t), FP32)), t)
    return sample


# ---- parts of shard()


def _stays_unsharded(name: str, p: Tensor, weights: Format | None) -> bool:
    """Return True for a vector or scalar that cannot be cut between rows; raise ValueError for a matrix that cannot."""
    format = p.format if isinstance(p, QTensor) else weights if p.requires_grad else None
    if format is not None and format.cuts_blocks(p.shape, (0,)):
        why = "all of it is one block"
    elif isinstance(p, QTensor) and p.format.storage_bits <= 4 and p.shape[1:].numel() % 2:
        why = "two codes share a byte, and a row has an odd number of them"
    else:
        return p.dim() == 0
    if p.dim() >= 2:
        raise ValueError(f"{name!r} cannot be sharded in {format}: {why}; use a format such as 'bfp8' or 'fixed8.3'")
    return True


def _choose_modules(model: nn.Module, layers: Choice | None, skip: Choice | None) -> list[nn.Module]:
    """Return the modules below the model that gather their weights by themselves."""
    owners: dict[int, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)].add(module)

    def shares_nothing(module: nn.Module) -> bool:
        inside = set(module.modules())
        return module is not model and all(owners[id(p)] <= inside for p in module.parameters())

    chosen = select_modules(model, nn.Module if layers is None else layers, skip)
    if layers is None:
        chosen = {name: m for name, m in chosen.items() if name and next(m.parameters(recurse=False), None) is not None}
        chosen = {name: m for name, m in chosen.items() if not any(name.startswith(f"{above}.") for above in chosen)}
    return [module for module in chosen.values() if shares_nothing(module)]


def _make_mesh(model: nn.Module) -> Any:
    """Return a mesh of all processes on the model's type of device."""
    from torch.distributed.device_mesh import init_device_mesh

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("shards are for several processes: start them with torchrun, call init_process_group first")
    return init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))


def _rank_in_mesh(mesh: Any) -> int:
    """Return the index of this process in its mesh, counted row by row."""
    index = 0
    for at, size in zip(mesh.get_coordinate(), mesh.shape, strict=True):
        index = index * int(size) + int(at)
    return index


@torch.no_grad()
def _broadcast_tensors(model: nn.Module, mesh: Any) -> None:
    """Send the parameters and buffers of the first process to all."""
    for t in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
        parts = [t.codes, t.exponents] if isinstance(t, QTensor) else [t]
        for part in (part for part in parts if part is not None):
            sent = part.detach().contiguous()
            for group in map(mesh.get_group, range(mesh.ndim)):  # along columns, then along rows
                dist.broadcast(sent, dist.get_global_rank(group, 0), group)
            part.copy_(sent)


@torch.no_grad()
def _average_gradient(p: Tensor, mesh: Any) -> None:
    """Average the gradient of an unsharded parameter over the processes.

    In several backwards before a step, the sum averaged so far is equal on all processes, and averaging leaves it unchanged.
    """
    gradient = cast(Tensor, p.grad)
    for dim in range(mesh.ndim):
        dist.all_reduce(gradient, group=mesh.get_group(dim))
    gradient.div_(mesh.size())


# ---- parts of gathered()


@torch.no_grad()
def _gather_tensor(t: Tensor) -> Tensor | None:
    """Return all of a tensor; of shards of codes, None on all processes but the one with the first shard."""
    part = local(t)
    if part is t:
        return t.detach().clone()
    if not isinstance(part, QShard):
        return cast(Tensor, cast(Any, t).full_tensor().detach())
    mesh, placements = cast(Any, t).device_mesh, cast(Any, t).placements
    [dim] = [d for d, placement in enumerate(placements) if not placement.is_replicate()]
    group, processes, joined = mesh.get_group(dim), mesh.size(dim), list[Tensor]()
    for rows in part.padded_row_bytes(processes):
        received = [torch.empty_like(rows) for _ in range(processes)] if mesh.get_local_rank(dim) == 0 else None
        dist.gather(rows.contiguous(), received, dist.get_global_rank(group, 0), group)
        joined += [torch.cat(received)] if received else []
    return join_rows(part, joined, t.dtype) if joined else None


def _encode(name: str, values: Tensor, format: Format) -> Tensor:
    """Return values as codes if the format has fewer than 32 bits; they are on its grid."""
    if isinstance(values, QTensor) or format.storage_bits >= 32:
        return values
    found = encode_on_grid(values, format)
    if found is None:
        raise ValueError(f"{name!r} is not on the grid of {format}: something other than the sampler wrote it")
    return found


def _register(root: nn.Module, name: str, values: Tensor, like: Tensor) -> None:
    """Register a parameter or buffer under a dotted name, with the empty modules that the name needs."""
    *path, last = name.split(".")
    module = root
    for step in path:
        if step not in module._modules:
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    if isinstance(like, nn.Parameter):
        module.register_parameter(last, nn.Parameter(values, like.requires_grad))
    else:
        module.register_buffer(last, values)
