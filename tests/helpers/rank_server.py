"""The server that forks ranks for `process_groups`: a request is a line of JSON on stdin, its answer a line on stdout.

A rank saves what became of it in the folder that the request names; the answer lists the exit codes, None for a rank that was
killed at the deadline. If the server itself is killed, an alarm ends each rank.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

import qlangevin as ql
from qlangevin import distributed
from tests.helpers.process_groups import free_port
from tests.helpers.processes import fork

Request = dict[str, Any]


def serve() -> None:
    """Answer requests until stdin is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not be taken for an answer
    import_slow_modules()
    for line in sys.stdin:
        request = json.loads(line)
        importlib.import_module(request["module"])
        print(json.dumps(run_ranks(request)), file=answers, flush=True)


def import_slow_modules() -> None:
    """Import in the server what each rank would otherwise import by itself, which takes seconds."""
    importlib.import_module("torch.distributed.fsdp")
    ql.SGLD([torch.zeros(1, requires_grad=True)], 0.1, 1).zero_grad()  # the first optimizer imports torch's compiler


def run_ranks(request: Request) -> list[int | None]:
    """Fork the ranks, wait for them and return the exit code of each; kill those that are late."""
    port, end = free_port(), time.monotonic() + request["deadline"]
    patience = int(request["deadline"]) + 5
    children = [fork(partial(be_rank, rank, port, request), patience) for rank in request["only"]]
    codes: dict[int, int] = {}
    try:
        while len(codes) < len(children) and time.monotonic() < end:
            for child in children:
                if child not in codes and (ended := os.waitpid(child, os.WNOHANG))[0]:
                    codes[child] = os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.005)
    finally:
        for child in children:
            if child not in codes:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return [codes.get(child) for child in children]


def be_rank(rank: int, port: int, request: Request) -> None:
    """Call the function as one rank, in a process of its own, and save its value or its error."""
    folder = Path(request["folder"])
    redirect_output(folder / f"{rank}.err")
    address = {"RANK": rank, "WORLD_SIZE": request["size"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in address.items()})
    for name, value in request["variables"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        outcome = {"value": call_function(request)}
    except BaseException as error:
        outcome = {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    torch.save(outcome, folder / f"{rank}.pt")


def redirect_output(path: Path) -> None:
    """Send stdout and stderr to a file, and give stdin an end."""
    errors = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def call_function(request: Request) -> Any:
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(request["module"]), request["function"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if not request["join"]:
            return function(*request["arguments"])
        with distributed.join() as ranks:
            return function(ranks, *request["arguments"])


if __name__ == "__main__":
    serve()
