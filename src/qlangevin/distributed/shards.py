"""Parameters in parts, one for each process: PyTorch's `fully_shard` (FSDP2) with codes where it has floats.

Between steps a process holds 1/W of the codes. Before a layer computes, in forward and again in backward, the codes of its
weights are gathered, and let go of afterwards; its gradient is averaged over the processes, each of which keeps the part that
belongs to its codes, and `SGLD` steps those.

What a tensor is cut into are runs of rows, slices along its first dim. That needs a format whose blocks do not reach beyond a
row. Vectors in block floating point are one block: they stay whole on every process, as do numbers that are no vectors, and
the processes step them alike.
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

from .. import lowering
from .._select import Choice, select_modules
from ..quantization.formats import Format, check_holds, parse
from ..quantization.qtensor import QTensor
from ..sampling.replacing import mark_replaced, refer_to_parameters, replace_parameters

__all__ = ["QShard", "joined", "place", "shard"]

M = TypeVar("M", bound=nn.Module)
aten = torch.ops.aten


class QShard(QTensor):
    """Some rows of a packed tensor, or all of them while they are being handed out; ``full`` is the shape of the whole.

    What differs from a QTensor is how it is cut: rows of it are QShards over the rows of its codes, which can be stepped and
    sent. The two methods are those that `fully_shard` looks for.
    """

    full: torch.Size

    @classmethod
    def over(cls, codes: Tensor, exponents: Tensor | None, like: QTensor, rows: int) -> QShard:
        """A number of rows of something like the given tensor."""
        full = like.full if isinstance(like, QShard) else like.shape
        shape = torch.Size((rows, *full[1:]))
        shard = cls(_shaped(codes, like.format, shape), exponents, like.format, shape, like.dtype)
        shard.full = full
        return shard

    def lines(self) -> list[Tensor]:
        """Codes, and exponents if there are any, as matrices with a line for each row."""
        rows, row = self.base_shape[0], torch.Size((1, *self.full[1:]))
        lines = [self.codes.view(rows, row.numel() if self.format.storage_bits > 4 else row.numel() // 2)]
        if self.exponents is not None:
            lines.append(self.exponents.view(rows, self.format.block_count(row)))
        return lines

    def cut(self, start: int, stop: int) -> QShard:
        """Rows from start to stop, over the same codes."""
        codes, *exponents = [t[start:stop].view(-1) for t in self.lines()]
        return QShard.over(codes, exponents[0] if exponents else None, self, stop - start)

    def padded(self, ranks: int) -> list[Tensor]:
        """`lines`, as many as the process with most of them has."""
        missing = -(-self.full[0] // ranks) - self.base_shape[0]
        return [nn.functional.pad(t, (0, 0, 0, missing)) if missing else t for t in self.lines()]

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """What is sent. (PyTorch also takes a method with more arguments, and then wants exponents as many as codes.)"""
        return tuple(self.padded(mesh.size())), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The tensor that what was received is, over the same memory: the next time it is there already."""
        if out is not None:
            return None
        check_holds(param_dtype, self.format)
        own = self.lines()[len(outputs) :]  # a single process is given its codes only
        return joined(self, [*outputs, *own], param_dtype), []

    @classmethod
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        result = NotImplemented
        if func in _SPECIAL and isinstance(args[0], QShard) and not args[0].is_view:
            result = _SPECIAL[func](*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs) if result is NotImplemented else result


def joined(shard: QShard, lines: list[Tensor], dtype: torch.dtype) -> QTensor:
    """The whole of a tensor from the `padded` lines of all shards, one below the other."""
    codes, *exponents = [t[: shard.full[0]].view(-1) for t in lines]
    codes = _shaped(codes, shard.format, shard.full)
    return QTensor(codes, exponents[0] if exponents else None, shard.format, shard.full, dtype)


def _shaped(codes: Tensor, format: Format, shape: torch.Size) -> Tensor:
    return codes.view(shape) if format.storage_bits > 4 else codes.view(-1)


# ---- what `fully_shard` does with a parameter: it takes one of its chunks and copies it into zeros of an even size


def _alias(q: QTensor) -> QShard:
    return QShard.over(q.codes, q.exponents, q, q.base_shape[0])


def _split(q: QShard, size: int, dim: int = 0) -> Any:
    rows = q.base_shape[0]
    return [q.cut(at, min(at + size, rows)) for at in range(0, rows, size)] if dim == 0 and size else NotImplemented


