"""Memory of a training step: a ResNet-18 at batch 128, SGLD in FP32 against everything in bfp8.

Each contestant is a process of its own. Measured is the peak of its resident memory over one step, less its resident memory
before the model was built; glibc is configured to return freed memory to the system at once. Codes and float copies, the
workspace of the convolutions and Python's own memory are all included. MB are 2^20 bytes.

Besides the peak: bytes a weight of weights, gradients and the sampler's state, counted on the objects themselves, and the
composition of the memory at the end of forward. The peak can be reset on Linux only; elsewhere there are no rows.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import qlangevin as ql
from qlangevin.experiments.models import ResNet18
from qlangevin.lowering.kept_tensors import Kept, SavedCodes
from qlangevin.lowering.saved_tensors import watching

from .timing import Goal, Row
from .training import Batch, images, lower_and_pack, make_sampler

MB = 1 << 20
FORMAT, BATCH = "bfp8", 128
FP32, OURS = "FP32, ql.SGLD", "lowered and packed"
# By default glibc keeps freed memory, and a contestant that has freed more would seem to need less.
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}

Layout = Literal["contiguous", "channels_last"]
GOALS: dict[Layout, Goal] = {"contiguous": Goal("<=", 0.40), "channels_last": Goal("<=", 0.35)}


@dataclass(frozen=True)
class Options:
    """The contestant that a process measures."""

    contestant: Literal["fp32", "packed"]
    layout: Layout = "contiguous"
    steps: int = 3
    """Only the last step counts: the first learns which activations are saved, and fills the caches of the kernels."""


@dataclass(frozen=True)
class Reading:
    """Memory of a contestant, in bytes."""

    peak: float
    """The most during the step."""
    forward: float
    """At the end of forward."""
    after: float
    """After the step."""
    per_weight: float
    """Weights, gradients and state after backward, over the number of weights."""
    weights: float
    largest_gradient: float
    saved_codes: float
    """The part of the tensors saved for backward that is saved as codes."""
    saved_floats: float


# ---- memory, as the system counts it


def resident(name: Literal["VmRSS", "VmHWM"]) -> int:
    """Return the resident bytes of this process: now, or the most since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def can_measure() -> bool:
    try:
        reset_peak()
        return resident("VmHWM") > 0
    except (OSError, StopIteration):
        return False


# ---- memory, counted on the objects


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; of packed ones, those of codes and exponents."""
    return sum(t.nbytes for t in tensors)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state; a Python number counts 8."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes if isinstance(value, Tensor) else 8 for value in values)


class Gradients:
    """Watches gradients as they arrive. It must be made before the sampler, to see each gradient before the sampler frees it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.most, self.largest = parameters, 0, 0
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p: Tensor) -> None:
        assert p.grad is not None
        self.most = max(self.most, len(self.alive()))
        self.largest = max(self.largest, p.grad.nbytes)

    def alive(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]


class Saved:
    """Storages that autograd keeps for backward, each counted once, by weak references, which keep nothing alive."""

    def __init__(self) -> None:
        self.codes: dict[StorageWeakRef, int] = {}
        self.floats: dict[StorageWeakRef, int] = {}

    def note(self, kept: Kept) -> None:
        parts = [kept.codes, kept.exponents] if isinstance(kept, SavedCodes) else [kept.tensor]
        for part in parts:
            if isinstance(part, ql.QTensor):  # a packed weight, which is counted with the weights
                continue
            storage = part.untyped_storage()
            kind = self.floats if part.dtype.is_floating_point else self.codes
            kind[StorageWeakRef(storage)] = storage.nbytes()

    def watch(self) -> AbstractContextManager[object]:
        """Note every tensor that a lowered model saves inside of this context."""
        return watching(self.note)

    @staticmethod
    def alive(kind: dict[StorageWeakRef, int]) -> int:
        return sum(size for storage, size in kind.items() if not storage.expired())


# ---- one contestant


