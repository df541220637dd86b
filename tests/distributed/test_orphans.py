"""Ranks end with the torchrun that started them, also if it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qlangevin.distributed import orphans
from tests.helpers.process_groups import start_torchrun
from tests.helpers.processes import fork

CHILDREN = Path("/proc/self/task") / str(os.getpid()) / "children"


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(process: int) -> bool:
    """Return True unless the process has ended; one that nobody has waited for yet has ended, too."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(not CHILDREN.exists(), reason="finds the ranks in /proc")
def test_ranks_do_not_outlive_a_killed_torchrun(tmp_path: Path) -> None:
    options = "--epochs 100000 --samples 2 --batch 25 --limit-train 100 --limit-test 20 --hidden 8 --chains 2"
    with start_torchrun("run", "digits", *options.split(), "--out", str(tmp_path / "run"), ranks=2) as process:
        wait_for(lambda: all((tmp_path / f"run/chain-{i}/checkpoint.safetensors").exists() for i in (0, 1)))
        ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)  # a frozen one does not, either
        process.kill()
        process.wait()
        try:
            wait_for(lambda: not any(map(is_running, ranks)), 20)
        finally:
            for rank in filter(is_running, ranks):
                os.kill(rank, signal.SIGKILL)
            process.communicate()


def test_a_process_that_torchrun_has_not_started_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(orphans, "ctypes", None)
    monkeypatch.setattr(orphans, "threading", None)
    orphans.end_with_torchrun()


WATCHED = """
import os, sys, time
from qlangevin.distributed import orphans
os.environ["TORCHELASTIC_RUN_ID"] = "test"
orphans.SECONDS = 0.02
sys.platform = "another"
orphans.end_with_torchrun()
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(not CHILDREN.exists(), reason="looks at the process in /proc")
def test_where_the_kernel_does_not_do_it_a_thread_does() -> None:
    def start() -> None:
        subprocess.Popen([sys.executable, "-c", WATCHED], stdout=write)
        os._exit(0) if os.read(gone, 1) else None

    read, write = os.pipe()
    gone, go = os.pipe()
    parent = fork(start, 60)
    try:
        os.close(write)
        orphan = int(os.read(read, 100))
        assert is_running(orphan)
        os.write(go, b"x")  # its parent ends
        os.waitpid(parent, 0)
        wait_for(lambda: not is_running(orphan), 20)
    finally:
        for end in (read, gone, go):
            os.close(end)
