"""Small data sets in the official forms."""

import gzip
import io
import os
import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

PIXELS = np.random.default_rng(0).integers(0, 256, (50, 3, 32, 32), dtype=np.uint8)

real = pytest.mark.skipif("QLANGEVIN_DATA" not in os.environ, reason="$QLANGEVIN_DATA names no folder with real data")


def pixels(*which: int) -> Tensor:
    """Pictures out of `PIXELS`."""
    return torch.from_numpy(PIXELS[list(which)])


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in MNIST's form."""
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def mnist(folder: Path, train: int = 12, test: int = 5, packed: bool = True) -> dict[str, bytes]:
    """Writes the four files; returns what is in them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for part, count in (("train", train), ("t10k", test)):
        files[f"{part}-images-idx3-ubyte"] = idx(PIXELS[:count, 0, :28, :28])
        files[f"{part}-labels-idx1-ubyte"] = idx(np.arange(count) % 10)
    for name, data in files.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)
    return files


def cifar_records(count: int, first: int = 0, fine: bool = False) -> bytes:
    """Records in CIFAR's binary form; the labels are the first numbers, coarse ones are 19."""
    label = b"\x13" if fine else b""
    return b"".join(label + bytes([(first + i) % 10]) + PIXELS[first + i].tobytes() for i in range(count))


def cifar10(folder: Path, batches: Sequence[int] = (1, 2, 3, 4, 5), count: int = 4) -> None:
    """Batches of so many pictures, numbered through, and as many to test with."""
    files = {f"data_batch_{i}.bin": cifar_records(count, (i - 1) * count) for i in batches}
    write(folder, files | {"test_batch.bin": cifar_records(count, 5 * count), "batches.meta.txt": b"airplane\n"})


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def archive(path: Path, files: Mapping[str, bytes]) -> None:
    """A tar archive, packed with gzip."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


REVIEWS = {
    "train/pos/0_9.txt": "Good, GOOD film!<br /><br />I loved it.",
    "train/pos/2_10.txt": "A film I love",
    "train/pos/10_7.txt": "good",
    "train/neg/0_1.txt": "It's bad: a bad film.",
    "train/neg/1_4.txt": "Bad",
    "train/unsup/0_0.txt": "never never never",
    "test/pos/0_8.txt": "good wine",
    "test/neg/0_2.txt": "bad wine, bad film",
}


def photo(path: Path, size: tuple[int, int] = (40, 30), mode: str = "RGB", colour: int = 128) -> None:
    """A JPEG file that is brighter at the right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ramp = np.linspace(0, colour, size[0])[None].repeat(size[1], 0).astype(np.uint8)
    Image.fromarray(ramp).convert(mode).save(path, "JPEG", quality=95)


def imagenet(folder: Path, classes: Sequence[str] = ("n01", "n02", "n03"), train: int = 3, test: int = 2) -> None:
    for part, count in (("train", train), ("val", test)):
        for k, name in enumerate(classes):
            for i in range(count):
                photo(folder / part / name / f"{name}_{i}.JPEG", (40 + 7 * i, 30 + 5 * k), colour=60 * (k + 1))
