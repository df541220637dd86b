"""``python -m benchmarks.kernel_fuzz``: calls every kernel with random and adversarial arguments, under sanitizers.

It compiles the kernels with AddressSanitizer and UndefinedBehaviorSanitizer into a temporary folder and runs itself with
them. A call may be refused, by ValueError or TypeError (RuntimeError for codes that were freed), or compute what the PyTorch
path computes. Anything else is a failure, with exit code 1: another exception, another number, a sanitizer's report, a process
that dies. Calls are numbered, and ``--first n --count 1`` repeats number n.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from qlangevin import native

from . import compiled, half_calls, kernel_calls, tensor_calls
from .kernel_calls import COMPUTED, REFUSED

FAILED = "FAILED"
OUTCOMES = (REFUSED, COMPUTED, FAILED)
CALLS: dict[str, Callable[[Random], str]] = {
    "compiled quantize": kernel_calls.raw_quantize,
    "compiled encode, decode, relu": kernel_calls.raw_codes,
    "compiled sgld": kernel_calls.raw_step,
    "compiled draw, finite, Grid": kernel_calls.raw_rest,
    "half precision": half_calls.half_call,
    "native": tensor_calls.native_call,
    "native.sgld": tensor_calls.step_call,
    "operators": tensor_calls.operator_call,
    "QTensor": tensor_calls.qtensor_call,
}
MOST_CRASHES = 20


class Result(NamedTuple):
    number: int
    kind: str
    outcome: str
    why: str = ""


def call(number: int, seed: int = 0) -> Result:
    """Make the call of this number."""
    rng = Random(f"{seed} {number}")
    kind = rng.choice(list(CALLS))
    native.use_level(rng.choice(native.levels()))
    torch.manual_seed(number)
    try:
        return Result(number, kind, CALLS[kind](rng))
    except Exception as error:
        return Result(number, kind, FAILED, f"{type(error).__name__}: {error}"[:300])


def fuzz(numbers: range, seed: int = 0) -> list[Result]:
    """Make calls in this process."""
    level = native.level()
    try:
        return [call(number, seed) for number in numbers]
    finally:
        native.use_level(level)


@dataclass(frozen=True)
class Options:
    """Call kernels with random and adversarial arguments."""

    count: int = 100_000
    """Number of calls."""
    seed: int = 0
    """Seed; a call depends on it and on its own number only."""
    first: int = 0
    """Number of the first call."""
    sanitize: bool = True
    """Compile the kernels with AddressSanitizer and UndefinedBehaviorSanitizer, and call those."""
    child: bool = False
    """Make the calls in this process and print results as JSON: how the program runs itself."""


def run_child(options: Options) -> int:
    """Make the calls; print one line for each, before it and after it."""
    for number in range(options.first, options.first + options.count):
        print(number, flush=True)
        print(json.dumps(call(number, options.seed)), flush=True)
    return 0


def run_children(options: Options, environment: dict[str, str] | None) -> list[Result]:
    """Make the calls in a process of their own; after one that ends it, go on with the next in another."""
    results: list[Result] = []
    end, first, crashes = options.first + options.count, options.first, 0
    while first < end and crashes < MOST_CRASHES:
        command = [
            sys.executable,
            "-m",
            "benchmarks.compiled",
            "benchmarks.kernel_fuzz",
            "--child",
            "--seed",
            str(options.seed),
        ]
        command += ["--first", str(first), "--count", str(end - first)]
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert child.stdout is not None
            begun = first - 1
            for line in child.stdout:
                if line.startswith("["):
                    results.append(Result(*json.loads(line)))
                else:
                    begun = int(line)
            status = child.wait()
            errors.seek(0)
            report = errors.read()
        first = begun + 1
        if status:
            crashes += 1
            kind = Random(f"{options.seed} {begun}").choice(list(CALLS))
            results.append(Result(begun, kind, FAILED, f"the process ended with {status}: {summary(report)}"))
    return results


def summary(report: str) -> str:
    """Return the lines of a sanitizer's report that say what happened and where."""
    lines = [line.strip() for line in report.splitlines()]
    told = [line for line in lines if "runtime error" in line or "ERROR" in line or "SUMMARY" in line]
    return " | ".join([*told, *[line for line in lines if line.startswith("#")][:6]] or lines[-5:])


def table_of(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("call", *OUTCOMES):
        table.add_column(name, justify="left" if name == "call" else "right", no_wrap=True)
    counts = Counter((r.kind, r.outcome) for r in results) + Counter(("all", r.outcome) for r in results)
    for kind in (*CALLS, "all"):
        table.add_row(kind, *(str(counts[kind, o] or "") for o in OUTCOMES), end_section=kind == list(CALLS)[-1])
    return table


def main(options: Options) -> int:
    if options.child:
        return run_child(options)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        environment = (
            compiled.sanitized_environment(compiled.compile_kernels(Path(folder))) if options.sanitize else None
        )
        results = run_children(options, environment)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table_of(results))
    failed = [r for r in results if r.outcome == FAILED]
    for r in failed[:50]:
        console.print(f"{r.number} {r.kind}: {r.why}", highlight=False, markup=False, soft_wrap=True)
    seconds = time.perf_counter() - start
    console.print(f"{len(failed)} of {len(results)} failed, {seconds:.0f} s", highlight=False)
    return 1 if failed or len(results) < options.count else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.kernel_fuzz")))
