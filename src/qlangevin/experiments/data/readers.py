"""Read images from the official files; each reader validates its file and names it in its errors."""

from __future__ import annotations

import gzip
import math
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._progress import progress_bar

__all__ = ["interleave", "read_archive", "read_idx", "read_members", "read_pair", "read_records"]

AGAIN = "remove it and get it again"


def read_pair(images: Path, labels: Path, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Read images of 28x28 pixels and their labels from two idx files."""
    pixels, numbers = read_idx(images, (28, 28)), read_idx(labels, ())
    if len(pixels) != len(numbers):
        raise ValueError(f"{images} has {len(pixels)} images, but {labels} has {len(numbers)} labels; get both again")
    check_labels(numbers, classes, str(labels))
    return pixels.unsqueeze(1), numbers.long()


def read_idx(path: Path, shape: Sequence[int]) -> Tensor:
    """Read the bytes of an idx file, compressed or not: (n, *shape).

    Its header consists of 32-bit words: a magic number with data type and number of dimensions, then the dimensions.
    """
    with explain_damage(path):
        data = bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    magic, header = 0x800 + 1 + len(shape), 4 * (2 + len(shape))
    if len(data) < header:
        raise ValueError(f"{path} is damaged: it has {len(data)} bytes, its header alone would have {header}; {AGAIN}")
    found, count, *rest = struct.unpack(f">{2 + len(shape)}I", data[:header])
    if found != magic:
        raise ValueError(f"{path} is another kind of file: its magic number is {found}, not {magic}; {AGAIN}")
    if rest != list(shape):
        raise ValueError(f"{path} is another kind of file: its images have size {rest}, not {list(shape)}; {AGAIN}")
    expected = header + count * math.prod(shape)
    if len(data) != expected or count == 0:
        raise ValueError(f"{path} is damaged: it has {len(data)} bytes, {count} entries would take {expected}; {AGAIN}")
    return torch.frombuffer(data, dtype=torch.uint8, offset=header).view(count, *shape)


def read_records(data: bytes, where: str, classes: int, labels: int) -> tuple[Tensor, Tensor]:
    """Read CIFAR's binary form: records of one or two bytes, the last of them the label, and an image of 3 x 32 x 32 bytes."""
    size = labels + 3 * 32 * 32
    if len(data) % size or not data:
        raise ValueError(f"{where} is damaged: it has {len(data)} bytes, not a multiple of {size}; {AGAIN}")
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, size)
    check_labels(records[:, labels - 1], classes, where)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1].long()


def check_labels(labels: Tensor, classes: int, where: str) -> None:
    """Raise ValueError if a label is not below the number of classes."""
    most = int(labels.max())
    if most >= classes:
        entry = int(labels.argmax())
        raise ValueError(f"{where} is damaged: entry {entry} has label {most}, the last is {classes - 1}; {AGAIN}")


def read_members(path: Path, wanted: Sequence[str], progress: bool = True) -> Iterator[tuple[str, str, bytes]]:
    """Yield (name, location, content) of the wanted files that exist: beside ``path``, or inside it if it is an archive."""
    if path.suffix == ".gz":
        for name, content in read_archive(path, lambda name: Path(name).name in wanted, progress):
            yield Path(name).name, f"{name} in {path}", content
    else:
        for file in (path.with_name(name) for name in wanted):
            if file.exists():
                yield file.name, str(file), file.read_bytes()


def read_archive(path: Path, wanted: Callable[[str], Any], progress: bool = True) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the wanted files of an archive."""
    label = f"reading {path.name}"
    with (
        explain_damage(path),
        open(path, "rb") as packed,
        progress_bar(path.stat().st_size, label, progress) as advance,
        gzip.open(packed) as unpacked,
        tarfile.open(fileobj=unpacked, mode="r|") as tar,
    ):
        done = 0
        for member in tar:
            if member.isfile() and wanted(member.name) and (file := tar.extractfile(member)) is not None:
                yield member.name, file.read()
            advance(label, packed.tell() - done)
            done = packed.tell()
        while unpacked.read(1 << 20):  # read to the end, where the checksum is
            pass


@contextmanager
def explain_damage(path: Path) -> Iterator[None]:
    """Turn errors of decompression into a ValueError that names the file."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
        raise ValueError(f"{path} is damaged: it cannot be unpacked ({error}); {AGAIN}") from None


def interleave(labels: Tensor) -> Tensor:
    """Return an order of examples in which classes alternate, so that the first n are as balanced as possible."""
    grouped, counts = labels.argsort(stable=True), torch.bincount(labels)
    turns = torch.empty_like(labels)
    turns[grouped] = torch.arange(len(labels), device="cpu") - (counts.cumsum(0) - counts)[labels[grouped]]
    return (turns * len(counts) + labels).argsort()
