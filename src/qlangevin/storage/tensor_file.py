"""Safetensors files: written from the memory of the tensors, mapped into memory when read.

The safetensors library reads. Writing (a header, then the memory of the tensors) is done here: without a copy, and in an order
and with permissions that do not depend on the version of the library.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .files import Bytes, DamagedError, Digest, map_file, sha256

__all__ = ["DTYPES", "Spec", "check_header_length", "check_specs", "map_tensors", "report_damage", "tensor_chunks"]

HEADER_LIMIT = 100_000_000  # bytes; set by the format

Spec: TypeAlias = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a stored tensor

# Names of dtypes in safetensors, in the order in which tensors are stored: the widest first, so that all are aligned.
DTYPES: dict[torch.dtype, str] = {
    torch.complex64: "C64", torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
MISSING_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def tensor_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[Bytes]:
    """Return the chunks of memory that make up a safetensors file of contiguous tensors on the CPU."""
    specs = tuple((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    header, names = _make_header(specs, tuple((metadata or {}).items()))
    return [header, *(_view_memory(tensors[name]) for name in names)]


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


def _view_memory(t: Tensor) -> memoryview:
    if t.numel() == 0:
        return memoryview(b"")
    array: Any = (t.reshape(-1).view(torch.uint8) if t.dtype in MISSING_IN_NUMPY else t).numpy()
    return memoryview(array).cast("B")


def check_header_length(mapped: mmap.mmap, what: str, limit: int = HEADER_LIMIT) -> int:
    """Return the length of the header that a safetensors file declares; raise DamagedError if it cannot be right."""
    length = struct.unpack("<Q", mapped[:8])[0] if len(mapped) >= 8 else len(mapped)
    if not 0 < length <= min(limit, len(mapped) - 8):
        raise DamagedError(f"{what} is damaged: its header is said to have {length} bytes")
    return int(length)


def map_tensors(
    path: Path, specs: Mapping[str, Spec], digest: Digest, what: str, check_hash: bool = True
) -> dict[str, Tensor]:
    """Map the tensors of a file into memory: they are read when first used, and writing to them does not change the file.

    The file must hold the tensors of ``specs``, with their dtypes and shapes, and no other.
    """
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs.values())
    with map_file(path, what, digest.size) as mapped:
        header = check_header_length(mapped, what, 4096 + sum(400 + 12 * len(name) for name in specs))
        if 8 + header + size != digest.size:
            raise DamagedError(f"{what} is damaged: {path} has {digest.size} bytes, its tensors would have {size}")
        if check_hash and sha256(mapped) != digest.sha256:
            raise DamagedError(f"{what} is damaged: the content of {path} is not what was written (SHA-256 differs)")
    with report_damage(what), safe_open(path, framework="pt") as file:
        found = {}
        for name in file.keys():  # noqa: SIM118 - the file has keys, but is no mapping
            part = file.get_slice(name)
            found[name] = (part.get_dtype(), tuple(part.get_shape()))
        check_specs(found, {name: (DTYPES[dtype], shape) for name, (dtype, shape) in specs.items()}, what)
        return {name: file.get_tensor(name) for name in specs}


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
