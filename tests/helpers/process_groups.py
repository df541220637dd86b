"""Groups of ranks for tests: real processes that meet over gloo on the loopback device.

`run_on_ranks` and `try_on_ranks` call a function of a test module on every rank. The ranks are forked by `rank_server`, which
imports PyTorch once for all tests; each call has ranks of its own, so that a failure in one cannot reach the next.
`start_torchrun` starts the command as a user would.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
START = 60.0  # seconds for the server to import PyTorch, on a busy machine
DEADLINE = 40.0  # seconds for a call on all ranks
LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Outcome:
    """The value that a rank's function returned, or its error; the error is "Died" if the process ended before either."""

    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""


def run_on_ranks(function: Callable[..., Any], size: int, *arguments: Any, **options: Any) -> list[Any]:
    """Return the value of each rank; fail the test if a rank raised an error. Arguments as for `try_on_ranks`."""
    return values_of(try_on_ranks(function, size, *arguments, **options))


def values_of(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return the value of each rank; fail the test if a rank raised an error."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
    return [outcome.value for outcome in outcomes]


def try_on_ranks(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    join: bool = True,
    only: Sequence[int] | None = None,
    variables: Mapping[str, str | None] | None = None,
    deadline: float = DEADLINE,
) -> list[Outcome]:
    """Call a function of a test module on all ranks of a new process group and return the outcome of each.

    Args:
        function: called inside of `distributed.join`, with its `Ranks` first; with ``join=False``, outside and without.
        size: WORLD_SIZE.
        arguments: further arguments of the function, of the types JSON has. A value returned may also hold tensors.
        join: see above.
        only: the ranks that are started; all by default.
        variables: of the environment, over those that torchrun would set; None removes one.
        deadline: seconds until ranks that are still running are killed.
    """
    started = list(range(size) if only is None else only)
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "module": function.__module__, "function": function.__qualname__, "size": size, "arguments": arguments,
            "join": join, "only": started, "variables": dict(variables or {}), "deadline": deadline, "folder": folder,
        }  # fmt: skip
        statuses = _running_server().ask(request, deadline)
        return [_read_outcome(Path(folder), rank, status) for rank, status in zip(started, statuses, strict=True)]


def _read_outcome(folder: Path, rank: int, status: int | None) -> Outcome:
    saved = folder / f"{rank}.pt"
    if status == 0 and saved.exists():
        return Outcome(**torch.load(saved))
    how = "was not done in time and killed" if status is None else f"ended with {status}"
    return Outcome(error="Died", message=how, trace=(folder / f"{rank}.err").read_text()[-4000:])


@contextmanager
def start_torchrun(*arguments: str, ranks: int, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Run ``torchrun -m qlangevin``; at the end kill it, with all it has started, if it is still running."""
    options = [f"--master-port={free_port()}", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1", *options, "-m", "qlangevin"]
    process = subprocess.Popen(
        [*command, *arguments], env=os.environ | LOOPBACK, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def free_port() -> int:
    """Return a TCP port that no process of this machine listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Server:
    """The process of `rank_server`, which answers one request at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.rank_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
            env=os.environ | LOOPBACK, start_new_session=True,
        )  # fmt: skip
        atexit.register(self.end)

    def ask(self, request: Any, deadline: float) -> Any:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            if not select.select([stdout], [], [], START + deadline)[0]:
                raise TimeoutError("the server of ranks does not answer")
            return json.loads(stdout.readline())
        except BaseException:  # also Ctrl-C: an answer left unread would be taken for that of the next request
            self.end()
            raise

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # the ranks are in the server's process group
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        atexit.unregister(self.end)


_servers: list[_Server] = []


def _running_server() -> _Server:
    if not _servers or _servers[-1].process.poll() is not None:
        _servers[:] = [_Server()]
    return _servers[-1]
