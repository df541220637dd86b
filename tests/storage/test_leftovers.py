"""Temporary files: removed if their writer is gone, and not if it is at work on another host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qlangevin.storage import leftovers
from qlangevin.storage.folders import Folder
from qlangevin.storage.leftovers import host_id, remove_leftovers, temporary_name
from tests.helpers.processes import fork, wait_for

DAY = 24 * 3600


def left_of(folder: Path, *names: str, name: str | None = None) -> list[str]:
    """Write files of these names, remove leftovers and return the names of those that stay."""
    for each in names:
        if not (folder / each).exists():
            (folder / each).write_bytes(b"half")
    with Folder.open(folder) as opened:
        remove_leftovers(opened, name)
    return sorted(p.name for p in folder.iterdir())


def test_the_file_of_a_thread_at_work_stays(tmp_path: Path) -> None:
    mine = temporary_name("x")
    assert left_of(tmp_path, mine) == [mine]


def test_files_of_a_process_that_is_gone_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert left_of(tmp_path, f".x.{host_id()}-{gone.pid}-1-1.tmp") == []


def test_the_file_of_another_process_at_work_stays_until_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys; from qlangevin.storage.leftovers import temporary_name; from pathlib import Path\n"
        "name = temporary_name('x'); Path(sys.argv[1], name).touch(); print(name, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        assert left_of(tmp_path) == [name]
    assert left_of(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the start of a process is unknown here")
def test_a_process_that_got_the_number_of_another_does_not_keep_its_files(tmp_path: Path) -> None:
    parent = os.getppid()
    assert left_of(tmp_path, f".x.{host_id()}-{parent}-1-1.tmp", f".x.{host_id()}-{os.getpid()}-1-1.tmp") == []


def test_files_of_other_hosts_stay_for_a_day(tmp_path: Path) -> None:
    names = [".x.01234567-999999999-1-1.tmp", ".y.999999999-1.tmp"]  # the second does not say
    assert left_of(tmp_path, *names) == names
    for age, stays in ((DAY - 60, names), (DAY + 60, [])):
        for name in names:
            os.utime(tmp_path / name, (time.time() - age,) * 2)
        assert left_of(tmp_path) == stays


def test_only_files_of_that_name_are_removed(tmp_path: Path) -> None:
    dead = f"{host_id()}-999999999-1-1.tmp"
    names = [f".x.{dead}", f".y.{dead}", f".x.y.{dead}", ".x.tmp", "x", f"x.{dead}"]
    assert left_of(tmp_path, *names, name="x") == sorted(names[1:])
    assert left_of(tmp_path) == sorted([".x.tmp", "x", f"x.{dead}"])


def test_a_long_name_leaves_room_for_that_of_its_temporary_file(tmp_path: Path) -> None:
    name = "é" * 120 + ".safetensors"
    left = temporary_name(name)
    assert len(os.fsencode(left)) <= 255
    assert wait_for(fork(lambda: (tmp_path / temporary_name(name)).touch())) == 0
    assert left_of(tmp_path, name=name) == []


def test_the_host_is_in_the_name_and_a_fork_is_another_process(tmp_path: Path) -> None:
    mine = temporary_name("x")
    assert f".{host_id()}-{os.getpid()}-{leftovers._start_time(os.getpid())}-" in mine
    (tmp_path / mine).touch()

    def look() -> None:
        assert temporary_name("x") != mine
        assert left_of(tmp_path) == [mine]

    assert wait_for(fork(look)) == 0
