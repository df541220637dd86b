"""Replicas: one chain on several ranks, each with its part of every batch.

Noise and rounding are functions of (seed, stream, step, index), and averaged gradients are equal on all ranks. So the weights
stay equal to the byte, and no rank sends them. `Watch` compares checksums of them every so many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import lowering
from .._validate import check_integer
from ..quantization.formats import FP32, Format
from ..quantization.qtensor import QTensor
from ..sampling.sampler import Sampler
from ..storage import model_tensors
from ..storage.manifest import count_steps, provenance
from .ranks import agree, equal_on_all, gather, report_missing_rank
from .wire import Wire

__all__ = ["ReplicasDifferError", "Watch", "checksum", "replicate"]

T = TypeVar("T")

WORDS = 1 << 18  # int64 words of a checksum's chunk: bounds its temporary memory


class ReplicasDifferError(RuntimeError):
    """Weights that should be equal on all ranks are not."""


def replicate(
    model: nn.Module,
    sampler: Sampler,
    *,
    wire: str | Format | Wire | None = None,
    every: int = 100,
    group: Any = None,
    **options: Any,
) -> DistributedDataParallel:
    """Return a DistributedDataParallel model whose replicas step alike, to be called in place of the model.

    The settings of the ranks must be equal: a difference in the sampler's settings, formats, layers or steps is an error on all
    of them. Weights, buffers and accumulators are those of rank 0. Activations are rounded with other bits on each rank.

    Args:
        model: lowered or not; with float parameters, since DDP takes no others. `pack` is for one rank, or for shards.
        sampler: of its parameters.
        wire: format of the gradients between ranks, such as ``"bfp8/64"``: Q_G, which the sampler must then not apply again.
            ``"fp32"`` adds up in a fixed order; None uses torch's all-reduce, whose order of summation may change.
        every: steps from one comparison of the weights to the next; 0 for none.
        group: the ranks; all by default.
        options: of DistributedDataParallel.
    """
    if not dist.is_initialized():
        raise ValueError(
            "there are no ranks for replicas; call this inside of join(), in processes torchrun has started"
        )
    inner, group = model_tensors.unwrap(model), group or dist.group.WORLD
    hook, watch = _raise_on_all(lambda: _prepare(inner, sampler, wire, every, group), group)
    plain = {n: v for n, v in options.items() if isinstance(v, (bool, float, int)) and n != "output_device"}
    agree({"every": watch.every, "options": plain, **_settings(inner, sampler, hook)}, group)
    lowering.set_replica(inner, dist.get_rank(group))
    setattr(inner, model_tensors.RANKS, dist.get_world_size(group))
    with report_missing_rank("when the first weights were sent"):
        replicated = DistributedDataParallel(model, process_group=group, **options)
        _send_states(sampler, group)
    if hook is not None:
        replicated.register_comm_hook(None, hook.hook)
    watch.check()
    sampler.register_step_post_hook(watch)
    return replicated


def _raise_on_all(action: Callable[[], T], group: Any) -> T:
    """Return the action's result; an error on one rank is an error on all, so that no rank waits for one that has left."""
    refused: Exception | None = None
    try:
        result = action()
    except (TypeError, ValueError) as error:
        refused = error
    agree({"refused": None if refused is None else str(refused)}, group)
    if refused is not None:
        raise refused
    return result


def _prepare(
    model: nn.Module, sampler: Sampler, wire: str | Format | Wire | None, every: int, group: Any
) -> tuple[Wire | None, Watch]:
    """Check the arguments of `replicate`; return the communication hook, if there is one, and the watch."""
    _check_parameters(model, sampler)
    hook = Wire(sampler, wire, group) if isinstance(wire, (str, Format)) else wire
    if hook is not None and hook.format != FP32 and any(g["gradients"] for g in sampler.param_groups):
        raise ValueError("gradients are rounded on the wire already; make the sampler with gradients=None")
    return hook, Watch(model, sampler, every, group)


def _check_parameters(model: nn.Module, sampler: Sampler) -> None:
    """Raise ValueError for a model that DDP cannot replicate, or parameters that the sampler does not step after backward."""
    stepped = {id(p) for g in sampler.param_groups for p in g["params"]}
    for name, p in model.named_parameters():
        if isinstance(p, QTensor):
            raise ValueError(f"{name!r} is packed, and DistributedDataParallel takes floats only; unpack(model) first")
        if p.requires_grad and id(p) not in stepped:
            raise ValueError(f"{name!r} is not one of the sampler's parameters; replicas step all of them alike")
    if sampler.step_in_backward:
        raise ValueError("step_in_backward would step before the gradients of all ranks are added up; leave it out")


