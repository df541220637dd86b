"""Files that are whole or not there, and that hold what was written: the ground under samples and checkpoints.

A file is written beside its place, synced, and renamed into it. Tensors are kept as safetensors, everything else as JSON:
nothing that is read is ever executed. What is read is compared with the size and the SHA-256 that were noted when it was
written, so that a lost sector is an error and not a sample.

The safetensors library reads; the writing, a header and the tensors' memory, is done here: straight from the tensors, hashed
while the disk is busy, in an order and with permissions that do not depend on the library's version.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import stat
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .hashing import PIECE, Bytes, Hashing, cut, sha256

__all__ = ["DamagedError", "Digest", "Spec", "map_tensors", "parse_json", "read", "tensor_parts", "write"]

HEADER_LIMIT = 100_000_000  # bytes; the format's own
JSON_LIMIT = 64_000_000
AT_ONCE = 512  # parts that the system takes in one call

Spec: TypeAlias = tuple[torch.dtype, tuple[int, ...]]  # of a stored tensor

# What safetensors calls them, and in which order they are stored: the wide ones first, so that all of them are aligned.
DTYPES: dict[torch.dtype, str] = {
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
NOT_NUMPYS = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class DamagedError(ValueError):
    """A file that is not what was written: cut short, changed, or never one of ours."""


class Digest(NamedTuple):
    """What a file is known by."""

    size: int
    sha256: str


def write(path: Path, parts: Sequence[Bytes]) -> Digest:
    """Put a file in its place, all of it or nothing; when this returns it is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a process that had the same number and was killed
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        with open(descriptor, "wb", buffering=0) as file:
            digest = _write_and_hash(file, parts)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    return digest


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove temporary files of that name whose writers are gone."""
    for file in folder.glob(f".{name}.*.tmp"):
        match = re.fullmatch(r"\..*\.(\d+)-(\d+)\.tmp", file.name)
        if match and not _alive(int(match[1]), int(match[2])):
            file.unlink(missing_ok=True)


def _alive(process: int, thread: int) -> bool:
    if process == os.getpid():  # perhaps of an earlier process with this number, as there are in containers
        return thread in sys._current_frames()
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _write_and_hash(file: Any, parts: Sequence[Bytes]) -> Digest:
    descriptor, size, hashing = file.fileno(), sum(map(len, parts)), Hashing(parts)
    hashing.help()
    if size > PIECE and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)  # a disk that is full says so now; and the rest is faster
    for piece in cut(parts):
        _write_all(descriptor, piece)
    hashing.help()  # copying has kept a processor busy; waiting for the disk will not
    os.fsync(descriptor)
    return Digest(size, hashing.result())


def _write_all(descriptor: int, parts: Sequence[Bytes]) -> None:
    """Several parts in one call, and the disk begins with them while the next are copied."""
    left = [memoryview(part) for part in parts if len(part)]
    while left:
        written = os.writev(descriptor, left[:AT_ONCE]) if hasattr(os, "writev") else os.write(descriptor, left[0])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(
            descriptor, 0, 0, os.POSIX_FADV_DONTNEED
        )  # of all that is not on the disk yet, Linux makes a start


def sync_folder(folder: Path) -> None:
    """Have the disk know of renamed files; systems without folders that can be opened do so by themselves."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def tensor_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[Bytes]:
    """A safetensors file of contiguous tensors on the CPU, as the pieces of memory it consists of."""
    specs = tuple((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    header, names = _header(specs, tuple((metadata or {}).items()))
    return [header, *(_memory(tensors[name]) for name in names)]


@lru_cache(maxsize=8)  # all samples of a store have the same
def _header(specs: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...], metadata: Any) -> tuple[bytes, list[str]]:
    """The first bytes of a file, and the names of the tensors in the order in which they follow."""
    ranks = {dtype: i for i, dtype in enumerate(DTYPES)}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in sorted(specs, key=lambda spec: (ranks[spec[1]], spec[0])):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [name for name in header if name != "__metadata__"]


def _memory(t: Tensor) -> memoryview:
    if t.numel() == 0:
        return memoryview(b"")
    array: Any = (t.reshape(-1).view(torch.uint8) if t.dtype in NOT_NUMPYS else t).numpy()
    return memoryview(array).cast("B")


@contextmanager
def opened(path: Path, what: str, size: int | None = None) -> Iterator[mmap.mmap]:
    """A file mapped into memory, if it is an ordinary one and, where that is known, as long as it was written."""
    try:
        # Not to wait for somebody who writes into a pipe: what is wanted is a file.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise DamagedError(f"{what} is missing: there is no {path}") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise DamagedError(f"{what} is damaged: {path} is not an ordinary file")
        if about.st_size == 0 or (size is not None and about.st_size != size):
            expected = f", {size} were written" if size is not None else ""
            raise DamagedError(f"{what} is damaged: {path} has {about.st_size} bytes{expected}")
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
            yield mapped
    finally:
        os.close(descriptor)


def read(path: Path, what: str, limit: int = JSON_LIMIT) -> bytes:
    """All of a file that is not meant to be large."""
    with opened(path, what) as mapped:
        if len(mapped) > limit:
            raise DamagedError(f"{what} is damaged: {path} has {len(mapped)} bytes, more than any that was written")
        return mapped[:]


def parse_json(text: bytes | str, what: str) -> Any:
    """JSON as the standard has it: no NaN, no endless nesting, no key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands there twice")
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a number of JSON")

    def finite(digits: str) -> float:
        return number if math.isfinite(number := float(digits)) else refuse(digits)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise DamagedError(f"{what} is damaged: it cannot be read as JSON ({error})") from None


def header_length(mapped: mmap.mmap, what: str, limit: int = HEADER_LIMIT) -> int:
    """How long a safetensors file's header says it is, if that can be."""
    length = struct.unpack("<Q", mapped[:8])[0] if len(mapped) >= 8 else len(mapped)
    if not 0 < length <= min(limit, len(mapped) - 8):
        raise DamagedError(f"{what} is damaged: its header is said to have {length} bytes")
    return int(length)


def map_tensors(
    path: Path, specs: Mapping[str, Spec], digest: Digest, what: str, check: bool = True
) -> dict[str, Tensor]:
    """Tensors of a file, mapped into memory: they take none until they are looked at, and writing to them changes no file.

    Every tensor must be there with its dtype and shape, and no other. Without ``check`` the content is not hashed again.
    """
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs.values())
    with opened(path, what, digest.size) as mapped:
        header = header_length(mapped, what, 4096 + sum(400 + 12 * len(name) for name in specs))
        if 8 + header + size != digest.size:
            raise DamagedError(f"{what} is damaged: {path} has {digest.size} bytes, its tensors would have {size}")
        if check and not _has(mapped, digest.sha256):
            raise DamagedError(f"{what} is damaged: the content of {path} is not what was written (SHA-256 differs)")
    with library(what), safe_open(path, framework="pt") as file:
        found = {}  # the file is no mapping, though it has keys
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            found[name] = (part.get_dtype(), tuple(part.get_shape()))
        check_same(found, {name: (DTYPES[dtype], shape) for name, (dtype, shape) in specs.items()}, what)
        return {name: file.get_tensor(name) for name in specs}


def _has(mapped: mmap.mmap, digest: str) -> bool:
    with memoryview(mapped) as everything:
        return sha256(everything) == digest


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Refuse tensors that are not those which were described."""
    if odd := sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)):
        raise DamagedError(f"{what} is damaged: it does not hold the tensors that it should, see {odd[:3]}")


@contextmanager
def library(what: str) -> Iterator[None]:
    """What the safetensors library finds wrong, in our words."""
    try:
        yield
    except (SafetensorError, OverflowError, RuntimeError) as error:
        raise DamagedError(f"{what} is damaged: it is not a safetensors file ({error})") from None
