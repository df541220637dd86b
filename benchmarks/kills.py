"""``python -m benchmarks.kills``: kills runs with SIGKILL, resumes them, compares their stores with those of runs never killed.

The parent kills half of the runs, at a random moment. The others kill themselves around a call with which `qlangevin.storage`
changes the disk, or with half of a chunk written. Exit code 1 if any store or checkpoint differs by a byte or a file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias
from unittest import mock

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

import qlangevin as ql
from qlangevin.storage import files, folders

Waiting: TypeAlias = Generator[None, None, Any]  # yields while it waits, so that several can take turns
Made = tuple[nn.Module, ql.SGLD, Any, ql.Loader]

PHASES = ("start", "step", "append", "checkpoint")
CALLS = ("open", "writev", "fsync", "replace", "unlink", "mkdir")
DATA = TensorDataset(torch.randn(50, 8, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 3)
EVERY = 7  # steps between checkpoints; samples are collected at other intervals


@dataclass(frozen=True)
class Options:
    """Kill runs, resume them, compare."""

    runs: int = 100
    """Number of runs, of the set-ups in turn; each is killed one to four times."""
    seed: int = 0
    """Seed of the moments of the kills."""
    steps: int = 300
    """Steps of a run."""
    kind: Literal["all", "unpacked", "packed", "accumulated", "four-bit", "bf16", "float64"] = "all"
    """Set-up of the runs; all of them, in turn."""


def unpacked(steps: int) -> Made:
    """VC SGLDLP-L on a lowered network with dropout, in cycles that explore by SGD."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    ql.lower(model, "bfp8", "bfp8", seed=3)
    sampler = ql.SGLD(model.parameters(), 0.1, 50, weights="bfp8", gradients="bfp8", seed=1)
    schedule = ql.CyclicalLR(sampler, steps, 4, steps // 40, exploration=0.5, exploration_temperature=0)
    return model, sampler, schedule, ql.Loader(DATA, 8, seed=5)


def packed(steps: int) -> Made:
    """Codes that are stepped in backward, and buffers."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    ql.pack(ql.lower(model, "bfp8", "bfp8", seed=4), "bfp8", layers=nn.Linear)
    sampler = ql.SGLD(model.parameters(), 0.05, 50, step_in_backward=True, seed=2)
    return model, sampler, ql.ConstantLR(sampler, steps, steps // 10, burn_in=0.1), ql.Loader(DATA, 6, seed=6)


def accumulated(steps: int) -> Made:
    """SGLDLP-F in fixed point, with a frozen parameter."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model[0].bias.requires_grad_(False)
    sampler = ql.SGLD(model.parameters(), 0.1, 50, weights="fixed8.6", accumulator="fp32", seed=3)
    schedule = ql.LinearDecayLR(sampler, steps, steps // 10, burn_in=0.2)
    return model, sampler, schedule, ql.Loader(DATA, 8, drop_last=True, seed=7)


def four_bit(steps: int) -> Made:
    """Two codes a byte, activations and errors in four bits too."""
    model = nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 3))
    ql.pack(ql.lower(model, "bfp4", "bfp4", seed=5), "fixed4.2")
    sampler = ql.SGLD(model.parameters(), 0.05, 50, gradients="bfp4", seed=4)
    return model, sampler, ql.ConstantLR(sampler, steps, steps // 10, burn_in=0.1), ql.Loader(DATA, 8, seed=8)


def bf16(steps: int) -> Made:
    """A model in bfloat16, with an accumulator in float32."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).bfloat16()
    sampler = ql.SGLD(model.parameters(), 0.1, 50, weights="bf16", accumulator="fp32", seed=5)
    return model, sampler, ql.StepDecayLR(sampler, steps, steps // 10, burn_in=0.1), ql.Loader(DATA, 8, seed=9)


def float64(steps: int) -> Made:
    """A model in float64, without a format."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 3)).double()
    sampler = ql.SGLD(model.parameters(), 0.1, 50, seed=6)
    return model, sampler, ql.LinearDecayLR(sampler, steps, steps // 10, burn_in=0.2), ql.Loader(DATA, 8, seed=10)


SETUPS: dict[str, Callable[[int], Made]] = {
    "unpacked": unpacked, "packed": packed, "accumulated": accumulated, "four-bit": four_bit, "bf16": bf16,
    "float64": float64,
}  # fmt: skip


def train(setup: str, folder: Path, steps: int, enter: Callable[[str], Any]) -> None:
    """Train a run from its start or its checkpoint to its end; ``enter`` is called with each phase."""
    enter("start")
    for seed in (torch.manual_seed, np.random.seed, random.seed):  # a checkpoint holds the states of all three
        seed(0)
    model, sampler, schedule, loader = SETUPS[setup](steps)
    with ql.SampleStore.create(folder, model, sampler, schedule, resume=True) as store:
        counters = ql.load_checkpoint(folder, model, sampler, schedule, loader, store, missing_ok=True)
        assert counters.get("step", 0) == schedule.last_epoch
        for x, labels in islice(chain.from_iterable(repeat(loader)), steps - schedule.last_epoch):
            enter("step")
            sampler.zero_grad()
            nn.functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), labels).backward()
            sampler.step()
            schedule.step()
            if schedule.collect:
                enter("append")
                store.append(model)
            if schedule.last_epoch % EVERY == 0:
                enter("checkpoint")
                ql.save_checkpoint(folder, model, sampler, schedule, loader, store, step=schedule.last_epoch)


