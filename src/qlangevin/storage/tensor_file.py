"""Safetensors files: written from the memory of the tensors, mapped into memory when read.

A file is the length of a header (8 bytes), the header (JSON: dtype, shape and place of each tensor), and the memory of the
tensors without gaps. Written here, a file depends on no version of a library. Read here, all of that is checked against the
size of the file before anything is mapped, and the file that was checked is the one that is mapped, whatever its path now names.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor

from .files import Bytes, DamagedError, Digest, OpenFile, check_size, map_file, open_file, parse_json, read_from, sha256
from .folders import Folder

__all__ = [
    "DTYPES",
    "Spec",
    "check_specs",
    "map_tensors",
    "read_tensors",
    "report_damage",
    "tensor_chunks",
    "view_memory",
]

HEADER_LIMIT = 64_000_000  # bytes; the format allows 100 MB

Spec: TypeAlias = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a stored tensor

# Names of dtypes in safetensors, in the order in which tensors are stored: the widest first, so that all are aligned.
DTYPES: dict[torch.dtype, str] = {
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
MISSING_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def tensor_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[Bytes]:
    """Return the chunks of memory that make up a safetensors file of contiguous tensors on the CPU."""
    specs = tuple((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    header, names = _make_header(specs, tuple((metadata or {}).items()))
    return [header, *(view_memory(tensors[name]) for name in names)]


@lru_cache(maxsize=8)  # all samples of a store have the same
def _make_header(specs: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...], metadata: Any) -> tuple[bytes, list[str]]:
    """Return the header of a file, and the names of the tensors in the order in which they follow it."""
    ranks = {dtype: i for i, dtype in enumerate(DTYPES)}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in sorted(specs, key=lambda spec: (ranks[spec[1]], spec[0])):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [name for name in header if name != "__metadata__"]


def view_memory(t: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    if t.numel() == 0:
        return memoryview(b"")
    array: Any = (t.reshape(-1).view(torch.uint8) if t.dtype in MISSING_IN_NUMPY else t).numpy()
    return memoryview(array).cast("B")


class Place(NamedTuple):
    """Dtype and shape of a tensor, and where its memory is, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """Checked header of a file: its length with the 8 bytes before it, metadata, and the place of each tensor."""

    length: int
    metadata: Mapping[str, str]
    places: Mapping[str, Place]


def map_tensors(
    path: Path,
    specs: Mapping[str, Spec],
    digest: Digest,
    what: str,
    check_hash: bool = True,
    folder: Folder | None = None,
) -> dict[str, Tensor]:
    """Map the tensors of a file into memory: they are read when first used, and writing to them does not change the file.

    The file must hold the tensors of ``specs``, with their dtypes and shapes, and no other. ``folder``: see `files.open_file`.
    """
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs.values())
    with open_file(path, what, folder) as file:
        check_size(file, what, digest.size)
        length = _read_header_length(file, what, 4096 + sum(400 + 12 * len(name) for name in specs))
        if 8 + length + size != digest.size:
            raise DamagedError(f"{what} is damaged: {path} has {digest.size} bytes, its tensors would have {size}")
        if check_hash:
            with map_file(file, what) as mapped:
                if sha256(mapped) != digest.sha256:
                    raise DamagedError(
                        f"{what} is damaged: the content of {path} is not what was written (SHA-256 differs)"
                    )
        header = _parse_sample_header(read_from(file, what, 8, length), file.size, what)
        check_specs({name: (place.dtype, place.shape) for name, place in header.places.items()}, specs, what)
        tensors = _map_places(file, header, what)
    return {name: tensors[name] for name in specs}


