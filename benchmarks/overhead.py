"""``python -m benchmarks.overhead --against REVISION``: time of a call here and in another revision of this repository.

Both source trees get kernels compiled by the same command, and run in a process each that take turns. Times are processor
times of one thread; the least counts. It shows the cost of what a change adds to every call, such as a check. Where tensors
lie in memory matters too, so processes are started anew several times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from . import compiled

ROOT = Path(__file__).parent.parent
LARGE, SMALL = (100, 1000), (2, 5)
LEAST = 4e-3  # seconds of one measurement


def contestants() -> dict[str, Callable[[], Any]]:
    """Return the calls to time, of the source tree that this process imports."""
    import torch

    import qlangevin as ql
    from qlangevin.quantization.backend import kernels_for

    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, Callable[[], Any]] = {}
    for name, shape in {"1e5": LARGE, "10": SMALL}.items():
        x, key = torch.randn(shape), ql.Key(0)
        for format in ("fixed8.3", "bfp8", "fp8_e4m3"):
            found[f"quantize nearest {format}, {name}"] = lambda x=x, f=format: ql.quantize(x, f)  # type: ignore[misc]
            found[f"quantize stochastic {format}, {name}"] = lambda x=x, f=format, k=key: ql.quantize(
                x, f, "stochastic", k
            )  # type: ignore[misc]
        found[f"corrected bfp8, {name}"] = lambda x=x, k=key: ql.corrected(x, 0.01, "bfp8", k)  # type: ignore[misc]
        q = ql.encode(x, "bfp8")
        found[f"decode bfp8, {name}"] = q.decode
        found[f"encode bfp8, {name}"] = lambda x=x: ql.encode(x, "bfp8")  # type: ignore[misc]
        found[f"detach bfp8, {name}"] = q.detach
        for packed in (False, True):
            p = torch.nn.Parameter(ql.encode(x, "bfp8") if packed else ql.quantize(x, "bfp8"))
            p.grad = torch.randn(shape)
            weights = None if packed else "bfp8"
            sampler = ql.SGLD([p], lr=1e-6, num_data=10**6, weights=weights)  # the weights stay where they are
            found[f"SGLD.step {'packed' if packed else 'plain'} bfp8, {name}"] = sampler.step
    found |= lowered_networks() | training_steps()
    found["kernels_for"] = lambda x=x: kernels_for(x, x)  # type: ignore[misc]
    return found


def lowered_networks() -> dict[str, Callable[[], Any]]:
    """Return forward and backward of small lowered networks, in which the calls cost more than the numbers."""
    import torch
    from torch import nn

    import qlangevin as ql

    mlp = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
    found: dict[str, Callable[[], Any]] = {}
    for name, model, x in (
        ("MLP", mlp, torch.randn(32, 64)),
        ("convolution, norm, relu, pool", layers, torch.randn(8, 3, 10, 10)),
    ):
        ql.lower(model, "bfp8", "bfp8")
        e = torch.ones_like(model(x))
        found[f"lowered {name}"] = lambda model=model, x=x, e=e: model(x).backward(e)  # type: ignore[misc]
    return found


def training_steps() -> dict[str, Callable[[], Any]]:
    """Return training steps of a small network: by SGD, and by SGLD of the lowered and packed network."""
    import torch
    from torch import nn

    import qlangevin as ql

    found: dict[str, Callable[[], Any]] = {}
    x, labels = torch.randn(8, 784), torch.randint(10, (8,))
    for name, in_backward in (("SGD", None), ("lowered and packed", False), ("the same, in backward", True)):
        model: Any = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
        if in_backward is None:
            sampler: Any = torch.optim.SGD(model.parameters(), 1e-6)
        else:
            ql.lower(ql.pack(model, "bfp8"), "bfp8", "bfp8")
            sampler = ql.SGLD(model.parameters(), 1e-6, 10**6, step_in_backward=in_backward)

        def step(model: Any = model, sampler: Any = sampler) -> None:
            sampler.zero_grad()
            nn.functional.cross_entropy(model(x), labels).backward()
            sampler.step()

        found[f"step of an MLP, {name}"] = step
    return found


def serve(source: str) -> None:
    """Time all calls whenever a line comes in, and answer with the seconds of each."""
    # An editable installation finds its own tree first; this process is to import the one that is given.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
    sys.path.insert(0, source)
    compiled.load()
    calls = contestants()
    counts = {name: repetitions(call) for name, call in calls.items()}
    for _ in sys.stdin:
        times = {}
        for name, call in calls.items():
            start = time.thread_time()
            for _ in range(counts[name]):
                call()
            times[name] = (time.thread_time() - start) / counts[name]
        print(json.dumps(times), flush=True)


def repetitions(call: Callable[[], Any]) -> int:
    """Return how often to call a function for it to take long enough to be timed."""
    for _ in range(5):
        call()  # the first calls import and allocate
    count = 1
    while True:
        start = time.thread_time()
        for _ in range(count):
            call()
        if time.thread_time() - start > LEAST:
            return count
        count *= 2


def start(tree: Path, module: Path) -> subprocess.Popen[str]:
    """Start a process that times a source tree with its compiled kernels."""
    command = [sys.executable, "-m", "benchmarks.overhead", "--serve", str(tree / "src")]
    environment = os.environ | {compiled.VARIABLE: str(module)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def take_turns(processes: dict[str, subprocess.Popen[str]], rounds: int, best: dict[str, dict[str, float]]) -> None:
    """Lower the least seconds of each call in each process."""
    for _ in range(rounds):
        for name, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            for call, seconds in json.loads(process.stdout.readline()).items():
                best[name][call] = min(seconds, best[name].get(call, seconds))


@dataclass(frozen=True)
class Options:
    """Time calls here and in another revision."""

    against: str = "HEAD"
    """The other revision; HEAD shows what has not been committed yet."""
    starts: int = 6
    """Processes of each."""
    rounds: int = 20
    """Turns of each process."""
    serve: str | None = None
    """Time the calls of this source tree on request: how the program runs itself."""


def main(options: Options) -> int:
    if options.serve is not None:
        serve(options.serve)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name), Path(name) / "tree"
        other.mkdir()
        archive = subprocess.run(["git", "archive", options.against], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", str(other)], input=archive.stdout, check=True)
        trees, modules, best = {"there": other, "here": ROOT}, {}, {"there": {}, "here": {}}  # type: ignore[var-annotated]
        for side, tree in trees.items():
            (folder / side).mkdir()
            modules[side] = compiled.compile_kernels(folder / side, tree / "src/qlangevin/native", ("-O3",))
        for _ in range(options.starts):
            processes = {side: start(tree, modules[side]) for side, tree in trees.items()}
            try:
                take_turns(processes, options.rounds, best)
            finally:
                for process in processes.values():
                    process.communicate()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("call", options.against, "here", "difference", ""):
        table.add_column(column, justify="left" if column == "call" else "right", no_wrap=True)
    for call, there in best["there"].items():
        here = best["here"][call]
        table.add_row(
            call, *(f"{t * 1e6:.2f} µs" for t in (there, here, here - there)), f"{(here / there - 1) * 100:+.1f} %"
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.overhead")))