@dataclass
class Calls:
    """Counts the moments before and after each call that changes the disk, and dies at one of them."""

    fatal: tuple[str, int] | None
    counts: dict[str, int]

    def reach(self, call: str, last: Callable[[], Any] = lambda: None) -> None:
        self.counts[call] += 1
        if (call, self.counts[call]) == self.fatal:
            last()
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: str, real: Callable[..., Any], *args: Any, **options: Any) -> Any:
        half = args[1][0][: len(args[1][0]) // 2] if call == "writev" else b""
        self.reach(call, lambda: os.write(args[0], half) if half else None)
        result = real(*args, **options)
        self.reach(call)
        return result

    def patches(self) -> tuple[Any, Any]:
        names = {name: getattr(os, name) for name in dir(os)}
        names |= {call: partial(self.around, call, names[call]) for call in CALLS}
        patched = SimpleNamespace(**names)
        return mock.patch.object(files, "os", patched), mock.patch.object(folders, "os", patched)


def worker(setup: str, folder: Path, steps: int, fatal: tuple[str, int] | None) -> None:
    """Train in a process of its own; beside the folder, keep the current phase, and at the end the counts of calls."""
    torch.set_num_threads(1)
    calls = Calls(fatal, dict.fromkeys(CALLS, 0))
    in_files, in_folders = calls.patches()
    with open(folder.with_suffix(".phase"), "r+b", buffering=0) as file, in_files, in_folders:
        train(setup, folder, steps, lambda phase: os.pwrite(file.fileno(), bytes([1 + PHASES.index(phase)]), 0))
    folder.with_suffix(".calls").write_text(json.dumps(calls.counts))


class Result(NamedTuple):
    setup: str
    died: tuple[str, ...]  # in which phase, each time
    problem: str = ""  # none if the store is what it should be


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a store and the checkpoint in it."""
    found = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in found}


def attempt(setup: str, folder: Path, steps: int, end: float | tuple[str, int] | None) -> Waiting:
    """Run a worker to its end, for so many seconds, or to a fatal call; return the exit code and the last phase."""
    marker = folder.with_suffix(".phase")
    marker.write_bytes(b"\0")
    context = multiprocessing.get_context("forkserver")  # a server that has imported everything, and done nothing yet
    context.set_forkserver_preload(["torch._dynamo", "torch.utils.data", "tyro", "rich.table", "qlangevin"])
    args = (setup, folder, steps, end if isinstance(end, tuple) else None)
    (process := context.Process(target=worker, args=args, daemon=True)).start()
    while process.is_alive() and marker.read_bytes() == b"\0":
        yield
    begin = time.perf_counter()
    while process.is_alive() and not (isinstance(end, float) and time.perf_counter() - begin > end):
        yield
    process.kill()
    process.join()
    return process.exitcode, ("start", *PHASES)[marker.read_bytes()[0]]


def run_reference(setup: str, folder: Path, steps: int) -> Waiting:
    """Return store, calls and seconds of a run that is not killed."""
    begin = time.perf_counter()
    yield from attempt(setup, folder, steps, None)
    return content(folder), json.loads(folder.with_suffix(".calls").read_text()), time.perf_counter() - begin


def kill_and_compare(setup: str, folder: Path, steps: int, like: Any, rng: random.Random) -> Waiting:
    """Kill a run one to four times, let it finish, compare."""
    wanted, counts, seconds = like
    times, died = rng.choice((1, 1, 2, 3, 4)), list[str]()
    while True:
        end: float | tuple[str, int] | None = None
        if len(died) < times:  # one after the other, within the time of one run
            call = rng.choice(CALLS)
            fatal = (call, rng.randint(1, rng.choice((4, 1 + counts[call] // times))))  # the first are those of a start
            end = fatal if rng.random() < 0.5 else rng.uniform(0, seconds / times)
        code, phase = yield from attempt(setup, folder, steps, end)
        if code == -signal.SIGKILL:
            died.append(phase)
        elif code != 0:
            return Result(setup, tuple(died), f"exit code {code}")
        elif died:
            break
        else:  # it finished before it could be killed
            shutil.rmtree(folder)
    found = content(folder)
    odd = sorted(name for name in found | wanted if found.get(name) != wanted.get(name))
    return Result(setup, tuple(died), f"differs in {', '.join(odd[:3])}" if odd else "")


def run_in_turns(tasks: Sequence[Waiting]) -> list[Any]:
    """Return the results of tasks, of which two at a time take turns."""
    waiting, results = list(enumerate(tasks)), dict[int, Any]()
    while waiting:
        for i, task in waiting[:2]:
            try:
                next(task)
            except StopIteration as end:
                results[i] = end.value
                waiting.remove((i, task))
        time.sleep(0.0005)
    return [results[i] for i in range(len(tasks))]


def kill_runs(options: Options, folder: Path) -> list[Result]:
    """Kill and compare all runs; their stores are below a folder."""
    steps, setups = options.steps, list(SETUPS) if options.kind == "all" else [options.kind]
    like = dict(
        zip(setups, run_in_turns([run_reference(setup, folder / setup, steps) for setup in setups]), strict=True)
    )
    chosen = [(f"run{i}", setups[i % len(setups)], random.Random(f"{options.seed}.{i}")) for i in range(options.runs)]
    return run_in_turns([kill_and_compare(setup, folder / run, steps, like[setup], rng) for run, setup, rng in chosen])


def main(options: Options) -> int:
    console, begin = Console(width=None if sys.stdout.isatty() else 130), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results = kill_runs(options, Path(folder))
    table = Table("killed during", *PHASES, "runs", "identical")
    for name in (*SETUPS, "all"):
        chosen = [r for r in results if name in (r.setup, "all")]
        kills = [sum(r.died.count(phase) for r in chosen) for phase in PHASES]
        table.add_row(name, *map(str, (*kills, len(chosen), sum(not r.problem for r in chosen))))
    console.print(table, f"{time.perf_counter() - begin:.0f} s")
    for result in (r for r in results if r.problem):
        console.print(f"{result.setup}, killed in {', '.join(result.died)}: {result.problem}", highlight=False)
    return int(any(result.problem for result in results))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.kills")))
