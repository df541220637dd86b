"""Samples on disk: their size, and the time to append and to open them.

The baseline of `append` is to write as many bytes to a new file and sync it. `append` also encodes weights that are not packed,
computes a SHA-256 (in another thread; it takes about as long as the baseline), renames, and writes the manifest likewise.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import qlangevin as ql
from qlangevin.experiments.models import ResNet18

from .timing import WALL, Contestant, Goal, Row, measure

SAMPLES, FORMAT = 50, "bfp8"
GROUP = f"a store of ResNet-18 samples in {FORMAT}"


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a temporary folder on a disk: /tmp may be in memory, where a sync costs nothing."""
    with tempfile.TemporaryDirectory(prefix=".store-", dir=Path.cwd()) as name:
        yield Path(name)


def build_resnet(packed: bool) -> tuple[nn.Module, ql.SGLD]:
    torch.manual_seed(0)
    model = ResNet18()
    if packed:
        ql.pack(model, weights=FORMAT)
    return model, ql.SGLD(model.parameters(), lr=0.1, num_data=50_000, weights=FORMAT)


def write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def measure_appending(seconds: float, path: Path) -> list[Row]:
    contestants, sizes = {}, []
    for name, packed in (("packed", True), ("not packed, encoded on the way", False)):
        model, sampler = build_resnet(packed)
        store = ql.SampleStore.create(path / f"packed{packed}", model, sampler)
        sizes.append(store.append(model).nbytes)
        contestants[name] = Contestant(lambda s=store, m=model: s.append(m), before=lambda s=store: s.truncate(0))  # type: ignore[misc]
    plain, data = path / "plain", os.urandom(sizes[0])
    contestants["write"] = Contestant(
        lambda: write_new(plain, data), before=lambda: plain.unlink() if plain.exists() else None
    )
    best = measure(contestants, seconds, WALL)
    weights = sum(p.numel() for p in model.parameters())
    rows = [Row(GROUP, "a sample", sizes[0] / weights, "bytes a weight", goal=Goal("<=", 1.02))]
    baseline, theirs = "write and sync as many bytes", best.pop("write") * 1e3
    goals = {"packed": Goal("<=", 1.5)}  # the other one also encodes
    return rows + [
        Row(GROUP, f"append, {name}", time * 1e3, "ms", baseline, theirs, "time", goals.get(name))
        for name, time in best.items()
    ]


def measure_opening(seconds: float, path: Path, samples: int) -> list[Row]:
    model, sampler = build_resnet(packed=True)
    with ql.SampleStore.create(path / "many", model, sampler) as store:
        for step in range(samples):
            store.append(model, step)

    def read() -> None:
        ql.SampleStore.open(path / "many")[0]["classify.weight"]

    times = measure(
        {
            f"open a store of {samples}": Contestant(lambda: ql.SampleStore.open(path / "many")),
            "open it and map the first sample, hashed": Contestant(read),
        },
        seconds,
        WALL,
    )
    goals = [Goal("<", 50.0), None]
    return [
        Row(GROUP, name, time * 1e3, "ms", goal=goal) for (name, time), goal in zip(times.items(), goals, strict=True)
    ]


def run(seconds: float, quick: bool) -> list[Row]:
    with folder() as path:
        return measure_appending(seconds * 0.9, path) + measure_opening(seconds * 0.1, path, 5 if quick else SAMPLES)
