"""``python -m benchmarks.faults``: every call of the system that stores and checkpoints make fails once, at each n.

`faults.c` is compiled and put before the system's library by LD_PRELOAD. An operation (a scenario) is counted once, then
repeated with its n-th write, sync, rename and so on failing. Allowed outcomes:

done      the operation did not mind
refused   an OSError that says what became of it and what to do

and in either case all earlier samples are as they were, and the same operation, repeated without a fault, leaves the same bytes
as if there had been none, and no other file. Anything else is a failure, with exit code 1.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import qlangevin as ql
from qlangevin.storage.errors import is_explained

from .kills import content, train

CALLS = (
    *("open to read", "open to write", "read", "write", "fallocate", "fsync", "rename", "mkdir", "unlink", "close"),
    *("mmap", "lock", "stat"),
)
SHORT_WRITE, HALF = -1, "half of it"
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "EINTR": errno.EINTR}
DONE, REFUSED, FAILED = OUTCOMES = ("done", "refused", "FAILED")
INSIDE = "QLANGEVIN_FAULTS"  # set in the process that has the library
SOURCE = Path(__file__).with_suffix(".c")
SETUP, STEPS, STOP = "packed", 28, 16  # of a whole run, and where it was killed


def build(seed: int) -> nn.Module:
    """Return a model with packed, plain and frozen parameters, the same for a seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    torch.manual_seed(99)
    frozen = model[2].requires_grad_(False)
    frozen.load_state_dict({"weight": torch.randn(2, 2), "bias": torch.zeros(2)})
    return ql.pack(model, "bfp8", layers="0", rounding="nearest")


# ---- scenarios: operations that can be repeated


def create(folder: Path) -> None:
    ql.SampleStore.create(folder / "above" / "run", build(0), resume=True).close()


def prepare_store(folder: Path) -> None:
    with ql.SampleStore.create(folder / "run", build(0)) as store:
        for i in range(2):
            store.append(build(i), i)


def append(folder: Path) -> None:
    with ql.SampleStore.open(folder / "run", write=True) as store:
        if len(store) == 2:
            store.append(build(2), 2)


def append_again(folder: Path) -> None:
    """Append; after an error the same writer tries once more."""
    with ql.SampleStore.open(folder / "run", write=True) as store:
        for attempt in range(2):
            try:
                if len(store) == 2:
                    store.append(build(2), 2)
            except OSError as error:
                if attempt or not is_explained(error):
                    raise


def prepare_checkpoint(folder: Path) -> None:
    (folder / "run").mkdir()
    ql.save_checkpoint(folder / "run", build(0), step=0)


def save(folder: Path) -> None:
    ql.save_checkpoint(folder / "run", build(1), step=1)


def save_large(folder: Path) -> None:
    ql.save_checkpoint(folder / "run", build(1), best=torch.ones(600_000))


def read(folder: Path) -> None:
    store = ql.SampleStore.open(folder / "run")
    store.verify()
    for sample in store:
        sample.decode()


class Killed(Exception):
    """Ends a run where a kill would."""


def prepare_resume(folder: Path) -> None:
    """Leave a run as a kill would: with a checkpoint, and a sample that came after it."""
    steps = 0

    def enter(phase: str) -> None:
        nonlocal steps
        steps += phase == "step"
        if steps > STOP:
            raise Killed

    try:
        train(SETUP, folder / "run", STEPS, enter)
    except Killed:
        return


def run(folder: Path) -> None:
    train(SETUP, folder / "run", STEPS, lambda phase: None)


class Scenario(NamedTuple):
    operate: Callable[[Path], None]
    prepare: Callable[[Path], None] = lambda folder: None
    every: int = 1  # of its faults


SCENARIOS = {
    "create": Scenario(create),
    "append": Scenario(append, prepare_store),
    "append, tried again": Scenario(append_again, prepare_store),
    "save_checkpoint": Scenario(save, prepare_checkpoint),
    "save_checkpoint, large": Scenario(save_large, prepare_checkpoint),
    "read": Scenario(read, prepare_store),
    "resume": Scenario(run, prepare_resume),
    "run": Scenario(run, every=5),  # all the others, one after the other
}


# ---- faults


class Result(NamedTuple):
    scenario: str
    call: str
    n: int
    error: str
    outcome: str
    why: str = ""


def count_calls(library: Any) -> dict[str, int]:
    return {call: int(library.fault_count(i)) for i, call in enumerate(CALLS)}


def first_samples(folder: Path) -> dict[str, bytes]:
    """Return the samples that a reader finds, as they are stored and decoded."""
    if not (folder / "run" / "manifest.json").exists():
        return {}
    store, found = ql.SampleStore.open(folder / "run"), {}
    for i, sample in enumerate(store):
        found[f"{i}"] = store._sample_file(i).read_bytes()
        sample.decode()
    return found


def is_clear(error: OSError | ql.DamagedError, folder: Path) -> bool:
    """Return True for an error that explains itself and names the path; `verify` collects such errors in a DamagedError."""
    explained = is_explained(error) if isinstance(error, OSError) else "was not read; " in str(error)
    return explained and str(folder) in str(error)


