"""Safetensors files: what other libraries read of them, and what is refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qlangevin import DamagedError
from qlangevin.storage.files import Digest
from qlangevin.storage.tensor_file import DTYPES, Spec, map_tensors, tensor_chunks
from tests.helpers.stores import write_hashed

TENSORS = {"b": torch.arange(6, dtype=torch.int8).view(2, 3), "a": torch.tensor(1.5), "c": torch.ones(0, 4)}


def specs(tensors: dict[str, Tensor] = TENSORS) -> dict[str, Spec]:
    return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def saved(folder: Path, tensors: dict[str, Tensor] = TENSORS) -> tuple[Path, Digest]:
    path = folder / "t.safetensors"
    return path, write_hashed(path, tensor_chunks(tensors))


def forged(folder: Path, header: Any, data: bytes = b"") -> tuple[Path, Digest]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return folder / "f", write_hashed(folder / "f", [struct.pack("<Q", len(text)) + text + data])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_safetensors_library_reads_what_is_written(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "x": torch.arange(6).view(2, 3).to(dtype),
        "odd": torch.ones(3, dtype=torch.bool),
        "é": torch.tensor(2.0),
    }
    found = load_file(saved(tmp_path, tensors)[0])
    assert found.keys() == tensors.keys()
    for name, t in tensors.items():
        assert found[name].dtype == t.dtype
        assert found[name].tolist() == t.tolist()


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    tensors = {f"{i}": torch.ones(3).to(dtype) for i, dtype in enumerate(reversed(DTYPES))}
    path, digest = saved(tmp_path, tensors)
    for t in map_tensors(path, specs(tensors), digest, "it").values():
        assert t.data_ptr() % t.element_size() == 0


def test_mapped_tensors_can_be_written_to_and_the_file_does_not_change(tmp_path: Path) -> None:
    path, digest = saved(tmp_path)
    before = path.read_bytes()
    map_tensors(path, specs(), digest, "it")["b"].fill_(7)
    assert path.read_bytes() == before
    assert torch.equal(map_tensors(path, specs(), digest, "it")["b"], TENSORS["b"])


def test_large_files_are_written_whole(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(3_000_000, dtype=torch.int32), "y": torch.ones(5)}
    path, digest = saved(tmp_path, tensors)
    assert digest.size == path.stat().st_size
    assert torch.equal(map_tensors(path, specs(tensors), digest, "it")["x"], tensors["x"])
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(DamagedError, match="SHA-256 differs"):
        map_tensors(path, specs(tensors), digest, "it")


def about(dtype: str = "I8", shape: Any = (2,), offsets: Any = (0, 2)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: dict[str, Any] = {
    "another dtype": {"x": about("U8")}, "another shape": {"x": about(shape=(1, 2))}, "no tensor": {},
    "one more": {"x": about(), "y": about(shape=(0,), offsets=(2, 2))}, "another name": {"../x": about()},
    "beyond the end": {"x": about(offsets=(0, 2**40))}, "before the start": {"x": about(offsets=(-1, 1))},
    "overlapping": {"x": about(), "y": about()}, "backwards": {"x": about(offsets=(2, 0))},
    "too large": {"x": about(shape=(2**62, 2**62))}, "a fraction": {"x": about(shape=(1.5,))},
    "unknown dtype": {"x": about("X9")}, "a list": [], "metadata": {"__metadata__": {"a": 1}, "x": about()},
    "no JSON": b"{", "nested": b'{"x":' + b"[" * 50_000, "long": {"__metadata__": {"a": "b" * 100_000}, "x": about()},
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie_are_refused_though_the_checksum_fits(name: str, tmp_path: Path) -> None:
    path, digest = forged(tmp_path, HEADERS[name], b"ab")
    with pytest.raises(DamagedError, match="the sample is damaged"):
        map_tensors(path, {"x": (torch.int8, (2,))}, digest, "the sample")


@pytest.mark.parametrize("length", [0, 10**6, 2**31, 2**63, 2**64 - 1])
def test_impossible_lengths_of_the_header_are_refused(length: int, tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    digest = write_hashed(path, [struct.pack("<Q", length) + path.read_bytes()[8:]])
    with pytest.raises(DamagedError, match=f"its header is said to have {length} bytes"):
        map_tensors(path, specs(), digest, "it")


def test_a_file_shorter_than_the_length_of_its_header_is_refused(tmp_path: Path) -> None:
    digest = write_hashed(tmp_path / "x", [b"abc"])
    with pytest.raises(DamagedError, match="it is damaged"):
        map_tensors(tmp_path / "x", specs(), digest, "it")


def test_a_file_larger_than_its_tensors_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path, digest = saved(tmp_path)
    os.truncate(path, 1 << 31)  # a file with holes: one of a terabyte takes no room, but many minutes to hash
    with pytest.raises(DamagedError, match="bytes") as caught:
        map_tensors(path, specs(), Digest(1 << 31, digest.sha256), "it")
    assert "SHA-256" not in str(caught.value)