def _settings(model: nn.Module, sampler: Sampler, wire: Wire | None) -> dict[str, Any]:
    """Return, as JSON, everything that must be equal on all ranks."""
    return {
        **provenance(sampler, None),
        "rates": [float(g["lr"]) for g in sampler.param_groups],  # as set by a schedule
        "steps": count_steps(sampler),
        "layers": lowering.settings(model),
        "counts": lowering.state_dict(model),
        "states": [
            [name for name in KEPT if name in sampler.state.get(p, {})]
            for g in sampler.param_groups
            for p in g["params"]
        ],
        "wire": None if wire is None else str(wire.format),
        "tensors": {
            name: str(info)
            for name, info in model_tensors.describe(model_tensors.named_tensors(model), sampler).items()
        },
    }


KEPT = (
    "accumulator",
    "center",
    "mask",
    "moments",
    "velocity",
)  # of a parameter's state: what must be equal on all ranks


def _send_states(sampler: Sampler, group: Any) -> None:
    """Send the tensors in the states of rank 0 to all ranks, as DDP does with the weights."""
    for p, state in sampler.state.items():
        for t in (part for name in KEPT if name in state for part in _parts(state[name])):
            dist.broadcast(t, dist.get_global_rank(group, 0), group=group)
            state["version"] = p._version


def _parts(t: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor, packed or not, consists of."""
    return [t] if not isinstance(t, QTensor) else [t.codes, *([] if t.exponents is None else [t.exponents])]


class Watch:
    """Compares the weights of all ranks every so many steps; a post-hook of the sampler's step.

    A difference is a `ReplicasDifferError` on all ranks, with the parameter's name. Ranks exchange 16 bytes for each
    parameter and accumulator.
    """

    def __init__(self, model: nn.Module, sampler: Sampler, every: int = 100, group: Any = None) -> None:
        self.model, self.sampler, self.group = model_tensors.unwrap(model), sampler, group
        self.every, self.steps = check_integer("every", every, 0), 0

    def __call__(self, *_: Any) -> None:
        self.steps += 1
        if self.every and self.steps % self.every == 0:
            self.check()

    def check(self) -> None:
        """Compare now. All ranks must call this."""
        group = self.group or dist.group.WORLD
        names, tensors = zip(*self._tensors(), strict=True)
        sums = torch.tensor([checksum(t) for t in tensors])
        equal = equal_on_all(sums, group)
        if bool(equal.all()):
            return
        i = int(equal.logical_not().nonzero()[0])
        first, *others = gather(int(sums[i]), group)
        odd = [str(rank) for rank, other in enumerate(others, 1) if other != first]
        raise ReplicasDifferError(
            f"after {count_steps(self.sampler)} steps {names[i]} is not the same on all ranks: rank{'s' * (len(odd) > 1)} "
            f"{', '.join(odd)} and rank 0 differ; was it changed by hand, or are the machines not alike?"
        )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.model.named_parameters():
            yield f"parameter {name!r}", p.detach()
            state = self.sampler.state.get(p, {})
            for kept in KEPT:
                if kept in state:
                    yield f"the {kept} of {name!r}", state[kept]


@torch.no_grad()
def checksum(t: Tensor) -> int:
    """Return a 64-bit checksum: the sum over words of f(word, position), where f is one-to-one in the word.

    One changed word always changes it; other changes go unnoticed once in 2^64 times. It is computed on the tensor's device.
    """
    parts = _parts(t)
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for part in parts:
        bytes_ = part.contiguous().view(-1).view(torch.uint8)
        for i, piece in enumerate(bytes_.split(8 * WORDS)):
            words = _words(piece)
            positions = torch.arange(i * WORDS, i * WORDS + words.numel(), device=t.device)
            mixed = (words ^ positions * 0x9E3779B97F4A7C1) * 0x2545F4914F6CDD1D
            total = (
                total * 0x5851F42D4C957F2D + (mixed ^ mixed >> 31 & 2**33 - 1).sum()
            )  # a shift without copies of the sign
    return int(total)


def _words(bytes_: Tensor) -> Tensor:
    """Return bytes as int64 words; a copy only where they do not begin or end at a word."""
    missing = -bytes_.numel() % 8
    if missing or bytes_.data_ptr() % 8 or bytes_.storage_offset() % 8:
        bytes_ = torch.nn.functional.pad(bytes_, (0, missing)) if missing else bytes_.clone()
    return bytes_.view(torch.int64)
