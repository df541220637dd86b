"""Teams of ranks: real processes that meet over gloo on the loopback, forked by a server that has imported PyTorch once.

A team has a deadline. Whoever is not done by then is killed, by the server and, should that be gone, by an alarm of its own.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qlangevin as ql
from qlangevin import distributed

ROOT = Path(__file__).resolve().parents[2]
START = 60.0  # seconds for the server to import PyTorch, on a busy machine
DEADLINE = 40.0


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: what its function returned, or its error, or how the process ended before either."""

    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""


def outcomes(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    alone: bool = False,
    only: Sequence[int] | None = None,
    variables: Mapping[str, str | None] | None = None,
    deadline: float = DEADLINE,
) -> list[Outcome]:
    """Call a function of a test module on so many ranks; arguments and results are what JSON can hold.

    Args:
        function: is called inside of `join`, with the `Ranks` first; with ``alone``, outside and without.
        size: WORLD_SIZE.
        arguments: further ones of the function.
        alone: see above.
        only: the ranks that are started; all by default.
        variables: of the environment, over those that torchrun would set; None takes one away.
        deadline: seconds for all of it.
    """
    request = {
        "module": function.__module__, "function": function.__qualname__, "size": size, "arguments": arguments,
        "alone": alone, "only": list(range(size) if only is None else only), "variables": dict(variables or {}),
        "deadline": deadline,
    }  # fmt: skip
    return [Outcome(**found) for found in _server().ask(request, deadline)]


def values(function: Callable[..., Any], size: int, *arguments: Any, **options: Any) -> list[Any]:
    """What each rank returned; an error of one of them is an error here."""
    found = outcomes(function, size, *arguments, **options)
    for rank, outcome in enumerate(found):
        assert outcome.error is None, f"rank {rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
    return [outcome.value for outcome in found]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# ---- what ranks do


def network(seed: int = 0) -> nn.Sequential:
    """Matrices larger than a group of 64 and vectors smaller than one; the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))


def loader(rank: int = 0, ranks: int = 1) -> ql.Loader:
    """Of 50 examples in batches of 16: in the last one there is nothing to do for half of 4 ranks."""
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(50, 12, generator=generator), torch.randint(3, (50,), generator=generator)
    return ql.Loader(TensorDataset(x, labels), 16, seed=3, rank=rank, ranks=ranks)


def train(model: nn.Module, sampler: ql.SGLD, batches: ql.Loader, until: int) -> None:
    for x, labels in batches.until(until):
        sampler.zero_grad()
        y = model(x.to(next(model.parameters()).dtype))
        (batches.share * nn.functional.cross_entropy(y, labels)).backward()
        sampler.step()


def digest(model: nn.Module, sampler: ql.SGLD) -> str:
    """Of every byte of parameters and accumulators."""
    tensors = [p.detach() for p in model.parameters()]
    tensors += [s["accumulator"] for s in sampler.state.values() if "accumulator" in s]
    return sha256(*tensors)


def sha256(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# ---- the server, as the tests see it


class _Server:
    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            start_new_session=True,
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
        except BaseException:  # Ctrl-C too: an answer that was not read would be taken for the next one
            self.end()
            raise

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # the server is the leader of its ranks
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        atexit.unregister(self.end)


_running: list[_Server] = []


def _server() -> _Server:
    if not _running or _running[-1].process.poll() is not None:
        _running[:] = [_Server()]
    return _running[-1]


# ---- the server itself


def _serve() -> None:
    sys.path.insert(0, str(ROOT))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints is no answer
    ql.SGLD(network().parameters(), 0.1, 1).zero_grad()  # the first optimizer brings in the compiler: seconds, once
    for line in sys.stdin:
        request = json.loads(line)
        importlib.import_module(request["module"])
        with tempfile.TemporaryDirectory() as folder:
            found = _team(request, Path(folder))
        print(json.dumps(found), file=answers, flush=True)


def _team(request: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    port, end = free_port(), time.monotonic() + request["deadline"]
    children = {}
    for rank in request["only"]:
        child = os.fork()
        if child == 0:
            try:
                _be(rank, port, request, folder)
                os._exit(0)
            finally:
                os._exit(1)
        children[rank] = child
    status: dict[int, int] = {}
    try:
        while len(status) < len(children) and time.monotonic() < end:
            for rank, child in children.items():
                if rank not in status and (ended := os.waitpid(child, os.WNOHANG))[0]:
                    status[rank] = os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.005)
    finally:
        for rank, child in children.items():
            if rank not in status:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return [_found(folder, rank, status.get(rank)) for rank in children]


def _found(folder: Path, rank: int, status: int | None) -> dict[str, Any]:
    said = folder / f"{rank}.json"
    if status == 0 and said.exists():
        return dict(json.loads(said.read_text()))
    how = "was not done in time and killed" if status is None else f"ended with {status}"
    return {"error": "Died", "message": how, "trace": (folder / f"{rank}.err").read_text()[-4000:]}


def _be(rank: int, port: int, request: dict[str, Any], folder: Path) -> None:
    """One rank, in its own process."""
    signal.alarm(int(request["deadline"]) + 5)  # should the server be gone
    errors = os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    told = {"RANK": rank, "WORLD_SIZE": request["size"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()})
    for name, value in request["variables"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        said = {"value": _called(request)}
    except BaseException as error:
        said = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(said))


def _called(request: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(request["module"]), request["function"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if request["alone"]:
            return function(*request["arguments"])
        with distributed.join() as ranks:
            return function(ranks, *request["arguments"])


if __name__ == "__main__":
    _serve()
