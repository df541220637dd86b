"""Gradients between ranks: the mean over all of them, in 8 bits on the wire, as a communication hook of DDP.

A gradient is cut into as many shards as there are ranks; rank s owns shard s. With g_r the gradient of rank r,

    each r -> s    Q(g_r) of shard s                 codes, and an exponent for each group of elements
    s -> everyone  Q_G(1/R Σ_r Q(g_r)) of shard s    so that all ranks get the same bytes

Q is stochastic rounding, with bits of its own for each rank, parameter and step: unbiased, and so is the mean. What arrives is on
the grid, it is the gradient that Algorithm 1 rounds by Q_G: the sampler rounds it no more. A rank sends 2 (R-1)/R codes for each
weight, as an all-reduce sends floats.

The sum is taken in the order of the ranks, and bits belong to parameters, not to DDP's buckets, which are arranged anew after the
first step: a run that goes on is the run that was not interrupted, to the byte. ``"fp32"`` is the same in float32,
which rounds only gradients that have more bits.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.optim import Optimizer

from .. import native
from ..quantization import operators, random
from ..quantization.codes import decode_values, empty_codes, encode_op
from ..quantization.formats import FP32, Format, parse
from ..sampling.checks import first_not_finite
from ..sampling.step import parameter_key
from .ranks import lost

__all__ = ["Wire", "check_carried"]

# Where streams derived from a parameter's begin; those of the ranks that send are counted from 1.
OWNERS, PASSES = 1 << 32, 2 << 32  # of those who add up, of further passes


def check_carried(format: str | Format) -> Format:
    """The format, if gradients can travel in it: one that can be cut anywhere between groups."""
    parsed = parse(format)
    if parsed != FP32 and not (parsed.has_exponents and parsed.group_size):
        raise ValueError(
            f"gradients travel in block floating point with groups of a given size, such as bfp8/64, or in fp32, not in {parsed}"
        )
    return parsed


class Wire:
    """Adds up gradients: ``model.register_comm_hook(None, wire.hook)`` on a DistributedDataParallel; `replicate` does so.

    Args:
        sampler: steps the parameters whose gradients these are; random bits follow from its seed, stream and steps.
        format: block floating point with groups of a given size, such as ``"bfp8/64"``, or ``"fp32"``.
        group: the ranks; all by default.
    """

    def __init__(self, sampler: Optimizer, format: str | Format = "bfp8/64", group: Any = None) -> None:
        self.format, self.group, self.sampler = check_carried(format), group, sampler
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0  # bytes this rank has sent to others
        self._pending: list[_Bucket] = []
        self._passes: dict[Tensor, tuple[int, int]] = {}
        self._groups = {p: i for i, g in enumerate(sampler.param_groups) for p in g["params"]}

    # Torch looks at the annotations of a hook: in this file they are evaluated.
    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send what is ready; add up when everything has been sent, so that backward goes on meanwhile."""
        with lost("while gradients were added up"):
            new = _Bucket(self, bucket)
            self._pending.append(new)
            if bucket.is_last():
                pending, self._pending = self._pending, []
                for one in pending:
                    one.reduce()
                for one in pending:
                    one.finish()
        return new.result

    # ---- one gradient to bytes and back

    def blocks(self, count: int) -> int:
        """How many groups of elements there are: what can be cut apart."""
        return -(-count // cast(int, self.format.group_size))

    def shard(self, count: int, owner: int) -> slice:
        """Which elements of a gradient are one rank's to add up: whole groups."""
        group, blocks = cast(int, self.format.group_size), self.blocks(count)
        ends = (min((owner + i) * blocks // self.size * group, count) for i in range(2))
        return slice(*ends)

    def key(self, p: Tensor) -> random.Key:
        """The random bits of one parameter in the step to come; others for each further backward before it."""
        state, group = self.sampler.state[p], self.sampler.param_groups[self._groups[p]]
        step, passes = self._passes.get(p, (-1, 0))
        passes = passes + 1 if step == state["step"] else 0
        self._passes[p] = state["step"], passes
        key = parameter_key(group["seed"], group["stream"], state["index"], state["step"] + 1)
        return key.fold(PASSES + passes) if passes else key

    def rounded(self, g: Tensor, key: random.Key) -> tuple[Tensor, Tensor]:
        """(codes, exponents) of a flat gradient, as bytes; the gradient itself may be overwritten, nobody needs it any more."""
        if self.format == FP32:
            return g.view(torch.uint8), g.new_empty(0, dtype=torch.uint8)
        if native.enabled_for(g):  # one pass instead of three
            codes, exponents = empty_codes(g, self.format)
            native.quantize_with_codes(g, self.format, "stochastic", key, random.GRADIENT, (codes, exponents))
        else:
            q = operators.quantize_op(g, str(self.format), "stochastic", *operators.key_bits(key), random.GRADIENT)
            codes, exponents = encode_op(q, str(self.format))
        return codes.view(torch.uint8), exponents.view(torch.uint8)

    def values(self, codes: Tensor, exponents: Tensor) -> Tensor:
        """A flat gradient from its bytes."""
        if self.format == FP32:
            return codes.clone().view(torch.float32)
        codes = codes.clone().view(self.format.code_dtype)  # a copy begins where a number may
        return decode_values(codes, exponents.view(torch.int8), self.format)

    @property
    def width(self) -> int:
        """Bytes of a code."""
        return max(self.format.storage_bits, 8) // 8


@dataclass(frozen=True)
class _Message:
    """What one rank has to say about a shard of each gradient in a bucket: codes, exponents, and whether they are numbers."""

    wire: Wire
    counts: list[int]  # elements of the shards

    @property
    def nbytes(self) -> int:
        with_exponents = self.wire.format != FP32
        return sum(n * self.wire.width + (self.wire.blocks(n) + 1 if with_exponents else 0) for n in self.counts)

    def parts(self, message: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(codes, exponents, flag) of each gradient: views of the bytes, the codes of all of them first."""
        low = self.wire.format != FP32
        sizes = [n * self.wire.width for n in self.counts]
        sizes += [self.wire.blocks(n) if low else 0 for n in self.counts] + [int(low) for _ in self.counts]
        found, n = message.split(sizes), len(self.counts)
        return list(zip(found[:n], found[n : 2 * n], found[2 * n :], strict=True))


class _Bucket:
    """The gradients DDP hands over together, on their way."""

    def __init__(self, wire: Wire, bucket: Any) -> None:
        self.wire, self.result = wire, torch.futures.Future[Tensor]()
        self.buffer, self.gradients = bucket.buffer(), [g.view(-1) for g in bucket.gradients()]
        self.keys = [wire.key(p) for p in bucket.parameters()]
        counts = [g.numel() for g in self.gradients]
        self.shards = [[wire.shard(n, owner) for n in counts] for owner in range(wire.size)]
        self.messages = [_Message(wire, [s.stop - s.start for s in shards]) for shards in self.shards]
        out = self._encoded()
        mine = self.messages[wire.rank].nbytes
        self.received = out.new_empty(mine * wire.size)
        self.work = self._exchange(self.received, out, [mine] * wire.size, [m.nbytes for m in self.messages])

    def _encoded(self) -> Tensor:
        """The gradients of this rank, one message after the other, one for each owner."""
        wire, sizes = self.wire, [m.nbytes for m in self.messages]
        out = torch.empty(sum(sizes), dtype=torch.uint8, device=self.buffer.device)
        rooms = [m.parts(room) for m, room in zip(self.messages, out.split(sizes), strict=True)]
        for i, (key, g) in enumerate(zip(self.keys, self.gradients, strict=True)):
            g, finite = (g.float(), True) if wire.format == FP32 else _finite(g.float())
            codes, exponents = wire.rounded(g, key.fold(1 + wire.rank))
            begin = 0
            for owner, room in enumerate(rooms):
                s, (to_codes, to_exponents, flag) = self.shards[owner][i], room[i]
                to_codes.copy_(codes[s.start * wire.width : s.stop * wire.width])
                to_exponents.copy_(exponents[begin : begin + to_exponents.numel()])
                flag.fill_(finite)
                begin += to_exponents.numel()
        return out

    def reduce(self) -> None:
        """Add up what all ranks have sent of this rank's shards, and send the mean to everyone."""
        wire, message = self.wire, self.messages[self.wire.rank]
        self.work.wait()
        sent = [message.parts(part) for part in self.received.chunk(wire.size)] if message.nbytes else []
        out = torch.empty(message.nbytes, dtype=torch.uint8, device=self.buffer.device)
        for i, (codes, exponents, flag) in enumerate(message.parts(out)):
            finite = all(bool(part[i][2].all()) for part in sent)
            if codes.numel():
                mean = reduce(torch.add, (wire.values(*part[i][:2]) for part in sent)) / wire.size
                if wire.format != FP32:
                    mean, bounded = _finite(mean)  # a sum of numbers may be too large for one
                    finite &= bounded
                rounded = wire.rounded(mean, self.keys[i].fold(OWNERS + wire.rank))
                codes.copy_(rounded[0])
                exponents.copy_(rounded[1])
            flag.fill_(finite)
        sizes = [m.nbytes for m in self.messages]
        del sent, self.work, self.received  # before there is room for the next
        self.received = out.new_empty(sum(sizes))
        self.work = self._exchange(self.received, out.repeat(wire.size), sizes, [message.nbytes] * wire.size)

    def finish(self) -> None:
        """What DDP waits for: the mean, the same on all ranks. Where a rank had an infinity or a NaN, it is NaN on all."""
        self.work.wait()
        received = self.received.split([m.nbytes for m in self.messages])
        for owner, (message, bytes_) in enumerate(zip(self.messages, received, strict=True)):
            for i, (codes, exponents, flag) in enumerate(message.parts(bytes_)):
                if codes.numel():
                    self.gradients[i][self.shards[owner][i]] = self.wire.values(codes, exponents).to(self.buffer.dtype)
                if flag.numel() and not bool(flag):
                    self.gradients[i].fill_(torch.nan)
        self.result.set_result(self.buffer)

    def _exchange(self, into: Tensor, out: Tensor, into_sizes: list[int], out_sizes: list[int]) -> Any:
        self.wire.sent += sum(size for rank, size in enumerate(out_sizes) if rank != self.wire.rank)
        return dist.all_to_all_single(into, out, into_sizes, out_sizes, group=self.wire.group, async_op=True)


def _finite(g: Tensor) -> tuple[Tensor, bool]:
    """A gradient, and whether it can be rounded; one that holds an infinity or a NaN cannot, and that is said instead."""
    finite = first_not_finite([g]) < 0
    return (g if finite else torch.zeros_like(g)), finite
