"""Estimated cost of a step on several ranks: bytes sent, bytes held, seconds. Plain arithmetic; nothing is measured here.

A chain of N weights in T tensors and G layers is stepped by R ranks together. L are the weights of the largest layer, p the bytes
of a packed weight with its share of exponents, b those of a gradient's element on the wire: 4, or 1 + 1/64 in ``"bfp8/64"``.

    layout      a rank sends in a step                          a rank holds
    chains      nothing (R = 1)                                 p N + 4 L, packed, stepped in backward; else (4 + 4) N
    replicas    2 (R-1)/R b N + 2 (R-1) T flags                 (4 + 4 + 4) N + 2 b (N + B) + 4 B
    shards      (R-1)/R (2 p + 4) N                             (p N + 4 L)/R + (2 p + 12) L

Replicas hold weights, gradients, DDP's buckets (not with ``gradient_as_bucket_view=True``), and the messages of all buckets,
which are on their way until backward ends; B are the weights of a bucket, which is rounded as float32. Torch's own all-reduce
needs the first three. Shards gather codes in forward and in backward, and scatter gradients as float32; a layer takes its codes
and those of the next, its weights and gradient as float32, and the messages of its gradient. An accumulator in float32 is 4 N
more, in shards 4 N/R. Every hundred steps replicas compare 16 bytes a tensor.

    compute     6 N batch / (R flops), or the measured time of a step on one rank, over R
    rounding    (N, of shards N/R) / stepping + N (1 + 1/R) / coding, the latter of replicas with a wire
    network     sent / network + messages · latency
    step        compute + rounding + network - the part of network that is hidden behind compute

Left out are: activations, unless given; uneven shards, and vectors, which are not sharded; buffers; several passes a step, for
each of which shards send; ranks that wait for the slowest, or share a processor or a cable; loading of data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from qlangevin._validate import check_choice, check_fraction, check_integer, check_number
from qlangevin.distributed.wire import parse_wire_format
from qlangevin.quantization.formats import FP32, BlockFloat

__all__ = ["Job", "Layout", "Machine", "RunCosts", "StepCosts", "estimate_run", "estimate_step", "wire_bytes"]

Layout = Literal["chains", "replicas", "shards"]

FLOAT = 4  # bytes
PACKED = 1.02  # bytes of a weight in bfp8, with exponents and BatchNorm's buffers: the upper end for a ResNet-18
BUCKET = 25 * 2**20  # bytes of gradients that DDP sends together
CHECKSUM = 16  # bytes a tensor, when the ranks compare theirs


@dataclass(frozen=True)
class Machine:
    """A rank, its network and its disk. A rate that is not given is infinite and costs nothing."""

    flops: float = math.inf
    """Operations a second, as reached in practice."""
    memory: float = math.inf
    """Bytes a rank has."""
    network: float = math.inf
    """Bytes a second that a rank sends, while it receives as many."""
    latency: float = 0.0
    """Seconds for a message; the messages of one exchange are counted one after the other."""
    disk: float = math.inf
    """Bytes of samples a second that all ranks together write."""
    stepping: float = math.inf
    """Weights a second that the sampler steps: gradient, noise, rounding."""
    coding: float = math.inf
    """Elements a second that are encoded for the wire, added up and decoded."""
    overlap: float = 0.0
    """Fraction of the bytes that could be sent while the rank computes that are."""

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "network", "disk", "stepping", "coding"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)!r}")
        check_number("latency", self.latency)
        check_fraction("overlap", self.overlap)


@dataclass(frozen=True)
class Job:
    """A model, the steps of its chains, and their layout on ranks."""

    weights: float
    """N."""
    batch: float
    """Examples, of a language model tokens, that one step of one chain takes, on all its ranks together."""
    ranks: int = 1
    layout: Layout = "chains"
    chains: int | None = None
    """Number of chains. By default one; in the layout ``"chains"`` one for each rank."""
    wire: str | None = None
    """Format of replicas' gradients on the wire; None is torch's own all-reduce, in float32."""
    packed: float | None = PACKED
    """p; None if weights are floats, as those of replicas always are."""
    layers: int = 1
    """G: modules that shards gather one by one."""
    largest: float | None = None
    """L; N/G by default."""
    tensors: int = 0
    """T."""
    accumulator: bool = False
    view: bool = False
    """DDP's ``gradient_as_bucket_view``."""
    in_backward: bool = True
    """Packed weights step in backward, which frees each gradient before the next one is computed."""
    bucket: float = BUCKET
    """Bytes; DDP's ``bucket_cap_mb``."""
    every: int = 100
    """Steps from one comparison of replicas to the next."""
    seconds: float | None = None
    """Measured seconds of forward and backward of the full batch on one rank, in place of 6 N batch / flops."""
    activations: float = 0.0
    """Bytes kept for backward for each example."""

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, get_args(Layout))
        for name in ("ranks", "layers"):
            check_integer(name, getattr(self, name), 1)
        for name in ("weights", "batch", "tensors", "every", "activations"):
            check_number(name, getattr(self, name))
        for name in ("largest", "packed", "seconds"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        if not self.bucket > 0:
            raise ValueError(f"bucket must be a positive number, got {self.bucket!r}")
        if self.wire is not None and self.layout != "replicas":
            raise ValueError(f"only replicas have a wire, and the layout is {self.layout!r}")
        if self.ranks % check_integer("chains", self.chain_count, 1) and self.layout != "chains":
            raise ValueError(f"{self.ranks} ranks cannot be split into {self.chain_count} groups of equal size")

    @property
    def chain_count(self) -> int:
        """Number of chains, the default resolved."""
        return self.chains if self.chains is not None else self.ranks if self.layout == "chains" else 1

    @property
    def ranks_per_chain(self) -> int:
        """R: ranks that step a chain together."""
        return 1 if self.layout == "chains" else self.ranks // self.chain_count

    @property
    def rounds(self) -> int:
        """Number of chains that a rank runs one after the other."""
        return -(-self.chain_count * self.ranks_per_chain // self.ranks)

    @property
    def weight_bytes(self) -> float:
        """Bytes in which a rank holds a weight."""
        return FLOAT if self.packed is None or self.layout == "replicas" else self.packed


@dataclass(frozen=True)
class StepCosts:
    """Costs of one step for one rank."""

    sent: float
    """Bytes."""
    messages: float
    memory: float
    """Bytes."""
    compute: float
    """Seconds, as the three below."""
    rounding: float
    network: float
    seconds: float
    """Seconds of the step."""
    fits: bool
    """True if the machine has this much memory."""


@dataclass(frozen=True)
class RunCosts:
    """Costs of a run of all chains."""

    seconds: float
    steps: float
    """Seconds of stepping; the rest is writing."""
    disk: float
    """Bytes of all samples."""
    sent: float
    """Bytes a rank sends for steps."""

    @property
    def hours(self) -> float:
        return self.seconds / 3600


def wire_bytes(format: str | None) -> float:
    """Return b, the bytes of an element on the wire with its share of exponents."""
    parsed = parse_wire_format(format or FP32)
    if not isinstance(parsed, BlockFloat):
        return FLOAT
    return max(parsed.storage_bits, 8) / 8 + 1 / int(parsed.block)  # a code takes at least a byte


def estimate_step(job: Job, machine: Machine) -> StepCosts:
    """Return the costs of a step of one chain for a rank; the docstring of this module has the formulas."""
    sent, messages, hideable = _traffic(job)
    compute = (
        6 * job.weights * job.batch / machine.flops if job.seconds is None else job.seconds
    ) / job.ranks_per_chain
    rounding = _rounding_seconds(job, machine)
    network = sent / machine.network + messages * machine.latency
    hidden = min(machine.overlap * hideable * network, compute)
    memory = _memory_bytes(job)
    seconds = compute + rounding + network - hidden
    return StepCosts(sent, messages, memory, compute, rounding, network, seconds, memory <= machine.memory)


def _traffic(job: Job) -> tuple[float, float, float]:
    """Return the bytes and messages a rank sends in a step, and the fraction of them it can send before backward ends."""
    ranks, weights = job.ranks_per_chain, job.weights
    if ranks == 1:
        return 0.0, 0.0, 0.0
    others = ranks - 1
    if job.layout == "shards":
        return others / ranks * (2 * job.weight_bytes + FLOAT) * weights, 3 * job.layers * others, 1.0
    b = wire_bytes(job.wire)
    sent = 2 * others / ranks * b * weights
    if b != FLOAT:
        sent += 2 * others * job.tensors  # a byte flags a gradient that is not finite
    if job.every:
        sent += 2 * others / ranks * CHECKSUM * job.tensors * (2 if job.accumulator else 1) / job.every
    messages = 2 * others * math.ceil(FLOAT * weights / job.bucket)
    return sent, messages, 1.0 if job.wire is None else 0.5  # means are sent after all gradients


def _memory_bytes(job: Job) -> float:
    """Return the bytes a rank holds."""
    ranks, weights, p = job.ranks_per_chain, job.weights, job.weight_bytes
    largest = weights / job.layers if job.largest is None else job.largest
    if job.layout == "replicas" and ranks > 1:
        held = (FLOAT + FLOAT + (0 if job.view else FLOAT)) * weights
        held += _message_bytes(job, largest)
    elif job.layout == "shards":
        gradients = FLOAT * (largest if job.in_backward and job.packed is not None else weights)
        held = (p * weights + gradients) / ranks + (2 * p + 3 * FLOAT) * largest
    elif job.packed is not None and job.in_backward:
        held = p * weights + FLOAT * largest
    else:
        held = (p + FLOAT) * weights
    accumulator = FLOAT * weights / (ranks if job.layout == "shards" else 1) if job.accumulator else 0
    return held + accumulator + job.activations * job.batch / ranks


def _message_bytes(job: Job, largest: float) -> float:
    """Return the bytes of a wire's messages: both exchanges of all buckets, and the copies and floats of the bucket at work."""
    if job.wire is None:
        return 0.0
    b, bucket = wire_bytes(job.wire), min(max(largest, job.bucket / FLOAT), job.weights)
    return 2 * b * (job.weights + bucket) + (0 if b == FLOAT else FLOAT * bucket)


def _rounding_seconds(job: Job, machine: Machine) -> float:
    """Return the seconds of the sampler's step and of encoding for the wire."""
    ranks, weights = job.ranks_per_chain, job.weights
    stepped = weights / ranks if job.layout == "shards" else weights
    coded = weights * (1 + 1 / ranks) if job.wire is not None and ranks > 1 else 0.0
    return stepped / machine.stepping + coded / machine.coding


def estimate_run(job: Job, machine: Machine, *, steps: int, samples: int) -> RunCosts:
    """Return the costs of a run in which each chain makes that many steps and all chains together draw that many samples.

    A sample is p N bytes in every layout, since it is stored in 8 bits. Its chain waits while it is written; of shards, the
    first rank gathers it before.
    """
    check_integer("steps", steps, 0)
    check_integer("samples", samples, 0)
    costs, size = estimate_step(job, machine), (PACKED if job.packed is None else job.packed) * job.weights
    gathering = size / machine.network if job.layout == "shards" and job.ranks_per_chain > 1 else 0.0
    stepping = steps * job.rounds * costs.seconds
    writing = samples * size / machine.disk + samples / job.chain_count * job.rounds * gathering
    return RunCosts(stepping + writing, stepping, samples * size, steps * job.rounds * costs.sent)