class Subject:
    """A model in training."""

    def __init__(self, options: Options, width: int, batch: Batch) -> None:
        layout = torch.channels_last if options.layout == "channels_last" else torch.contiguous_format
        packed = options.contestant == "packed"
        self.x, self.y = batch[0].contiguous(memory_format=layout), batch[1]
        self.model = ResNet18(width=width).to(memory_format=layout)  # type: ignore[call-overload]
        if packed:
            lower_and_pack(self.model, FORMAT, packed)
        self.gradients = Gradients(list(self.model.parameters()))
        self.sampler = make_sampler(self.model, FORMAT if packed else None, packed)
        self.at_most = 1 if packed else len(self.gradients.parameters)  # gradients at a time

    def step(self, base: int) -> Reading:
        """Make one step of training and return its memory above a base."""
        reset_peak()
        saved = Saved()
        self.sampler.zero_grad()
        with saved.watch():
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        forward, codes, floats = resident("VmRSS") - base, saved.alive(saved.codes), saved.alive(saved.floats)
        loss.backward()
        if self.gradients.most > self.at_most:
            raise RuntimeError(f"{self.gradients.most} gradients were there at once, instead of {self.at_most}")
        weights = tensor_bytes(self.model.parameters())
        held = weights + tensor_bytes(self.gradients.alive()) + state_bytes(self.sampler)
        self.sampler.step()
        if not bool(loss.isfinite()):
            raise RuntimeError(f"the loss is {loss.item()}")
        del loss
        return Reading(
            peak=resident("VmHWM") - base,
            forward=forward,
            after=resident("VmRSS") - base,
            per_weight=held / sum(p.numel() for p in self.model.parameters()),
            weights=weights,
            largest_gradient=self.gradients.largest,
            saved_codes=codes,
            saved_floats=floats,
        )


def run_contestant(options: Options) -> Reading:
    """Measure a contestant in this process, after a narrow model has loaded all code, kernels and lazy imports into the base."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    Subject(options, width=8, batch=images(2)).step(0)
    gc.collect()
    base = resident("VmRSS")
    full = Subject(options, width=64, batch=images(BATCH))
    readings = [full.step(base) for _ in range(options.steps)]
    return readings[-1]


# ---- the comparison


def measure_contestant(options: Options) -> Reading:
    """Return a contestant's reading, from a process of its own."""
    arguments = [f"--{name}={value}" for name, value in asdict(options).items()]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | ENVIRONMENT,
    )
    return Reading(**json.loads(done.stdout))


def peaks(layout: Layout, ours: Reading, theirs: Reading) -> list[Row]:
    group = f"memory of a training step, ResNet-18, batch {BATCH}, {layout}, one thread"
    pairs = {
        "peak": (ours.peak, theirs.peak, GOALS[layout]),
        "at the end of forward": (ours.forward, theirs.forward, None),
        "after the step": (ours.after, theirs.after, None),
    }
    return [
        Row(group, f"{OURS}, {name}", mine / MB, "MB", FP32, other / MB, "memory", goal)
        for name, (mine, other, goal) in pairs.items()
    ]


def weights(ours: Reading, theirs: Reading) -> list[Row]:
    group = "weights, gradients and state of the sampler, step in backward"
    return [
        Row(group, "a weight", ours.per_weight, "bytes", FP32, theirs.per_weight, goal=Goal("<=", 1.3)),
        Row(group, "largest gradient, the only one at its time", ours.largest_gradient / MB, "MB"),
    ]


def composition(layout: Layout, ours: Reading) -> list[Row]:
    parts = {
        "weights, codes": ours.weights,
        "activations kept as codes": ours.saved_codes,
        "activations kept as floats": ours.saved_floats,
        "other": ours.forward - ours.weights - ours.saved_codes - ours.saved_floats,
        "beyond that, at the peak": ours.peak - ours.forward,
    }
    group = f"where it goes at the end of forward, {OURS}, {layout}"
    return [Row(group, name, size / MB, "MB") for name, size in parts.items()]


def run(quick: bool) -> list[Row]:
    if not can_measure():
        return []
    steps = 2 if quick else 3
    found = {
        layout: (
            measure_contestant(Options("packed", layout, steps)),
            measure_contestant(Options("fp32", layout, steps)),
        )
        for layout in GOALS
    }
    rows = [row for layout, (ours, theirs) in found.items() for row in peaks(layout, ours, theirs)]
    rows += weights(*found["contiguous"])
    return rows + [row for layout, (ours, _) in found.items() for row in composition(layout, ours)]


if __name__ == "__main__":
    print(json.dumps(asdict(run_contestant(tyro.cli(Options, prog="python -m benchmarks.memory")))))