def _slice(q: QShard, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    start, stop, _ = slice(start, end).indices(q.base_shape[0])
    return q.cut(start, max(start, stop)) if dim == 0 and step == 1 else NotImplemented


def _new_zeros(q: QShard, size: list[int], **_: Any) -> Any:
    if list(size[1:]) != list(q.full[1:]):
        return NotImplemented
    codes, *exponents = [t.new_zeros(size[0] * t.shape[1]) for t in q.lines()]
    return QShard.over(codes, exponents[0] if exponents else None, q, size[0])


_SPECIAL: dict[Any, Any] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.split.Tensor: _split,
    aten.slice.Tensor: _slice,
    aten.new_zeros.default: _new_zeros,
}


def shard(
    model: M, mesh: Any = None, *, layers: Choice | None = None, skip: Choice | None = None,
    weights: str | Format | None = None, reshard_after_forward: bool = True, **options: Any,
) -> M:  # fmt: skip
    """Cut a model's parameters into shards, in place; returns the model. Every process calls this, before it makes a sampler.

    All begin with the parameters and buffers of the first one. The loss is the mean over the examples of a process, and the
    gradient the mean over the processes, so that processes with equally many examples are one with all of them.

    Args:
        model: any module, packed or not.
        mesh: of devices, as for `fully_shard`; all processes by default.
        layers, skip: which modules gather their weights by themselves, by type, name pattern or predicate of name and module;
            by default the outermost ones that have parameters of their own. The others are gathered with the model, as are
            weights that several of them share.
        weights: the format a sampler will keep parameters in that are not packed.
        reshard_after_forward: let go of gathered codes between forward and backward; with False, ``model.parameters()`` are
            not the shards a sampler needs until a backward has run.
        options: of `fully_shard`, which needs PyTorch 2.7.
    """
    from torch.distributed.fsdp import fully_shard  # brings in seconds of libraries

    format = None if weights is None else parse(weights)
    whole = {p for name, p in model.named_parameters() if _stays_whole(name, p, format)}
    chosen = _groups(model, layers, skip)
    old = refer_to_parameters(model)
    mesh = _mesh_for(model) if mesh is None else mesh
    _begin_alike(model, mesh)
    lowering.set_replica(model, place(mesh))
    parts = [p for p in model.parameters() if isinstance(p, QTensor) and p not in whole]
    replace_parameters(model, {id(p): nn.Parameter(_alias(p), p.requires_grad) for p in parts}, by="shard")
    del parts  # their codes are free as soon as they have been handed out
    for p in whole:
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(partial(_average, mesh=mesh))
    for module in [*reversed(chosen), cast(nn.Module, model)]:
        if any(p not in whole for p in module.parameters()):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, ignored_params=whole, **options)
    mark_replaced(old, model, by="shard")
    return model


def place(mesh: Any) -> int:
    """Which of the processes of a mesh this is, counted row by row."""
    place = 0
    for at, size in zip(mesh.get_coordinate(), mesh.shape, strict=True):
        place = place * int(size) + int(at)
    return place


def _stays_whole(name: str, p: Tensor, weights: Format | None) -> bool:
    """Whether every process keeps all of a parameter, because its rows cannot be told apart; it must be a small one."""
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


def _groups(model: nn.Module, layers: Choice | None, skip: Choice | None) -> list[nn.Module]:
    """The modules below the model that gather their weights by themselves."""
    owners: dict[int, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[id(p)].add(module)

    def alone(module: nn.Module) -> bool:
        inside = set(module.modules())
        return module is not model and all(owners[id(p)] <= inside for p in module.parameters())

    chosen = select_modules(model, nn.Module if layers is None else layers, skip)
    if layers is None:
        chosen = {name: m for name, m in chosen.items() if name and next(m.parameters(recurse=False), None) is not None}
        chosen = {name: m for name, m in chosen.items() if not any(name.startswith(f"{above}.") for above in chosen)}
    return [module for module in chosen.values() if alone(module)]


def _mesh_for(model: nn.Module) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("shards are for several processes: start them with torchrun, call init_process_group first")
    return init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))


@torch.no_grad()
def _begin_alike(model: nn.Module, mesh: Any) -> None:
    """Give all processes the numbers of the first one."""
    for t in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
        parts = [t.codes, t.exponents] if isinstance(t, QTensor) else [t]
        for part in (part for part in parts if part is not None):
            sent = part.detach().contiguous()
            for group in map(mesh.get_group, range(mesh.ndim)):  # along columns, then along rows
                dist.broadcast(sent, dist.get_global_rank(group, 0), group)
            part.copy_(sent)


@torch.no_grad()
def _average(p: Tensor, mesh: Any) -> None:
    """The gradient of a parameter that every process has: what was averaged before, and is added to, stays as it is."""
    gradient = cast(Tensor, p.grad)
    for dim in range(mesh.ndim):
        dist.all_reduce(gradient, group=mesh.get_group(dim))
    gradient.div_(mesh.size())
