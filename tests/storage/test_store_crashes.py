"""Full disks and dying processes: every sample that was stored stays readable, whatever happens when."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn

from qlangevin import SampleStore, storage
from qlangevin.storage.folders import Folder
from qlangevin.storage.leftovers import host_id
from tests.helpers.processes import fork, wait_for
from tests.helpers.stores import FULL, build, draw, fill_store, is_sample, read_files


@pytest.mark.parametrize(("call", "nth"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("replace", 1), ("replace", 2)])
def test_an_append_that_fails_changes_nothing(
    call: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_store(tmp_path / "whole", 3)
    reader, before = fill_store(tmp_path / "s", 2), read_files(tmp_path / "s")
    real, calls = getattr(os, call), 0

    def fail(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise FULL
        return real(*args, **options)

    with SampleStore.open(tmp_path / "s", write=True) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(
                OSError, match="No space left on device: sample 2 was not stored; the 2 before it"
            ) as caught:
                writer.append(draw(build(), 5), step=2)
        assert caught.value.errno == errno.ENOSPC
        assert str(tmp_path / "s") in str(caught.value)
        assert read_files(tmp_path / "s") == before
        assert len(reader) == len(writer) == 2
        assert all(is_sample(sample, i) for i, sample in enumerate(reader))
        writer.append(draw(build(), 2), step=2)
    assert read_files(tmp_path / "s") == read_files(tmp_path / "whole")


@pytest.mark.parametrize("limit", [100, 1500])  # bytes: no room for the sample, or only for the sample
def test_a_file_that_becomes_too_large_changes_nothing(limit: int, tmp_path: Path) -> None:
    fill_store(tmp_path, 2)
    before = read_files(tmp_path)
    assert len(before["samples/000000.safetensors"]) < 1500 < len(before["manifest.json"])

    def append() -> None:
        with SampleStore.open(tmp_path, write=True) as writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            with pytest.raises(OSError, match="sample 2 was not stored; the 2 before it are safe"):
                writer.append(draw(build(), 2))
            assert read_files(tmp_path) == before
            assert len(writer) == 2

    assert wait_for(fork(append)) == 0
    assert read_files(tmp_path) == before


Line = tuple[str, int]  # a file of qlangevin.storage, and a line in it
STORAGE = str(Path(storage.__file__).parent) + os.sep


class Trace:
    """Records every line that is executed in the modules of qlangevin.storage, in this thread.

    Before the n-th execution of one line, with ``at = (line, n)``, it calls ``action``.
    """

    def __init__(self, at: tuple[Line, int] | None = None, action: Callable[[], Any] = lambda: None) -> None:
        self.at, self.action, self.executed = at, action, Counter[Line]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(STORAGE):
            return None
        if event == "line":
            line = (file.removeprefix(STORAGE), frame.f_lineno)
            self.executed[line] += 1
            if self.at == (line, self.executed[line]):
                self.action()
        return self

    def __enter__(self) -> Trace:
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self.before)


def trace_append(path: Path, trace: Trace, model: nn.Module) -> None:
    """Append the second sample to a store, as a new writer, under a trace."""
    with SampleStore.open(path, write=True) as writer, trace:
        writer.append(model, step=1)


def moments_of_append(path: Path, model: nn.Module) -> list[tuple[Line, int]]:
    """Return the first execution of every line that an append executes; the store is complete afterwards.

    Lines of files.py change the disk, first for the sample, then for the manifest: of those the last execution too.
    """
    fill_store(path, 1)
    trace_append(path, normal := Trace(), model)
    assert {file for file, _ in normal.executed} >= {
        "store.py",
        "sample.py",
        "manifest.py",
        "model_tensors.py",
        "tensor_file.py",
        "files.py",
    }
    return [
        (line, n) for line, count in normal.executed.items() for n in sorted({1, count if line[0] == "files.py" else 1})
    ]


@pytest.mark.slow
def test_a_process_that_dies_at_any_line_loses_no_sample(tmp_path: Path) -> None:
    model = draw(build(), 1)
    moments, complete = moments_of_append(tmp_path / "complete", model), read_files(tmp_path / "complete")
    fill_store(tmp_path / "one", 1)
    lengths, died_at = set(), set()
    for moment in moments:
        path = tmp_path / "s"
        shutil.copytree(tmp_path / "one", path)
        fatal = Trace(moment, lambda: os._exit(77))
        assert wait_for(fork(lambda path=path, fatal=fatal: trace_append(path, fatal, model))) == 77  # type: ignore[misc]
        died_at.add(moment[0])
        left = SampleStore.open(path)
        lengths.add(len(left))
        assert all(is_sample(sample, i) for i, sample in enumerate(left))
        with SampleStore.open(path, write=True) as writer:
            if len(writer) == 1:
                writer.append(model, step=1)
        assert read_files(path) == complete
        shutil.rmtree(path)
    trace_append(tmp_path / "one", normal := Trace(), model)
    assert died_at == normal.executed.keys()
    assert lengths == {1, 2}


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning")
def test_an_append_interrupted_at_any_line_loses_no_sample(tmp_path: Path) -> None:
    model = build()
    fill_store(tmp_path / "one", 1)
    interrupted_at = set()
    for moment in moments_of_append(tmp_path / "complete", draw(model, 1)):
        path = tmp_path / "s"
        shutil.copytree(tmp_path / "one", path)
        with SampleStore.open(path, write=True) as writer:
            with pytest.raises(KeyboardInterrupt), Trace(moment, interrupt):
                writer.append(draw(model, 1), step=1)
            interrupted_at.add(moment[0])
            assert not list(path.rglob("*.tmp"))
            assert all(is_sample(sample, i) for i, sample in enumerate(SampleStore.open(path)))
            writer.append(draw(model, 2), step=2)
            assert is_sample(writer[-1], 2)
            assert len(SampleStore.open(path)) == len(writer)
            SampleStore.open(path).verify()
        shutil.rmtree(path)
    trace_append(tmp_path / "one", normal := Trace(), draw(model, 1))
    assert interrupted_at == normal.executed.keys()


def test_a_manifest_that_is_in_its_place_but_not_synced_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_store(tmp_path, 1)
    with SampleStore.open(tmp_path, write=True) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "sync", lambda folder: sync_all_but(tmp_path, folder.path))
            with pytest.raises(OSError, match="No space left on device: sample 1 may not outlive a power failure"):
                writer.append(draw(build(), 1))
        assert len(writer) == len(SampleStore.open(tmp_path)) == 2
        writer.append(draw(build(), 2))
    assert [is_sample(sample, i) for i, sample in enumerate(SampleStore.open(tmp_path))] == [True] * 3


def sync_all_but(one: Path, folder: Path) -> None:
    if folder == one:
        raise FULL


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()])
def test_a_process_that_fails_and_then_dies_leaves_every_listed_sample_readable(
    error: BaseException, tmp_path: Path
) -> None:
    fill_store(tmp_path, 1)

    def append() -> None:
        syncs, fsync, replace = 0, os.fsync, os.replace

        def fail_once(descriptor: int) -> None:
            nonlocal syncs
            syncs += 1
            if syncs == 4:  # of the folder, after the manifest is in its place
                raise error
            fsync(descriptor)

        def die(old: str, new: str, **options: int) -> None:
            replace(old, new, **options)
            if new.endswith(".safetensors"):
                os._exit(77)

        with SampleStore.open(tmp_path, write=True) as writer, pytest.MonkeyPatch.context() as patch:
            model = build()
            patch.setattr(os, "fsync", fail_once)
            with pytest.raises(type(error)):
                writer.append(draw(model, 1))
            patch.setattr(os, "replace", die)
            writer.append(draw(model, 2))

    assert wait_for(fork(append)) == 77
    SampleStore.open(tmp_path).verify()


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    fill_store(tmp_path, 2)
    before = read_files(tmp_path)
    mine = f"{host_id()}-{os.getpid()}-1-1.tmp"  # of a process that had this one's number
    for name in (f".manifest.json.{mine}", f"samples/.000002.safetensors.{mine}", "samples/000002.safetensors"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert len(SampleStore.open(tmp_path)) == 2
    SampleStore.open(tmp_path, write=True).close()
    assert read_files(tmp_path) == before | {"notes.txt": b"mine"}


def test_a_store_is_created_again_after_a_crash_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_store(tmp_path / "whole", 0)
    real, calls = os.replace, 0
    for nth in (1, 2):

        def fail(*args: Any, nth: int = nth, **options: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise FULL
            real(*args, **options)

        with monkeypatch.context() as patch:
            calls = 0
            patch.setattr(os, "replace", fail)
            with pytest.raises(OSError, match="No space"):
                SampleStore.create(tmp_path / f"{nth}", build())
        SampleStore.create(tmp_path / f"{nth}", build()).close()
        assert read_files(tmp_path / f"{nth}") == read_files(tmp_path / "whole")


def test_new_folders_are_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set(), os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    SampleStore.create(tmp_path / "s", build()).append(build())
    assert {p.stat().st_ino for p in (tmp_path, tmp_path / "s", tmp_path / "s" / "samples")} <= synced


def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    shutil.copytree(fill_store(tmp_path / "s").path, shared := Path(tmp_path / "shared"))
    (shared / ".lock").unlink()
    for folder in (shared, shared / "samples"):
        folder.chmod(0o555)
    here = os.open(shared, os.O_RDONLY)

    def look() -> None:
        os.fchdir(here)
        if os.getuid() == 0:  # who may write everywhere
            os.setuid(65534)
        assert len([sample.decode() for sample in SampleStore.open(".")]) == 3
        with pytest.raises(PermissionError):
            SampleStore.open(".", write=True)
        with pytest.raises(PermissionError):
            SampleStore.create("new", build())

    assert wait_for(fork(look)) == 0
    os.close(here)
    for folder in (shared, shared / "samples"):
        folder.chmod(0o755)
