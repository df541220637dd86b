"""One writer of a store at a time: locks, forked processes, threads."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qlangevin import SampleStore
from tests.helpers.processes import fork, wait_for
from tests.helpers.stores import build, draw, is_sample


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
