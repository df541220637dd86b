"""Replicas: the same chain on several ranks, each with its part of every batch.

Noise and rounding are functions of (seed, stream, step, index), and gradients are the same on all ranks after they were added up.
So weights stay the same to the byte and nobody has to send them. That they did is checked by a checksum, now and then.
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
from ..sampling.sgld import SGLD
from ..storage import model_tensors
from ..storage.manifest import count_steps, provenance
from .ranks import agree, gather, lost, same
from .wire import Wire

__all__ = ["ReplicasDifferError", "Watch", "checksum", "replicate"]

T = TypeVar("T")

WORDS = 1 << 18  # that a checksum takes at a time: what it needs for itself stays small


class ReplicasDifferError(RuntimeError):
    """Weights that should be the same on all ranks are not."""


def replicate(
    model: nn.Module,
    sampler: SGLD,
    *,
    wire: str | Format | Wire | None = None,
    every: int = 100,
    group: Any = None,
    **options: Any,
) -> DistributedDataParallel:
    """A DistributedDataParallel model whose replicas step alike; call it in the place of the model.

    The ranks must have been told the same: other settings of the sampler, formats, layers or steps are an error on all of
    them. Weights, buffers and accumulators are those of rank 0. Activations are rounded with other bits on each rank.

    Args:
        model: lowered or not; with float parameters, since DDP knows no others. `pack` is for one rank, or for shards.
        sampler: of its parameters.
        wire: format of the gradients between ranks, such as ``"bfp8/64"``: Q_G, which the sampler must then not apply again.
            ``"fp32"`` adds up in a fixed order; None leaves all to torch's all-reduce, whose order of summation may change.
        every: steps from one comparison of the weights to the next; 0 for none.
        group: the ranks; all by default.
        options: of DistributedDataParallel.
    """
    if not dist.is_initialized():
        raise ValueError(
            "there are no ranks for replicas; call this inside of join(), in processes torchrun has started"
        )
    inner, group = model_tensors.unwrap(model), group or dist.group.WORLD
    carrier, watch = _together(lambda: _prepared(inner, sampler, wire, every, group), group)
    plain = {n: v for n, v in options.items() if isinstance(v, (bool, float, int)) and n != "output_device"}
    agree({"every": watch.every, "options": plain, **_facts(inner, sampler, carrier)}, group)
    lowering.set_replica(inner, dist.get_rank(group))
    setattr(inner, model_tensors.RANKS, dist.get_world_size(group))
    with lost("when the first weights were sent"):
        replicated = DistributedDataParallel(model, process_group=group, **options)
        _send_accumulators(sampler, group)
    if carrier is not None:
        replicated.register_comm_hook(None, carrier.hook)
    watch.check()
    sampler.register_step_post_hook(watch)
    return replicated


def _together(action: Callable[[], T], group: Any) -> T:
    """What refuses on one rank refuses on all: nobody waits for a rank that has gone away with an error."""
    refused: Exception | None = None
    try:
        result = action()
    except (TypeError, ValueError) as error:
        refused = error
    agree({"refused": None if refused is None else str(refused)}, group)
    if refused is not None:
        raise refused
    return result


def _prepared(
    model: nn.Module, sampler: SGLD, wire: str | Format | Wire | None, every: int, group: Any
) -> tuple[Wire | None, Watch]:
    _check(model, sampler)
    carrier = Wire(sampler, wire, group) if isinstance(wire, (str, Format)) else wire
    if carrier is not None and carrier.format != FP32 and any(g["gradients"] for g in sampler.param_groups):
        raise ValueError("gradients are rounded on the wire already; make the sampler with gradients=None")
    return carrier, Watch(model, sampler, every, group)


def _check(model: nn.Module, sampler: SGLD) -> None:
    stepped = {id(p) for g in sampler.param_groups for p in g["params"]}
    for name, p in model.named_parameters():
        if isinstance(p, QTensor):
            raise ValueError(f"{name!r} is packed, and DistributedDataParallel takes floats only; unpack(model) first")
        if p.requires_grad and id(p) not in stepped:
            raise ValueError(f"{name!r} is not one of the sampler's parameters; replicas step all of them alike")
    if sampler.step_in_backward:
        raise ValueError("step_in_backward would step before the gradients of all ranks are added up; leave it out")


def _facts(model: nn.Module, sampler: SGLD, wire: Wire | None) -> dict[str, Any]:
    """What must be the same on all ranks."""
    return {
        **provenance(sampler, None),
        "rates": [float(g["lr"]) for g in sampler.param_groups],  # as a schedule has them now
        "steps": count_steps(sampler),
        "layers": lowering.settings(model),
        "counts": lowering.state_dict(model),
        "wire": None if wire is None else str(wire.format),
        "tensors": {
            name: str(info)
            for name, info in model_tensors.describe(model_tensors.named_tensors(model), sampler).items()
        },
    }


def _send_accumulators(sampler: SGLD, group: Any) -> None:
    """DDP sends the weights of rank 0 to all; what stands behind them has to follow."""
    for p, state in sampler.state.items():
        if "accumulator" in state:
            dist.broadcast(state["accumulator"], dist.get_global_rank(group, 0), group=group)
            state["version"] = p._version


class Watch:
    """Compares the weights of all ranks every so many steps; a hook after the sampler's step.

    A difference is a `ReplicasDifferError` on all ranks, with the parameter's name. What is exchanged is 16 bytes for each
    parameter and accumulator.
    """

    def __init__(self, model: nn.Module, sampler: SGLD, every: int = 100, group: Any = None) -> None:
        self.model, self.sampler, self.group = model_tensors.unwrap(model), sampler, group
        self.every, self.steps = check_integer("every", every, 0), 0

    def __call__(self, *_: Any) -> None:
        self.steps += 1
        if self.every and self.steps % self.every == 0:
            self.check()

    def check(self) -> None:
        """Compare now. All ranks must call this."""
        group = self.group or dist.group.WORLD
        names, tensors = zip(*self._watched(), strict=True)
        sums = torch.tensor([checksum(t) for t in tensors])
        alike = same(sums, group)
        if bool(alike.all()):
            return
        i = int(alike.logical_not().nonzero()[0])
        found = gather(int(sums[i]), group)
        odd = [str(rank) for rank, other in enumerate(found) if other != found[0]]
        raise ReplicasDifferError(
            f"after {count_steps(self.sampler)} steps {names[i]} is not the same on all ranks: rank{'s' * (len(odd) > 1)} "
            f"{', '.join(odd)} and rank 0 differ; was it changed by hand, or are the machines not alike?"
        )

    def _watched(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.model.named_parameters():
            yield f"parameter {name!r}", p.detach()
            if "accumulator" in self.sampler.state.get(p, {}):
                yield f"the accumulator of {name!r}", self.sampler.state[p]["accumulator"]


@torch.no_grad()
def checksum(t: Tensor) -> int:
    """64 bits that tell tensors apart: a sum over words of a function of word and place that is one to one in the word.

    One changed word always changes it, others go unnoticed once in 2^64 times. It is computed where the tensor is.
    """
    parts = [t] if not isinstance(t, QTensor) else [t.codes, *([] if t.exponents is None else [t.exponents])]
    total = torch.zeros((), dtype=torch.int64, device=t.device)
    for part in parts:
        bytes_ = part.contiguous().view(-1).view(torch.uint8)
        for i, piece in enumerate(bytes_.split(8 * WORDS)):
            words = _words(piece)
            place = torch.arange(i * WORDS, i * WORDS + words.numel(), device=t.device)
            mixed = (words ^ place * 0x9E3779B97F4A7C1) * 0x2545F4914F6CDD1D
            total = total * 0x5851F42D4C957F2D + (mixed ^ mixed >> 31 & 2**33 - 1).sum()  # no copies of the sign
    return int(total)


def _words(bytes_: Tensor) -> Tensor:
    """Bytes as int64; copied only where they do not begin or end with a word."""
    missing = -bytes_.numel() % 8
    if missing or bytes_.data_ptr() % 8 or bytes_.storage_offset() % 8:
        bytes_ = torch.nn.functional.pad(bytes_, (0, missing)) if missing else bytes_.clone()
    return bytes_.view(torch.int64)
