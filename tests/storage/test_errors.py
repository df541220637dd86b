"""Messages of the errors that users meet first: they name the path and say what to do."""

from __future__ import annotations

import errno
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import qlangevin as ql
from qlangevin import DamagedError, SampleStore
from qlangevin.storage import errors, manifest
from tests.helpers.processes import fork, wait_for
from tests.helpers.stores import build, fill_store

GIB = 1 << 30


def create(path: Path) -> Any:
    return SampleStore.create(path, nn.Linear(1, 1))


def save(path: Path) -> Any:
    return ql.save_checkpoint(path, nn.Linear(1, 1))


@pytest.mark.parametrize("action", [create, save])
def test_a_folder_that_cannot_be_made_is_named_with_what_to_do(action: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, what in (
        (tmp_path / ("x" * 300), "choose a shorter name"),
        (tmp_path / "file" / "run", "a part of that path is a file"),
    ):
        with pytest.raises(OSError, match=f"was not (created|saved).*; {what}") as caught:
            action(path)
        assert str(path) in str(caught.value)


def test_a_store_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file; a store is a folder: choose another name"):
        create(tmp_path / "file")


def test_a_checkpoint_in_a_folder_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "none" / "run.safetensors"
    with pytest.raises(
        FileNotFoundError, match=r"was not saved; .* a folder of that path is missing: create it"
    ) as caught:
        save(path)
    assert str(path) in str(caught.value)


def test_a_folder_that_is_read_only_is_named_with_what_to_do(tmp_path: Path) -> None:
    fill_store(tmp_path / "run", 1)
    for folder in (tmp_path / "run" / "samples", tmp_path / "run", tmp_path):
        folder.chmod(0o555)
    here = os.open(tmp_path, os.O_RDONLY)

    def look() -> None:
        os.fchdir(here)
        if os.getuid() == 0:  # who may write everywhere
            os.setuid(65534)
        for action, where in (
            (create, "new"),
            (save, "new"),
            (save, "run"),
            (lambda path: SampleStore.open(path, write=True), "run"),
        ):
            with pytest.raises(PermissionError, match=f"change the permissions there, or choose .*'{where}"):
                action(Path(where))

    try:
        assert wait_for(fork(look)) == 0
    finally:
        os.close(here)
        for folder in (tmp_path, tmp_path / "run", tmp_path / "run" / "samples"):
            folder.chmod(0o755)


def test_a_folder_above_that_can_be_entered_but_not_read(tmp_path: Path) -> None:
    (tmp_path / "above" / "mine").mkdir(parents=True)
    (tmp_path / "above" / "mine").chmod(0o777)
    (tmp_path / "above").chmod(0o711)
    here = os.open(tmp_path / "above", os.O_RDONLY)

    def look() -> None:
        os.fchdir(here)
        if os.getuid() == 0:
            os.setuid(65534)
        create(Path("mine")).close()

    try:
        assert wait_for(fork(look)) == 0
    finally:
        os.close(here)
        (tmp_path / "above").chmod(0o755)


def test_the_first_sync_that_fails_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=r"the store was not created; check the disk .*run'"):
            create(tmp_path / "run")
        with pytest.raises(OSError, match=r"the checkpoint was not saved; the one before it.*; check the disk"):
            save(tmp_path)
    create(tmp_path / "run").close()


def test_an_error_is_explained_once() -> None:
    with (
        pytest.raises(PermissionError, match=r"^\[Errno 13\] .*: inner; .*: 'a'$"),
        errors.explain_errors("b", "outer"),
        errors.explain_errors("a", "inner"),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", "c")


def test_calls_that_are_interrupted_are_repeated() -> None:
    calls = []

    def call(result: int) -> int:
        calls.append(result)
        if len(calls) < 3:
            raise InterruptedError
        return result

    assert errors.retry(call, 7) == 7
    with pytest.raises(InterruptedError):
        errors.retry(lambda: (_ for _ in ()).throw(InterruptedError()))


# ---- sizes are checked before anything is mapped


@pytest.mark.parametrize("file", ["manifest.json", "samples/000000.safetensors", "frozen.safetensors"])
def test_a_file_of_a_store_that_is_far_too_large_is_refused_by_its_size(file: str, tmp_path: Path) -> None:
    fill_store(tmp_path, 1)
    os.truncate(tmp_path / file, 8 * GIB)  # with a hole: it takes no room
    in_small_memory(lambda: refuse(lambda: SampleStore.open(tmp_path)[0].decode(), f"has {8 * GIB} bytes"))


@pytest.mark.parametrize("kind", ["extended", "zeros", "header"])
def test_a_checkpoint_that_is_far_too_large_is_refused_by_its_size(kind: str, tmp_path: Path) -> None:
    path, model = tmp_path / "it.safetensors", nn.Linear(1, 1)
    ql.save_checkpoint(path, model)
    if kind != "extended":
        path.write_bytes(struct.pack("<Q", 6 * GIB) if kind == "header" else b"")
    os.truncate(path, 8 * GIB)
    why = "its header describes" if kind == "extended" else "its header is said to have"
    in_small_memory(lambda: refuse(lambda: ql.load_checkpoint(path, model), why))


def test_a_checkpoint_that_does_not_fit_into_memory_says_so(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (8 * GIB, 8 * GIB)
    path = tmp_path / "it.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + 8 * GIB)

    def load() -> None:
        with pytest.raises(OSError, match=r"not mapped into memory, 85\d* bytes.*free some memory.*it.safetensors"):
            ql.load_checkpoint(path, nn.Linear(1, 1))

    in_small_memory(load)


def refuse(action: Callable[[], Any], why: str) -> None:
    with pytest.raises(DamagedError, match=why):
        action()


def in_small_memory(action: Callable[[], Any]) -> None:
    """Run a function in a process that cannot map 4 GiB more."""

    def limited() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 4 * GIB, used + 4 * GIB))
        action()

    assert wait_for(fork(limited)) == 0


def test_a_manifest_that_nobody_could_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_store(tmp_path, 1)
    with SampleStore.open(tmp_path, write=True) as writer:
        monkeypatch.setattr("qlangevin.storage.files.JSON_LIMIT", len(manifest.Manifest.to_json(writer.manifest)) + 9)
        with pytest.raises(ValueError, match=r"more than the .* that can be read: create another store"):
            writer.append(build(), step=1)
        assert len(writer) == 1
    SampleStore.open(tmp_path).verify()
