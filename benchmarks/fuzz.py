"""``python -m benchmarks.fuzz``: damages or forges one file of a store of samples, many thousand times, and reads the store.

Damage leaves checksums as they are; a forgery comes with new ones, as an attacker would write them. Allowed outcomes:

refused       a DamagedError or an OSError that says what is wrong; samples that can still be read are as they were written
identical     all samples are as they were written
well-formed   of forgeries only: what is read has the shapes and dtypes that the manifest declares, and finite parameters

Anything else is a failure, with exit code 1: another exception, another number, a process that dies, takes more than
`SECONDS` or grows by more than `MEMORY`. Mutations are numbered, and ``--first n --count 1`` repeats number n.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import qlangevin as ql

from .mutations import DAMAGE, FORGED, build

SECONDS = 5
MEMORY = 200 << 20
BATCH = 250  # mutations in one process
REFUSED, IDENTICAL, WELL_FORMED, FAILED = OUTCOMES = ("refused", "identical", "well-formed", "FAILED")


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


def kind_of(number: int, seed: int) -> str:
    return Random(f"{seed} {number} kind").choice([*DAMAGE, *FORGED])


def mutate(number: int, seed: int, pristine: Path, wanted: list[dict[str, Tensor]]) -> Result:
    """Apply the mutation of this number to a copy of the store, and read it."""
    kind, rng, folder = kind_of(number, seed), Random(f"{seed} {number}"), pristine.parent / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(pristine, folder)
    (DAMAGE | FORGED)[kind](folder, rng)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        result = Result(number, kind, outcome(folder, wanted, kind in FORGED))
    except Exception as error:
        return Result(number, kind, FAILED, f"{type(error).__name__}: {error}"[:200])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return result if grown < MEMORY else Result(number, kind, FAILED, f"it took {grown >> 20} MB")


def in_process(numbers: range, seed: int, pristine: Path, wanted: list[dict[str, Tensor]]) -> list[Result]:
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
                os.write(write, (json.dumps(mutate(number, seed, pristine, wanted)) + "\n").encode())
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
        results.append(Result(number, kind_of(number, seed), FAILED, why))
    return results


def fuzz(count: int, seed: int = 0, first: int = 0) -> list[Result]:
    """Return the outcomes of so many mutations."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        pristine = Path(folder) / "store"
        wanted = build(pristine)
        while len(results) < count:
            start = first + len(results)
            results += in_process(range(start, min(start + BATCH, first + count)), seed, pristine, wanted)
    return results


def table_of(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("mutation", *OUTCOMES):
        table.add_column(name, justify="left" if name == "mutation" else "right", no_wrap=True)
    counts = Counter((r.kind, r.outcome) for r in results) + Counter(("all", r.outcome) for r in results)
    for kind in (*DAMAGE, *FORGED, "all"):
        table.add_row(kind, *(str(counts[kind, o] or "") for o in OUTCOMES), end_section=kind == list(FORGED)[-1])
    return table


@dataclass(frozen=True)
class Options:
    """Damage and forge files of a store of samples, and read it."""

    count: int = 10_000
    """Number of mutations."""
    seed: int = 0
    """Seed; a mutation depends on it and on its own number only."""
    first: int = 0
    """Number of the first mutation."""


def main(options: Options) -> int:
    start = time.perf_counter()
    results = fuzz(options.count, options.seed, options.first)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table_of(results))
    failed = [r for r in results if r.outcome == FAILED]
    for r in failed[:50]:
        console.print(f"{r.number} {r.kind}: {r.why}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(failed)} of {len(results)} failed, {time.perf_counter() - start:.0f} s", highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.fuzz")))
