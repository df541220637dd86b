"""Checkpoints that are damaged, or forged with correct checksums, are refused, and nothing has changed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qlangevin as ql
from benchmarks.kills import content
from qlangevin.storage import checkpoint, files
from qlangevin.storage.files import DamagedError
from qlangevin.storage.tensor_file import tensor_chunks
from tests.helpers.checkpoint_runs import Run, make


def assert_refused(
    path: Path, data: bytes | None = None, run: Run | None = None, error: type[ValueError] = DamagedError
) -> None:
    """Assert that a checkpoint, written with ``data`` if given, is refused, and leaves the run as it was."""
    if data is not None:
        path.write_bytes(data)
    run = run or make()
    before = run.state()
    with pytest.raises(error):
        run.load(path)
    assert run.state() == before


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small checkpoint."""
    path = tmp_path_factory.mktemp("intact") / "checkpoint.safetensors"
    run = make("packed")
    run.train(2)
    run.save(path, best=torch.ones(2))
    return path.read_bytes()


@pytest.mark.slow
def test_a_byte_that_has_changed_is_found(intact: bytes, tmp_path: Path) -> None:
    rng, run = random.Random(0), make("packed")
    header = 8 + struct.unpack("<Q", intact[:8])[0]
    offsets = [*range(8), *rng.sample(range(8, header), 300), *rng.sample(range(header, len(intact)), 200)]
    for offset in offsets:
        changed = bytearray(intact)
        changed[offset] ^= 1 << rng.randrange(8)
        assert_refused(tmp_path / "it.safetensors", bytes(changed), run)


@pytest.mark.slow
def test_a_changed_bit_of_any_name_or_shape_is_found(intact: bytes, tmp_path: Path) -> None:
    length = struct.unpack("<Q", intact[:8])[0]
    begin = intact.index(b'"sha256"')
    assert 8 < begin < 8 + length
    run = make("packed")
    for offset in range(begin, 8 + length):
        for bit in (offset % 8, (offset + 3) % 8):
            changed = bytearray(intact)
            changed[offset] ^= 1 << bit
            assert_refused(tmp_path / "it.safetensors", bytes(changed), run)


@pytest.mark.parametrize(("old", "new"), [(b'"F32"', b'"I32"'), (b'"I8"', b'"U8"'), (b'"I64"', b'"F64"')])
def test_another_dtype_in_the_header_is_found(intact: bytes, old: bytes, new: bytes, tmp_path: Path) -> None:
    offsets = [i for i in range(len(intact)) if intact.startswith(old, i)]
    assert offsets
    for i in offsets:
        assert_refused(tmp_path / "it.safetensors", intact[:i] + new + intact[i + len(old) :], make("packed"))


def test_a_file_cut_short_or_too_long_is_found(intact: bytes, tmp_path: Path) -> None:
    rng, run = random.Random(1), make("packed")
    for length in [*range(12), *rng.sample(range(len(intact)), 200), len(intact) - 1]:
        assert_refused(tmp_path / "it.safetensors", intact[:length], run)
    assert_refused(tmp_path / "it.safetensors", intact + b"\0", run)
    assert_refused(tmp_path / "it.safetensors", intact + intact, run)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"\xff" * 100, b"{}", struct.pack("<Q", 2) + b"{}"])
def test_what_was_never_a_checkpoint_is_found(data: bytes, tmp_path: Path) -> None:
    assert_refused(tmp_path / "it.safetensors", data)