def read_tensors(path: Path, what: str, folder: Folder | None = None) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors, mapped, of a file that says itself what it holds."""
    with open_file(path, what, folder) as file:
        check_size(file, what)
        length = _read_header_length(file, what, HEADER_LIMIT)
        header = _parse_header(read_from(file, what, 8, length), file.size, what)
        return header.metadata, _map_places(file, header, what)


def _read_header_length(file: OpenFile, what: str, limit: int) -> int:
    """Return the length of the header that a file declares; raise DamagedError if it cannot be right."""
    length = struct.unpack("<Q", read_from(file, what, 0, 8))[0] if file.size >= 8 else file.size
    if not 0 < length <= min(limit, file.size - 8):
        raise DamagedError(f"{what} is damaged: its header is said to have {length} bytes")
    return int(length)


def _parse_header(text: bytes, size: int, what: str) -> Header:
    """Return the header of a file of this size; raise DamagedError unless its tensors fill the file without gaps."""
    content = parse_json(text, f"the header of {what}")
    if not isinstance(content, dict):
        raise DamagedError(f"{what} is damaged: its header is not an object")
    metadata = content.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise DamagedError(f"{what} is damaged: the metadata of its header are not texts")
    places = {name: _parse_place(name, entry, what) for name, entry in content.items()}
    end, rest = 0, size - 8 - len(text)
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start != end:
            raise DamagedError(f"{what} is damaged: {name[:100]!r} does not begin where the tensor before it ends")
        end = place.end
    if end != rest:
        raise DamagedError(f"{what} is damaged: it has {rest} bytes of tensors, its header describes {end}")
    return Header(8 + len(text), metadata, places)


_parse_sample_header = lru_cache(maxsize=8)(_parse_header)  # all samples of a store have the same


def _parse_place(name: str, entry: Any, what: str) -> Place:
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
        if lists and all(type(n) is int and 0 <= n < 2**60 for n in (*shape, *offsets)) and isinstance(dtype, str):
            found = _BY_NAME.get(dtype)
            if found is not None and math.prod(shape) * found.itemsize == offsets[1] - offsets[0]:
                return Place(found, tuple(shape), *offsets)
    raise DamagedError(f"{what} is damaged: the header does not describe {name[:100]!r} as a tensor")


def _map_places(file: OpenFile, header: Header, what: str) -> dict[str, Tensor]:
    """Return the tensors of a file, mapped into memory."""
    storage = _map_storage(file, what)
    found = {}
    for name, (dtype, shape, start, end) in header.places.items():
        if start == end:
            found[name] = torch.empty(shape, dtype=dtype)
            continue
        part = storage[header.length + start : header.length + end]
        if (header.length + start) % dtype.itemsize:  # written by another program, which need not align
            part = part.clone()
        found[name] = torch.asarray(part, dtype=torch.uint8).view(dtype).reshape(shape)
    return found


def _map_storage(file: OpenFile, what: str) -> Any:
    """Map a file into memory, for reading and for writes that do not reach it.

    PyTorch opens a file by name, Python's mmap keeps a descriptor for each: so PyTorch gets the name of the descriptor.
    """
    folder = next((each for each in ("/proc/self/fd", "/dev/fd") if os.path.isdir(each)), None)
    name = str(file.path) if folder is None else f"{folder}/{file.descriptor}"
    for attempt in range(2):  # it does not repeat calls that a signal interrupts
        try:
            return torch.UntypedStorage.from_file(name, False, file.size)
        except RuntimeError as error:
            if attempt:
                number = re.search(r"\((\d+)\)\s*$", str(error).splitlines()[0])
                code = int(number[1]) if number else errno.ENOMEM
                reason = f"{os.strerror(code)}: {what} was not mapped into memory, {file.size} bytes"
                raise OSError(code, reason, str(file.path)) from None
    raise AssertionError("unreachable")


def check_specs(found: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Raise DamagedError unless the tensors found are those expected."""
    if odd := sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)):
        raise DamagedError(f"{what} is damaged: it does not hold the tensors that it should, see {odd[:3]}")


@contextmanager
def report_damage(what: str) -> Iterator[None]:
    """Turn errors of the safetensors library into DamagedError."""
    try:
        yield
    except (SafetensorError, OverflowError, RuntimeError) as error:
        raise DamagedError(f"{what} is damaged: it is not a safetensors file ({error})") from None