def attempt(scenario: Scenario, folder: Path, wanted: dict[str, bytes], arm: Callable[[], Any], library: Any) -> str:
    """Operate with a fault, check, operate again; return the outcome, or raise what is not allowed."""
    before, outcome = first_samples(folder), DONE
    arm()
    try:
        scenario.operate(folder)
    except (OSError, ql.DamagedError) as error:
        library.fault_disarm()
        if not is_clear(error, folder):
            raise
        outcome = REFUSED
    finally:
        library.fault_disarm()
    after = first_samples(folder)
    if scenario.operate is not run:  # which truncates the store to its checkpoint, and draws the rest again
        assert before.items() <= after.items(), "an earlier sample is missing or has changed"
    elif (folder / "run" / "manifest.json").exists():
        ql.SampleStore.open(folder / "run").verify()
    scenario.operate(folder)
    assert content(folder) == wanted, "after the operation was repeated, files differ from those without a fault"
    return outcome


def try_scenario(name: str, folder: Path, every: int, library: Any) -> list[Result]:
    """Fail each call of a scenario once, with each error; of many, every so many."""
    scenario, pristine, copy = SCENARIOS[name], folder / "pristine", folder / "copy"
    pristine.mkdir(parents=True)
    scenario.prepare(pristine)
    shutil.copytree(pristine, copy)
    library.fault_arm(os.fsencode(copy), -1, 0, 0)
    scenario.operate(copy)
    library.fault_disarm()
    counts, wanted, results = count_calls(library), content(copy), []
    chosen = [(call, n, error) for call in CALLS for n in range(1, counts[call] + 1) for error in ERRORS]
    chosen += [("write", n, HALF) for n in range(1, counts["write"] + 1)]
    for call, n, error in chosen[:: every * scenario.every]:
        shutil.rmtree(copy)
        shutil.copytree(pristine, copy)
        number = ERRORS.get(error, SHORT_WRITE)
        arm = (os.fsencode(copy), CALLS.index(call), n, number)
        try:
            outcome, why = attempt(scenario, copy, wanted, lambda arm=arm: library.fault_arm(*arm), library), ""  # type: ignore[misc]
        except Exception as problem:
            outcome, why = FAILED, f"{type(problem).__name__}: {problem}"[:300]
        results.append(Result(name, call, n, error, outcome, why))
    return results


def try_all(options: Options) -> int:
    """Try all scenarios in this process, which has the library."""
    begin, console = time.perf_counter(), Console(width=None if sys.stdout.isatty() else 150)
    library: Any = ctypes.CDLL(None)
    library.fault_count.restype = ctypes.c_long
    library.fault_arm.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int)
    torch.set_num_threads(1)
    results = []
    memory = Path("/dev/shm")  # where a sync costs nothing: what a call does is not at issue, but what it returns
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        for i, name in enumerate(SCENARIOS):
            if options.scenario in ("all", name):
                results += try_scenario(name, Path(folder) / str(i), options.every, library)
    console.print(table_of(results))
    failed = [r for r in results if r.outcome == FAILED]
    for r in failed[:40]:
        console.print(f"{r.scenario}: {r.call} {r.n} {r.error}: {r.why}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(failed)} of {len(results)} failed, {time.perf_counter() - begin:.0f} s", highlight=False)
    return int(bool(failed) or not results)


def table_of(results: list[Result]) -> Table:
    """Return how many calls failed in each scenario, and what became of it."""
    names = [name for name in SCENARIOS if any(r.scenario == name for r in results)]
    table = Table("faults", *names, "all", box=box.SIMPLE_HEAD, pad_edge=False)

    def add(title: str, chosen: list[Result], end: bool = False) -> None:
        counts = Counter(r.scenario for r in chosen)
        table.add_row(title, *(str(counts[name] or "") for name in names), str(len(chosen) or ""), end_section=end)

    for call in CALLS:
        add(call, [r for r in results if r.call == call], call == CALLS[-1])
    for error in (*ERRORS, HALF):
        for outcome in OUTCOMES:
            chosen = [r for r in results if (r.error, r.outcome) == (error, outcome)]
            if chosen or outcome == FAILED:
                add(f"{error} {outcome}", chosen, outcome == FAILED)
    return table


@dataclass(frozen=True)
class Options:
    """Let every call of the system fail once."""

    every: int = 1
    """Try every so many of the faults."""
    scenario: str = "all"
    """One scenario by name."""


def main(options: Options) -> int:
    """Compile the library and try all scenarios in a process that has it."""
    if os.environ.get(INSIDE):
        return try_all(options)
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        print("skipped: it takes Linux and a C compiler to make calls of the system fail")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "faults.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
        arguments = ["--every", str(options.every), "--scenario", options.scenario]
        environment = os.environ | {"LD_PRELOAD": str(library), INSIDE: "1"}
        return subprocess.run([sys.executable, "-m", "benchmarks.faults", *arguments], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.faults")))
