"""Samples on disk: how large, how fast to write, how fast to open.

The rival of `append` is the least that can be done for the same safety: write as many bytes to a new file, and have the system
sync it. `append` also encodes weights that are not packed, hashes, renames, and does the same for the manifest.
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
    """A place on a disk: what /tmp is kept in may be memory, where a sync costs nothing."""
    with tempfile.TemporaryDirectory(prefix=".store-", dir=Path.cwd()) as name:
        yield Path(name)


def resnet(packed: bool) -> tuple[nn.Module, ql.SGLD]:
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


def appending(seconds: float, place: Path) -> list[Row]:
    contestants, sizes = {}, []
    for name, packed in (("packed", True), ("not packed, encoded on the way", False)):
        model, sampler = resnet(packed)
        store = ql.SampleStore.create(place / f"packed{packed}", model, sampler)
        sizes.append(store.append(model).nbytes)
        contestants[name] = Contestant(lambda s=store, m=model: s.append(m), before=lambda s=store: s.truncate(0))  # type: ignore[misc]
    plain, data = place / "plain", os.urandom(sizes[0])
    contestants["write"] = Contestant(
        lambda: write_new(plain, data), before=lambda: plain.unlink() if plain.exists() else None
    )
    best = measure(contestants, seconds, WALL)
    weights = sum(p.numel() for p in model.parameters())
    rows = [Row(GROUP, "a sample", sizes[0] / weights, "bytes a weight", goal=Goal("<=", 1.02))]
    rival, theirs = "write and sync as many bytes", best.pop("write") * 1e3
    goals = {"packed": Goal("<=", 1.5)}  # to encode is another thing than to write
    return rows + [
        Row(GROUP, f"append, {name}", time * 1e3, "ms", rival, theirs, "time", goals.get(name))
        for name, time in best.items()
    ]


def opening(seconds: float, place: Path, samples: int) -> list[Row]:
    model, sampler = resnet(packed=True)
    with ql.SampleStore.create(place / "many", model, sampler) as store:
        for step in range(samples):
            store.append(model, step)

    def read() -> None:
        ql.SampleStore.open(place / "many")[0]["classify.weight"]

    times = measure(
        {
            f"open a store of {samples}": Contestant(lambda: ql.SampleStore.open(place / "many")),
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
    with folder() as place:
        return appending(seconds * 0.9, place) + opening(seconds * 0.1, place, 5 if quick else SAMPLES)