@pytest.mark.parametrize("length", [0, 1, 2**20, 10**8, 10**8 + 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_that_says_it_is_of_another_length_is_found(intact: bytes, length: int, tmp_path: Path) -> None:
    assert_refused(tmp_path / "it.safetensors", struct.pack("<Q", length) + intact[8:], make("packed"))


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DamagedError, match="not an ordinary file"):
        make().load(tmp_path / "pipe")


# ---- forgeries with correct checksums


def take_apart(data: bytes, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON and the tensors of a checkpoint."""
    (folder / "apart").write_bytes(data)
    about, tensors = checkpoint._read_file(folder / "apart", "it")
    return about, {name: t.clone() for name, t in tensors.items()}


@pytest.fixture(scope="module")
def apart(intact: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return take_apart(intact, tmp_path_factory.mktemp("apart"))


def forge(path: Path, about: Any, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint of this JSON (text, or what becomes text) and these tensors, with its checksum."""
    text = about if isinstance(about, str) else json.dumps(about)
    checksum = files.sha256(*tensor_chunks(tensors, {"qlangevin": text}))
    files.write(path, tensor_chunks(tensors, {"qlangevin": text, "sha256": checksum}))
    return path


def test_a_forgery_that_changes_nothing_is_loaded(apart: Any, intact: bytes, tmp_path: Path) -> None:
    make("packed").load(forge(tmp_path / "it.safetensors", *apart))
    compact = json.dumps(apart[0], separators=(",", ":"))
    assert forge(tmp_path / "it.safetensors", compact, apart[1]).read_bytes() == intact


KEYS = ["checkpoint", "tensors", "layers", "lowered", "states", "random", "counters"]
WRONG: list[Any] = [None, [], {}, "x", -1, 0.5, [[1]], {"tuple": []}, {"dict": []}, {"dict": [[1, 2]]}, {"x": -1}]


@pytest.mark.parametrize("key", [*KEYS, "store"])
def test_an_entry_that_is_missing_is_found(key: str, apart: Any, tmp_path: Path) -> None:
    about, tensors = apart
    assert_refused(
        forge(tmp_path / "it.safetensors", {k: v for k, v in about.items() if k != key}, tensors), run=make("packed")
    )


@pytest.mark.parametrize("key", KEYS)
def test_an_entry_of_another_kind_is_found(key: str, apart: Any, tmp_path: Path) -> None:
    about, tensors = apart
    run = make("packed")
    for wrong in WRONG:
        if (key, wrong) not in [("layers", {}), ("lowered", {}), ("counters", {"dict": []})]:  # which can be
            # Some say something that could be true of another model.
            error = ValueError if key in ("tensors", "layers", "lowered", "states") else DamagedError
            assert_refused(forge(tmp_path / "it.safetensors", about | {key: wrong}, tensors), run=run, error=error)


@pytest.mark.parametrize("samples", ["2", -1, 0.5, []])
def test_a_number_of_samples_that_is_none_is_found(samples: Any, apart: Any, tmp_path: Path) -> None:
    run, (about, tensors) = make("packed"), apart
    forge(tmp_path / "it.safetensors", about | {"store": {"samples": samples}}, tensors)
    with ql.SampleStore.create(tmp_path / "store", run.model) as store:
        for _ in range(3):
            store.append(run.model)
        before = run.state(), content(store.path)
        with pytest.raises(DamagedError):
            run.load(tmp_path / "it.safetensors", store)
        assert (run.state(), content(store.path)) == before


@pytest.mark.parametrize("count", ["x", None, -1, 2**64])
def test_a_count_of_a_layer_that_is_none_is_found(count: Any, tmp_path: Path) -> None:
    make("lowered").save(tmp_path / "it.safetensors")
    about, tensors = take_apart((tmp_path / "it.safetensors").read_bytes(), tmp_path)
    about["layers"]["2"] = count
    assert_refused(forge(tmp_path / "it.safetensors", about, tensors), run=make("lowered"))


@pytest.mark.parametrize("version", [2, 0, None, "1", [1]])
def test_another_version_is_found(version: Any, apart: Any, tmp_path: Path) -> None:
    about, tensors = apart
    with pytest.raises(DamagedError, match="reads version 1"):
        make("packed").load(forge(tmp_path / "it.safetensors", about | {"checkpoint": version}, tensors))


@pytest.mark.parametrize("brackets", ["[]", '{"tuple":[]}', '{"dict":[[1,]]}'])
def test_nesting_is_loaded_up_to_a_depth_and_found_beyond(brackets: str, apart: Any, tmp_path: Path) -> None:
    about, tensors = apart
    middle = len(brackets) - brackets.count("]") - brackets.count("}")
    run, loaded = make("packed"), []
    for depth in (50, 100, 200, 300, 400, 550, 700, 950, 5000, 100_000):
        nested = brackets[:middle] * depth + "1" + brackets[middle:] * depth
        text = json.dumps(about | {"counters": "HERE"}).replace('"HERE"', '{"dict":[["a",' + nested + "]]}")
        path, before = forge(tmp_path / "it.safetensors", text, tensors), run.state()
        try:
            loaded.append(list(run.load(path)) == ["a"])
        except DamagedError:
            loaded.append(False)
            assert run.state() == before
    assert loaded[0]
    assert not loaded[-1]
    assert loaded == sorted(loaded, reverse=True)  # there is one depth, which depends on the interpreter


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"a":1,"a":1}', "NaN", "\x00", '{"checkpoint":1}'])
def test_what_is_not_the_json_of_a_checkpoint_is_found(text: str, apart: Any, tmp_path: Path) -> None:
    assert_refused(forge(tmp_path / "it.safetensors", text, apart[1]))


@pytest.mark.parametrize(
    "metadata", [None, {}, {"qlangevin": "{}"}, {"sha256": hashlib.sha256().hexdigest()}, {"format": "pt"}]
)
def test_a_safetensors_file_of_another_program_is_found(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    assert_refused(
        tmp_path / "it.safetensors", b"".join(map(bytes, tensor_chunks({"weight": torch.ones(2)}, metadata)))
    )


CODES, EXPONENTS = "model.0.weight.codes", "model.0.weight.exponents"


def other_tensors(name: str, *shape: int) -> dict[str, tuple[str, Tensor | None]]:
    """Tensors that cannot stand for the int8 tensor of this name and shape: none, and one more or less of everything."""
    count = torch.Size(shape).numel()
    zeros = {"few": torch.zeros(1), "empty": torch.zeros(0), "many": torch.zeros(100 * shape[0], *shape[1:])}
    zeros |= {"turned": torch.zeros(*reversed(shape), 1), "flat": torch.zeros(count, 1)}
    kinds: dict[str, Tensor | None] = {kind: t.to(torch.int8) for kind, t in zeros.items()}
    kinds |= {str(dtype): torch.zeros(shape, dtype=dtype) for dtype in (torch.int16, torch.int64, torch.float32)}
    return {f"{name} {kind}": (name, t) for kind, t in ({"missing": None} | kinds).items()}


CHANGES = other_tensors(CODES, 5, 4) | other_tensors(EXPONENTS, 5)
CHANGES |= {"a code that is none": (CODES, torch.full((5, 4), -128, dtype=torch.int8))}


@pytest.mark.parametrize("kind", ["packed", "plain"])
@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_are_not_what_is_described_are_found(change: str, kind: str, apart: Any, tmp_path: Path) -> None:
    about, tensors = apart
    name, t = CHANGES[change]
    changed = {n: old for n, old in tensors.items() if n != name} | ({} if t is None else {name: t})
    assert_refused(forge(tmp_path / "it.safetensors", about, changed), run=make(kind))


@pytest.mark.parametrize(
    "weight", [torch.ones(5), torch.ones(1), torch.ones(4, 5), torch.ones(5, 4).int(), torch.ones(5, 4).double()]
)
def test_parameters_that_are_not_what_is_described_are_found(weight: Tensor, tmp_path: Path) -> None:
    make().save(tmp_path / "it.safetensors")
    about, tensors = take_apart((tmp_path / "it.safetensors").read_bytes(), tmp_path)
    assert_refused(forge(tmp_path / "it.safetensors", about, tensors | {"model.0.weight": weight}))
