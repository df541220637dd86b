"""The two processes that `benchmarks.scaling` starts, to time a chain's steps in all layouts or to measure the memory of one.

Bytes sent are those of the processes' own TCP connections, as the system counts them, so that other users of the loopback
device do not matter.
"""

from __future__ import annotations

import gc
import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.distributed import Ranks, Wire, join, replicate, shard
from qlangevin.experiments.models import ResNet18

from .memory import MB, reset_peak, resident
from .training import Batch, images

RANKS, FORMAT = 2, "bfp8"
SIZE = 16 * MB  # bytes from one rank to another in a plain exchange
SETTINGS: dict[str, Any] = {"lr": 0.01, "num_data": 50_000, "weights": FORMAT, "seed": 0}

Case = Literal["mlp", "resnet", "small"]
Kind = Literal[
    "floats", "packed", "half", "halves", "chains", "replicas", "replicas fp32", "replicas bfp8/64", "shards"
]
NAMES: dict[Kind, str] = {
    "chains": "two chains",
    "replicas": "replicas, torch's all-reduce",
    "replicas fp32": "replicas, wire fp32",
    "replicas bfp8/64": "replicas, wire bfp8/64",
    "shards": "shards, packed",
}
SOLO: dict[Kind, str] = {
    "floats": "floats, one rank alone",
    "packed": "packed, one rank alone",
    "half": "floats, one rank alone, half the batch",
}
# Two ranks that compute at the same time and send nothing: the loss from sharing the machine.
UNCONNECTED: dict[Kind, str] = {"halves": "floats, half the batch on both ranks"}


@dataclass(frozen=True)
class Options:
    """A network and the seconds to time it in all layouts, or the one layout whose memory is measured."""

    case: Case = "mlp"
    seconds: float = 20.0
    memory: Kind | None = None


# ---- models and batches


