"""``python -m benchmarks.fuzz``: damages or forges one file of a store or a checkpoint, many thousand times, and reads it.

Damage leaves checksums as they are; a forgery comes with new ones, as an attacker would write them. Allowed outcomes:

refused       a DamagedError or an OSError that says what is wrong; samples that can still be read are as they were written.
              Of checkpoints also a ValueError that names the file; the run is as it was
identical     all samples are as they were written; a checkpoint was loaded, and the run is where it was when it was saved
well-formed   of forgeries only: what is read has the shapes and dtypes that the manifest declares, and finite parameters

Anything else is a failure, with exit code 1: another exception, another number, a process that dies, takes more than
`SECONDS` or grows by more than `MEMORY`. Mutations are numbered, and ``--first n --count 1`` repeats number n, with the same
``--what`` and ``--kind``.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import qlangevin as ql

from .checkpoint_mutations import CHECKPOINT_DAMAGE, CHECKPOINT_FORGED, build_run, fingerprint, opened
from .kills import SETUPS
from .mutations import DAMAGE, FORGED, build

SECONDS = 5
MEMORY = 200 << 20
LONG = 3000  # characters of a message
BATCH = 250  # mutations in one process
REFUSED, IDENTICAL, WELL_FORMED, FAILED = OUTCOMES = ("refused", "identical", "well-formed", "FAILED")
MIXED = "mixed"  # a store with tensors of every format, without a checkpoint
KINDS = (MIXED, *SETUPS)
MUTATIONS = {"store": (DAMAGE, FORGED), "checkpoint": (CHECKPOINT_DAMAGE, CHECKPOINT_FORGED)}


class Result(NamedTuple):
    number: int
    kind: str
    outcome: str
    why: str = ""


def is_clear(error: Exception, folder: Path) -> bool:
    text = str(error)
    return (
        isinstance(error, (ql.DamagedError, OSError))
        and str(folder) in text
        and any(what in text for what in ("manifest", "sample", "frozen"))
    )


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        t.dtype == wanted[n].dtype and torch.equal(t, wanted[n]) for n, t in found.items()
    )


def well_formed(found: dict[str, Tensor], store: ql.SampleStore) -> bool:
    """Return True if tensors are what the manifest declares. A buffer may hold anything."""
    for name, info in store.manifest.tensors.items():
        t = found[name]
        if t.shape != info.shape or str(t.dtype) != f"torch.{info.dtype}":
            return False
        if info.kind != "buffer" and not bool((t.float() if t.dtype.itemsize == 1 else t).isfinite().all()):
            return False
    return True


def outcome(folder: Path, wanted: list[dict[str, Tensor]], forged: bool) -> str:
    """Read everything, damaged samples twice, and verify it; return the outcome, or raise what is not allowed."""
    worst = [IDENTICAL]

    def attempt(action: Callable[..., Any], *args: Any) -> Any:
        try:
            return action(*args)
        except Exception as error:
            if not is_clear(error, folder):
                raise
            worst.append(REFUSED)

    store = attempt(ql.SampleStore.open, folder)
    if store is None:
        return REFUSED
    for i in range(len(store)):
        found = attempt(lambda i: store[i].decode(), i)
        if found is None:
            assert attempt(lambda i: store[i].decode(), i) is None, f"sample {i} is damaged, but not when read again"
        elif not (i < len(wanted) and same(found, wanted[i])):
            assert forged, f"sample {i} is another, and no error was raised"
            assert well_formed(found, store), f"sample {i} is not what the manifest declares, and no error was raised"
            worst.append(WELL_FORMED)
    damaged = REFUSED in worst
    attempt(store.verify)
    assert not damaged or worst[-1] == REFUSED, "samples are damaged, and verify raised no error"
    if len(store) != len(wanted):
        assert forged, "samples are gone, and no error was raised"
        worst.append(WELL_FORMED)
    return next(o for o in (REFUSED, WELL_FORMED, IDENTICAL) if o in worst)


def checkpoint_outcome(setup: str, folder: Path, wanted: str, forged: bool) -> str:
    """Load a checkpoint into a run; return the outcome, or raise what is not allowed."""
    with ExitStack() as stack:
        before = ""
        try:
            made, store = stack.enter_context(opened(setup, folder))
            before = fingerprint(made, store)
            ql.load_checkpoint(folder, *made, store)
        except Exception as error:
            if not isinstance(error, (ValueError, OSError)) or str(folder) not in str(error) or len(str(error)) > LONG:
                raise
            assert not before or fingerprint(made, store) == before, "it was refused, but the run has changed"
            return REFUSED
        if fingerprint(made, store) == wanted:
            return IDENTICAL
        assert forged, "another state was loaded, and no error was raised"
        finite = all(bool(t.isfinite().all()) for t in ql.unpack(made[0]).parameters())
        assert finite, "parameters that are no numbers were loaded"
        return WELL_FORMED


class Subject(NamedTuple):
    """The target of mutations: a pristine folder, its samples, and the run after its checkpoint was loaded."""

    folder: Path
    samples: list[dict[str, Tensor]]
    run: str


def build_subjects(folder: Path, kinds: Sequence[str]) -> dict[str, Subject]:
    found = {}
    for kind in kinds:
        path, run = folder / kind, ""
        if kind == MIXED:
            build(path)
        else:
            build_run(kind, path)
            with opened(kind, path) as (made, store):
                ql.load_checkpoint(path, *made, store)
                run = fingerprint(made, store)
        found[kind] = Subject(path, [sample.decode() for sample in ql.SampleStore.open(path)], run)
    return found


class Task(NamedTuple):
    """Mutations by number: what each changes, and of which kind of run."""

    seed: int
    what: tuple[str, ...]
    subjects: dict[str, Subject]

    def choose(self, number: int) -> tuple[str, str, str]:
        """Return what is changed, in which kind of run, by which mutation; kinds take turns."""
        rng = Random(f"{self.seed} {number} kind")
        what = self.what[number % len(self.what)]
        kinds = [kind for kind in self.subjects if what == "store" or kind != MIXED]
        damage, forged = MUTATIONS[what]
        return what, kinds[number // len(self.what) % len(kinds)], rng.choice([*damage, *forged])

    def mutate(self, number: int) -> Result:
        """Apply the mutation of this number to a copy of its folder, and read that."""
        what, kind, name = self.choose(number)
        subject, rng = self.subjects[kind], Random(f"{self.seed} {number}")
        folder = subject.folder.parent / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(subject.folder, folder)
        damage, forgeries = MUTATIONS[what]
        (damage | forgeries)[name](folder, rng)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            if what == "store":
                became = outcome(folder, subject.samples, name in forgeries)
            else:
                became = checkpoint_outcome(kind, folder, subject.run, name in forgeries)
        except Exception as error:
            return Result(number, name, FAILED, f"{kind}: {type(error).__name__}: {error}"[:200])
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        return (
            Result(number, name, became)
            if grown < MEMORY
            else Result(number, name, FAILED, f"it took {grown >> 20} MB")
        )


def in_process(numbers: range, task: Task) -> list[Result]:
    """Try mutations in a process of their own, up to one that kills it."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # forking a process with threads: this one has none that matter
        child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for number in numbers:
                signal.alarm(SECONDS)  # ends the process, wherever it hangs
                os.write(write, (json.dumps(task.mutate(number)) + "\n").encode())
        except BaseException:
            traceback.print_exc()  # a bug of this program
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        results = [Result(*json.loads(line)) for line in pipe]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if len(results) < len(numbers):
        number = numbers[len(results)]
        why = f"it took more than {SECONDS} s" if -status == signal.SIGALRM else f"the process ended with {status}"
        results.append(Result(number, task.choose(number)[2], FAILED, why))
    return results


