"""The mean of gradients over ranks, sent in 8 bits: a communication hook for DistributedDataParallel.

A gradient is cut into as many shards as there are ranks R; rank s owns shard s. With g_r the gradient of rank r, two exchanges:

    each rank r -> owner s    Q(g_r) of shard s                   codes, and an exponent for each block of elements
    owner s -> each rank      Q_G(1/R Σ_r Q(g_r)) of shard s      so that all ranks get equal bytes

Q is stochastic rounding, with random bits of its own for each rank, parameter and step: it is unbiased, and so is the mean. The
mean is on the grid: it is the gradient that Algorithm 1 rounds by Q_G, and the sampler does not round it again. A rank sends
2 (R-1)/R codes for each weight, as many as an all-reduce sends floats.

The sum is taken in the order of the ranks, and random bits belong to parameters, not to DDP's buckets, which DDP rearranges after
the first step: a resumed run equals an uninterrupted one bit for bit. ``"fp32"`` is the same exchange in float32, which rounds
only gradients that have more bits.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.optim import Optimizer

from ..quantization import operators, random
from ..quantization.backend import kernels_for
from ..quantization.codes import decode_values, empty_codes, encode_op
from ..quantization.formats import FP32, Format, parse
from ..sampling.gradients import first_not_finite
from ..sampling.settings import parameter_key
from .ranks import report_missing_rank

__all__ = ["Wire", "parse_wire_format"]

# A parameter's key is folded with these numbers: 1 + rank for gradients, others for means and for further backwards in a step.
MEANS, FURTHER_BACKWARDS = 1 << 32, 2 << 32


def parse_wire_format(format: str | Format) -> Format:
    """Return the format if gradients can be sent in it: block floating point in blocks of a given size, or float32."""
    parsed = parse(format)
    if parsed != FP32 and not (parsed.has_exponents and parsed.group_size):
        raise ValueError(
            f"gradients travel in block floating point with groups of a given size, such as bfp8/64, or in fp32, not in {parsed}"
        )
    return parsed


class Wire:
    """Averages gradients over ranks: ``model.register_comm_hook(None, wire.hook)`` on DDP; `replicate` does so.

    Args:
        sampler: steps the parameters that the gradients belong to; its seed, stream and steps determine the random bits.
        format: block floating point in blocks of a given size, such as ``"bfp8/64"``, or ``"fp32"``.
        group: the ranks; all by default.
    """

    def __init__(self, sampler: Optimizer, format: str | Format = "bfp8/64", group: Any = None) -> None:
        self.format, self.group, self.sampler = parse_wire_format(format), group, sampler
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.block = cast(int, self.format.group_size)  # elements
        self.sent = 0  # bytes this rank has sent to others
        self._pending: list[_Bucket] = []
        self._backwards: dict[Tensor, tuple[int, int]] = {}  # parameter -> (step, backwards of this step so far)
        self._groups = {p: i for i, g in enumerate(sampler.param_groups) for p in g["params"]}

    # Torch reads the annotations of a hook, so this file must not postpone their evaluation.
    def hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Send a bucket's gradients; average when the last bucket has been sent, so that backward computes meanwhile."""
        with report_missing_rank("while gradients were added up"):
            new = _Bucket(self, bucket)
            self._pending.append(new)
            if bucket.is_last():
                pending, self._pending = self._pending, []
                for one in pending:
                    one.send_means()
                for one in pending:
                    one.receive_means()
        return new.result

    def next_key(self, p: Tensor) -> random.Key:
        """Return the random bits of a parameter's gradient in the coming step; each further backward before it has its own."""
        state, group = self.sampler.state[p], self.sampler.param_groups[self._groups[p]]
        step, backwards = self._backwards.get(p, (-1, 0))
        backwards = backwards + 1 if step == state["step"] else 0
        self._backwards[p] = state["step"], backwards
        key = parameter_key(group["seed"], group["stream"], state["index"], state["step"] + 1)
        return key.fold(FURTHER_BACKWARDS + backwards) if backwards else key

    # ---- one gradient

    @property
    def code_bytes(self) -> int:
        return max(self.format.storage_bits, 8) // 8

    def count_blocks(self, elements: int) -> int:
        """Return the number of blocks of a flat gradient, which can be cut between any two of them."""
        return -(-elements // self.block)

    def shard(self, elements: int, owner: int) -> slice:
        """Return the elements of a flat gradient that a rank owns: blocks are not cut."""
        blocks = self.count_blocks(elements)
        ends = (min((owner + i) * blocks // self.size * self.block, elements) for i in range(2))
        return slice(*ends)

    def encode(self, g: Tensor, key: random.Key) -> "_Coded":
        """Round a flat gradient to codes and exponents, as bytes. The gradient may be overwritten."""
        if self.format == FP32:
            return _Coded(g.view(torch.uint8), g.new_empty(0, dtype=torch.uint8), True)
        kernels, finite = kernels_for(g), _are_finite(g)
        if isinstance(finite, Tensor):
            g = torch.where(finite, g, 0.0)
        elif not finite:
            g = torch.zeros_like(g)
        if kernels is not None:  # one pass instead of three
            codes, exponents = empty_codes(g, self.format)
            kernels.quantize_with_codes(g, self.format, "stochastic", key, random.GRADIENT, (codes, exponents))
        else:
            q = operators.quantize_op(g, str(self.format), "stochastic", *operators.key_bits(key), random.GRADIENT)
            codes, exponents = encode_op(q, str(self.format))
        return _Coded(codes.view(torch.uint8), exponents.view(torch.uint8), finite)

    def decode(self, codes: Tensor, exponents: Tensor) -> Tensor:
        """Return a flat gradient from its bytes."""
        if self.format == FP32:
            return codes.clone().view(torch.float32)
        codes = codes.clone().view(self.format.code_dtype)  # views of wider numbers need an aligned copy
        return decode_values(codes, exponents.view(torch.int8), self.format)

    def exchange(self, out: Tensor, out_sizes: list[int], in_sizes: list[int]) -> "_Exchange":
        """Begin to send each rank its part of these bytes, and to receive a part of given size from each."""
        self.sent += sum(size for rank, size in enumerate(out_sizes) if rank != self.rank)
        received = out.new_empty(sum(in_sizes))
        work = dist.all_to_all_single(received, out, in_sizes, out_sizes, group=self.group, async_op=True)
        return _Exchange(received, in_sizes, work)


class _Coded(NamedTuple):
    """A rounded gradient. If it held an infinity or a NaN it is not ``finite``, and its codes are those of zeros."""

    codes: Tensor
    exponents: Tensor
    finite: bool | Tensor  # a tensor on a device that the host must not wait for


def _is_deferred(t: Tensor) -> bool:
    kernels = kernels_for(t)
    return kernels is not None and kernels.deferred


def _are_finite(g: Tensor) -> bool | Tensor:
    """Return True if a gradient holds neither an infinity nor a NaN; a tensor where the host must not wait for it."""
    return g.isfinite().all() if _is_deferred(g) else first_not_finite([g]) < 0


def _spoil_unless_finite(g: Tensor, flags: list[Tensor]) -> None:
    """Make a gradient NaN if one of these flags is 0."""
    if not _is_deferred(g):
        if not all(bool(flag) for flag in flags):
            g.fill_(torch.nan)
    elif flags:
        g.masked_fill_(torch.cat(flags).amin() == 0, torch.nan)


class _Part(NamedTuple):
    """Views of the bytes in a message that belong to one gradient. In fp32 there are neither exponents nor a flag."""

    codes: Tensor
    exponents: Tensor
    finite: Tensor  # one byte: 0 if a rank's gradient held an infinity or a NaN

    def fill(self, codes: Tensor, exponents: Tensor, finite: bool | Tensor) -> None:
        self.codes.copy_(codes)
        self.exponents.copy_(exponents)
        self.finite.fill_(finite)


@dataclass(frozen=True)
class _Layout:
    """The bytes of a message with one owner's shards of the gradients in a bucket: all codes, all exponents, all flags."""

    wire: Wire
    shards: list[slice]

    @property
    def sizes(self) -> list[int]:
        wire, counts = self.wire, [s.stop - s.start for s in self.shards]
        low = wire.format != FP32
        codes = [n * wire.code_bytes for n in counts]
        exponents = [wire.count_blocks(n) if low else 0 for n in counts]
        return codes + exponents + [int(low)] * len(counts)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def parts(self, message: Tensor) -> list[_Part]:
        """Return views of a message, one for each gradient."""
        views, n = message.split(self.sizes), len(self.shards)
        return [_Part(*three) for three in zip(views[:n], views[n : 2 * n], views[2 * n :], strict=True)]

    def write(self, part: _Part, i: int, coded: _Coded) -> None:
        """Copy the owner's shard of gradient i into a message."""
        shard, width = self.shards[i], self.wire.code_bytes
        block = self.wire.count_blocks(shard.start)
        codes = coded.codes[shard.start * width : shard.stop * width]
        part.fill(codes, coded.exponents[block : block + part.exponents.numel()], coded.finite)


@dataclass(frozen=True)
class _Exchange:
    """An all-to-all on its way."""

    received: Tensor
    sizes: list[int]
    work: Any

    def wait(self) -> list[Tensor]:
        """Return the messages of all ranks, in their order."""
        self.work.wait()
        return list(self.received.split(self.sizes))


class _Bucket:
    """The gradients that DDP hands over together: sent to their owners, averaged there, sent back."""

    def __init__(self, wire: Wire, bucket: Any) -> None:
        self.wire, self.result = wire, torch.futures.Future[Tensor]()
        self.buffer, self.gradients = bucket.buffer(), [g.view(-1) for g in bucket.gradients()]
        self.keys = [wire.next_key(p) for p in bucket.parameters()]
        counts = [g.numel() for g in self.gradients]
        self.layouts = [_Layout(wire, [wire.shard(n, owner) for n in counts]) for owner in range(wire.size)]
        self.sizes = [layout.nbytes for layout in self.layouts]
        self.exchange = wire.exchange(self._encode_gradients(), self.sizes, [self.sizes[wire.rank]] * wire.size)

    def send_means(self) -> None:
        """Average this rank's shards over all ranks and send the means to each."""
        wire, out = self.wire, self._encode_means()
        del self.exchange  # frees its bytes before those of the next are allocated
        self.exchange = wire.exchange(out.repeat(wire.size), [out.numel()] * wire.size, self.sizes)

    def receive_means(self) -> None:
        """Complete DDP's future with the means. Where a rank's gradient held an infinity or a NaN, it is NaN on all."""
        received = [layout.parts(m) for layout, m in zip(self.layouts, self.exchange.wait(), strict=True)]
        for i, g in enumerate(self.gradients):
            for layout, parts in zip(self.layouts, received, strict=True):
                if parts[i].codes.numel():
                    g[layout.shards[i]] = self.wire.decode(parts[i].codes, parts[i].exponents).to(self.buffer.dtype)
            _spoil_unless_finite(g, [parts[i].finite for parts in received if parts[i].finite.numel()])
        self.result.set_result(self.buffer)

    def _encode_gradients(self) -> Tensor:
        """Return the messages of this rank, one for each owner, one after the other."""
        out = self._allocate(sum(self.sizes))
        messages = [layout.parts(m) for layout, m in zip(self.layouts, out.split(self.sizes), strict=True)]
        for i, (g, key) in enumerate(zip(self.gradients, self.keys, strict=True)):
            coded = self.wire.encode(g.float(), key.fold(1 + self.wire.rank))
            for layout, parts in zip(self.layouts, messages, strict=True):
                layout.write(parts[i], i, coded)
        return out

    def _encode_means(self) -> Tensor:
        """Return the message with the means of this rank's shards."""
        wire, layout = self.wire, self.layouts[self.wire.rank]
        received = [layout.parts(message) for message in self.exchange.wait()]
        out = self._allocate(layout.nbytes)
        for mean, key, *parts in zip(layout.parts(out), self.keys, *received, strict=True):
            finite = reduce(
                torch.logical_and, (part.finite.all() for part in parts)
            )  # a tensor: the host need not wait
            if not mean.codes.numel():
                mean.finite.fill_(finite)
                continue
            values = reduce(torch.add, (wire.decode(part.codes, part.exponents) for part in parts)) / wire.size
            coded = wire.encode(values, key.fold(MEANS + wire.rank))  # a sum of finite numbers may overflow
            mean.fill(coded.codes, coded.exponents, finite & coded.finite)
        return out

    def _allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.buffer.device)