def network(case: str, width: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    if case == "resnet":
        return ResNet18(width=width or 32)
    n = width or {"mlp": 2048, "small": 256}[case]
    return nn.Sequential(nn.Linear(1024, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 10))


def examples(case: str, count: int | None = None) -> Batch:
    if case == "resnet":
        return images(count or 32)
    generator, count = torch.Generator().manual_seed(0), count or {"mlp": 256, "small": 32}[case]
    return torch.randn(count, 1024, generator=generator), torch.randint(10, (count,), generator=generator)


class Subject:
    """A model that is stepped in one of the layouts, on this rank's part of a batch."""

    def __init__(self, kind: Kind, ranks: Ranks, model: nn.Module, batch: Batch, **options: Any) -> None:
        self.kind: Kind = kind
        self.wire: Wire | None = None
        alone = kind in ("floats", "packed", "chains")
        self.batch = batch if alone else tuple(part.chunk(ranks.size)[ranks.rank] for part in batch)
        if kind in ("packed", "shards"):
            ql.pack(model, FORMAT)
        self.model: Callable[[Tensor], Tensor] = shard(model) if kind == "shards" else model
        stream = ranks.rank if kind == "chains" else 0
        self.sampler = ql.SGLD(model.parameters(), stream=stream, **SETTINGS, **options)
        if kind.startswith("replicas"):
            name = kind.partition(" ")[2]
            self.wire = Wire(self.sampler, name) if name else None
            self.model = replicate(model, self.sampler, wire=self.wire, every=0)

    def backward(self) -> None:
        self.sampler.zero_grad()
        nn.functional.cross_entropy(self.model(self.batch[0]), self.batch[1]).backward()

    def time_step(self) -> tuple[float, float]:
        """Make a step and return the seconds of forward and backward, and of the sampler's step."""
        start = time.perf_counter()
        self.backward()
        middle = time.perf_counter()
        self.sampler.step()
        return middle - start, time.perf_counter() - middle


def count_sent_bytes() -> int:
    """Return the bytes that the TCP connections of this process have sent so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
        except OSError:  # not a TCP socket, or closed meanwhile
            continue
        total += struct.unpack_from("Q", info, 200)[0] if len(info) == 208 else 0  # tcpi_bytes_sent
    return total


# ---- measurements


Actions = dict[str, Callable[[], object]]


def plain_exchanges() -> Actions:
    """Return exchanges of plain bytes: a small all-to-all for its latency, and large ones."""
    out, into, floats = (torch.ones(SIZE * RANKS, dtype=torch.uint8) for _ in range(3))
    half, floats = torch.empty(SIZE // 4), floats.view(torch.float32)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    small = slice(64 * RANKS)
    return {
        "latency": lambda: dist.all_to_all_single(into[small], out[small]),
        "all-to-all": lambda: dist.all_to_all_single(into, out),
        "all-reduce": lambda: dist.all_reduce(floats),
        "reduce-scatter": lambda: scatter(half, floats),
    }


@dataclass(frozen=True)
class Gradients:
    """A stand-in for DDP's `GradBucket` that holds all gradients."""

    values: list[Tensor]
    owners: list[Tensor]

    def buffer(self) -> Tensor:
        return self.values[0]

    def gradients(self) -> list[Tensor]:
        return self.values

    def parameters(self) -> list[Tensor]:
        return self.owners

    def is_last(self) -> bool:
        return True


def coding_alone(subjects: dict[Kind, Subject]) -> Actions:
    """Return the encoding and decoding of each wire: the first rank sends to itself, the other waits."""
    alone, found = dist.new_group([0]), Actions()
    for kind in (kind for kind, subject in subjects.items() if subject.wire is not None and not dist.get_rank()):
        sampler = subjects[kind].sampler
        owners = [p for group in sampler.param_groups for p in group["params"]]
        bucket: Any = Gradients([torch.randn_like(p) for p in owners], owners)
        found[kind] = partial(Wire(sampler, kind.partition(" ")[2], alone).hook, None, bucket)
    return found


def time_action(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def time_layouts(options: Options, ranks: Ranks) -> dict[str, Any]:
    """Step in all layouts, in turns; return the least time of each, and the bytes sent in a step."""
    batch, kinds = examples(options.case), [*SOLO, *UNCONNECTED, *NAMES]
    subjects = {kind: Subject(kind, ranks, network(options.case), batch) for kind in kinds}
    best = {kind: [math.inf] * 3 for kind in kinds}  # backward, step, both
    plain, codes = plain_exchanges(), coding_alone(subjects)
    least, sent = dict.fromkeys([*plain, *codes], math.inf), dict[str, float]()
    rounds, begun, go = 0, time.perf_counter(), torch.ones(1)
    while go:
        for kind, subject in subjects.items():
            dist.barrier()
            if kind in SOLO and not ranks.first:
                continue  # and wait at the next barrier
            before = count_sent_bytes()
            times = subject.time_step()
            sent[kind] = count_sent_bytes() - before
            if rounds:
                best[kind] = [min(pair) for pair in zip(best[kind], (*times, sum(times)), strict=True)]
        for name, action in (plain | codes).items():
            if name in plain:
                dist.barrier()
            least[name] = min(least[name], time_action(action))
        rounds += 1
        go[0] = rounds < 4 or time.perf_counter() - begun < options.seconds
        dist.broadcast(go, 0)  # both ranks stop by the first one's clock
    tensors = list(network(options.case).parameters())
    counted = {kind: subject.wire.sent / rounds for kind, subject in subjects.items() if subject.wire is not None}
    return {
        "weights": sum(p.numel() for p in tensors),
        "tensors": len(tensors),
        "layers": sum(p.dim() > 1 for p in tensors),  # shards gather the layers that have a matrix
        "rounds": rounds,
        "best": best,
        "least": least,
        "sent": sent,
        "counted": counted,
    }


def measure_memory(options: Options, ranks: Ranks) -> dict[str, Any]:
    """Return the peak of memory in a step with few examples, after a narrow model has loaded all code into the base."""
    kind = options.memory
    assert kind is not None
    own: dict[str, Any] = {"step_in_backward": True} if kind in ("packed", "shards") else {}
    for width in (16, None):
        model = network(options.case, width)
        weights, largest = (f(p.numel() for p in model.parameters()) for f in (sum, max))
        gc.collect()
        base = resident("VmRSS")
        reset_peak()
        subject = Subject(kind, ranks, model, examples(options.case, 2 * RANKS), **own)
        del model
        if width is None:
            base -= 4 * weights  # the base includes them, as floats
        for _ in range(3):
            reset_peak()
            subject.time_step()
    return {"peak": resident("VmHWM") - base, "weights": weights, "largest": largest}


def main(options: Options) -> None:
    """Measure as one of the two processes; the first prints the result as JSON."""
    torch.set_num_threads(1)
    with join(timeout=60.0) as ranks:
        found = time_layouts(options, ranks) if options.memory is None else measure_memory(options, ranks)
        if ranks.first:
            print(json.dumps(found))


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m benchmarks.pair"))
