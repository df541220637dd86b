"""Small stores of samples, the same each time, and models to fill them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qlangevin import Key, QTensor, Sample, SampleStore, pack
from qlangevin.quantization import random
from qlangevin.storage import files
from qlangevin.storage.folders import Folder

FULL = OSError(errno.ENOSPC, "No space left on device")


def build(width: int = 3, frozen: bool = True) -> nn.Sequential:
    """Build a model with packed, plain and frozen parameters, and buffers."""
    model = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 2), nn.Linear(2, 2))
    draw(model, 0)
    model[3].requires_grad_(not frozen)
    return pack(model, "bfp8", layers="0", rounding="nearest")


@torch.no_grad()
def draw(model: nn.Module, seed: int) -> nn.Module:
    """Draw other weights for a model, from a seed."""
    for i, p in enumerate(model.parameters()):
        if p.requires_grad:
            p.copy_(random.normal(Key(seed).fold(i), p.numel()).view(p.shape))
    return model


def fill_store(path: Path, count: int = 3) -> SampleStore:
    """Write a store of the samples with seeds 0, 1, ...; return it open for reading."""
    model = build()
    with SampleStore.create(path, model) as writer:
        for i in range(count):
            writer.append(draw(model, i), step=i)
    return SampleStore.open(path)


def write_hashed(path: Path, chunks: Sequence[files.Bytes]) -> files.Digest:
    """Write a file atomically, as stores do; return its size and SHA-256."""
    with Folder.open(path.parent) as folder:
        return files.write_hashed(folder, path.name, chunks)


def read_files(path: Path) -> dict[str, bytes]:
    """Return the content of all files of a folder but the lock."""
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.name != ".lock"
    }


@cache
def _expected(seed: int) -> dict[str, Tensor]:
    tensors: dict[str, Any] = draw(build(), seed).state_dict()
    return {name: t.decode() if isinstance(t, QTensor) else t for name, t in tensors.items()}


def is_sample(sample: Sample, seed: int) -> bool:
    """Return True if a sample holds the weights that `draw` makes of this seed."""
    found, expected = sample.decode(), _expected(seed)
    return found.keys() == expected.keys() and all(torch.equal(t, expected[name]) for name, t in found.items())