def fuzz(count: int, seed: int = 0, first: int = 0, what: str = "all", kind: str = "all") -> list[Result]:
    """Return the outcomes of so many mutations."""
    results: list[Result] = []
    kinds = KINDS if kind == "all" else (kind,)
    chosen = (
        ("store", "checkpoint") if what == "all" and kinds != (MIXED,) else ("store",) if what == "all" else (what,)
    )
    with tempfile.TemporaryDirectory() as folder:
        task = Task(seed, chosen, build_subjects(Path(folder), kinds))
        while len(results) < count:
            start = first + len(results)
            results += in_process(range(start, min(start + BATCH, first + count)), task)
    return results


def table_of(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("mutation", *OUTCOMES):
        table.add_column(name, justify="left" if name == "mutation" else "right", no_wrap=True)
    counts = Counter((r.kind, r.outcome) for r in results) + Counter(("all", r.outcome) for r in results)
    names = [name for parts in MUTATIONS.values() for part in parts for name in part]
    shown = [name for name in names if any(counts[name, o] for o in OUTCOMES)]
    for name in (*shown, "all"):
        table.add_row(name, *(str(counts[name, o] or "") for o in OUTCOMES), end_section=name == shown[-1])
    return table


@dataclass(frozen=True)
class Options:
    """Damage and forge files of stores and checkpoints, and read them."""

    count: int = 10_000
    """Number of mutations."""
    seed: int = 0
    """Seed; a mutation depends on it, on its own number, and on what and kind."""
    first: int = 0
    """Number of the first mutation."""
    what: Literal["all", "store", "checkpoint"] = "all"
    """Files to mutate; both take turns."""
    kind: Literal["all", "mixed", "unpacked", "packed", "accumulated", "four-bit", "bf16", "float64"] = "all"
    """Kind of run; all take turns. Of the mixed one there is only a store."""


def main(options: Options) -> int:
    start = time.perf_counter()
    results = fuzz(options.count, options.seed, options.first, options.what, options.kind)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table_of(results))
    failed = [r for r in results if r.outcome == FAILED]
    for r in failed[:50]:
        why = r.why.encode(errors="backslashreplace").decode()
        console.print(f"{r.number} {r.kind}: {why}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(failed)} of {len(results)} failed, {time.perf_counter() - start:.0f} s", highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.fuzz")))
