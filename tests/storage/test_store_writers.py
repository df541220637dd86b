"""One writer of a store at a time: locks, forked processes, threads."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import qlangevin as ql
from qlangevin import SampleStore
from tests.helpers.processes import fork, wait_for
from tests.helpers.stores import build, draw, fill_store, is_sample, read_files


def test_a_lock_that_is_refused_closes_no_file_of_others(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path, build()):
        with pytest.raises(BlockingIOError) as caught:
            SampleStore.open(tmp_path, write=True)
        other = os.open(tmp_path, os.O_RDONLY)  # gets the number of the lock's file
        del caught
        gc.collect()
        os.fstat(other)
        os.close(other)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path, build()):
        attempts: list[Callable[[], Any]] = [
            lambda: SampleStore.open(tmp_path, write=True),
            lambda: SampleStore.create(tmp_path, build(), resume=True),
        ]
        for again in attempts:
            with pytest.raises(BlockingIOError, match="another writer has it open; there can be one at a time"):
                again()
        assert wait_for(fork(lambda: SampleStore.open(tmp_path, write=True))) == 1
    assert wait_for(fork(lambda: SampleStore.open(tmp_path, write=True))) == 0
    with SampleStore.open(tmp_path, write=True) as s:
        s.append(build())


def test_a_writer_that_was_forgotten_gives_the_folder_free(tmp_path: Path) -> None:
    s = SampleStore.create(tmp_path, build())
    del s
    gc.collect()
    SampleStore.open(tmp_path, write=True).close()


def test_a_closed_writer_reads_on_but_does_not_write(tmp_path: Path) -> None:
    s = SampleStore.create(tmp_path, model := build())
    s.append(draw(model, 0))
    s.close()
    s.close()
    with pytest.raises(PermissionError, match="is closed"):
        s.append(model)
    assert is_sample(s[0], 0)


def test_a_closed_writer_does_not_take_other_samples_for_its_own(tmp_path: Path) -> None:
    s = SampleStore.create(tmp_path, model := build())
    s.append(draw(model, 0), step=0)
    s.close()
    with SampleStore.open(tmp_path, write=True) as other:
        other.truncate(0)
        other.append(draw(model, 1), step=1)
    assert s[0].step == 1  # it reads on, as any reader does
    assert is_sample(s[0], 1)


def test_a_forked_process_cannot_write_and_does_not_keep_the_lock(tmp_path: Path) -> None:
    read, write = os.pipe()

    def worker(s: SampleStore) -> None:
        with pytest.raises(PermissionError, match="was opened by the process this one was forked from"):
            s.append(build())
        os.write(write, str(os.getpid()).encode())
        signal.pause()

    def holder() -> None:
        s = SampleStore.create(tmp_path, build())
        fork(lambda: worker(s))
        signal.pause()

    child = fork(holder)
    os.close(write)
    grandchild = int(os.read(read, 100) or b"0")
    os.close(read)
    assert grandchild
    with pytest.raises(BlockingIOError):
        SampleStore.open(tmp_path, write=True)
    os.kill(child, signal.SIGKILL)
    assert wait_for(child) == -signal.SIGKILL
    SampleStore.open(tmp_path, write=True).close()
    os.kill(grandchild, 0)  # which is still there
    os.kill(grandchild, signal.SIGKILL)


def test_threads_append_in_turn(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path, model := build()) as s, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: s.append(model).index, range(20)))
    assert sorted(found) == list(range(20))
    s.verify()


# ---- a folder that is moved, replaced or removed while it is open for writing


def test_a_folder_that_was_moved_is_written_to_no_more(tmp_path: Path) -> None:
    """A lock is on a folder, not on its path: somebody else can become the writer of another folder of that path."""
    old = SampleStore.create(tmp_path / "run", model := build())
    old.append(draw(model, 0), step=0)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(OSError, match=r"the folder is gone: it was moved or removed .* gone with it") as caught:
        old.append(draw(model, 1), step=1)
    assert "safe" not in str(caught.value)
    with SampleStore.create(tmp_path / "run", model) as new:
        for i in (3, 4):
            new.append(draw(model, i), step=i)
        ql.save_checkpoint(tmp_path / "run", model, store=new)
        here, there = read_files(tmp_path / "run"), read_files(tmp_path / "moved")
        attempts: list[Callable[[], object]] = [
            lambda: old.append(draw(model, 1), step=1),
            lambda: old.truncate(0),
            lambda: ql.save_checkpoint(tmp_path / "run", model, store=old),
            lambda: ql.load_checkpoint(tmp_path / "run", model, store=old),
        ]
        for attempt in attempts:
            with pytest.raises(
                OSError, match=r"another folder has taken the place of .* open the store where it is now"
            ):
                attempt()
        assert (read_files(tmp_path / "run"), read_files(tmp_path / "moved")) == (here, there)
        new.append(draw(model, 5), step=5)
    assert is_sample(old[0], 0)  # of the folder that it has open
    old.close()
    with SampleStore.open(tmp_path / "moved", write=True) as moved:
        moved.append(draw(model, 1), step=1)
    assert [is_sample(sample, i) for i, sample in enumerate(SampleStore.open(tmp_path / "moved"))] == [True] * 2


def test_a_checkpoint_saved_without_its_store_does_not_go_into_another_folder(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path / "run", model := build()):
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run").mkdir()
        with pytest.raises(OSError, match="another folder has taken the place"):
            ql.save_checkpoint(tmp_path / "run", model)
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("moment", ["sample", "manifest"])
def test_a_folder_replaced_in_the_middle_of_an_append(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, syncs = os.fsync, 0

    def replace_folder(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1
        if syncs == {"sample": 1, "manifest": 3}[moment]:
            (tmp_path / "run").rename(tmp_path / "moved")
            fill_store(tmp_path / "run", 3)
        fsync(descriptor)

    fill_store(tmp_path / "run", 1)
    fill_store(tmp_path / "like", 3)
    with SampleStore.open(tmp_path / "run", write=True) as writer:
        monkeypatch.setattr(os, "fsync", replace_folder)
        with pytest.raises(OSError, match="another folder has taken the place"):
            writer.append(draw(build(), 9), step=9)
    assert read_files(tmp_path / "run") == read_files(tmp_path / "like")
    assert is_sample(SampleStore.open(tmp_path / "moved")[0], 0)


def test_a_folder_that_was_removed_promises_nothing(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path / "run", model := build()) as writer:
        writer.append(model, step=0)
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(OSError, match="the folder is gone") as caught:
            writer.append(model, step=1)
        assert "are safe" not in str(caught.value)
        assert str(tmp_path / "run") in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_lock_that_was_removed_is_noticed(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path, model := build()) as writer:
        (tmp_path / ".lock").unlink()
        with SampleStore.open(tmp_path, write=True) as other:
            other.append(draw(model, 0), step=0)
            before = read_files(tmp_path)
            with pytest.raises(
                OSError, match=r"its file .lock was removed or replaced .* close the store and open it again"
            ):
                writer.append(draw(model, 1), step=1)
        assert read_files(tmp_path) == before
