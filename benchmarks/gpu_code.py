"""``python -m benchmarks.gpu_code``: compile the kernels that the library launches, and look at the code. Needs no GPU.

Every launch of `gpu.operations` is recorded in the interpreter and compiled for every GPU of `gpu.compiling.TARGETS`, with the
constants and alignments that it has. The code must compute what the source says (`gpu.exactness`) and keep everything in
registers, and operations that have a budget of instructions must stay within it. Bytes that the launches move (`gpu.traffic`) may
be 1.1 times the least, scratch memory apart (`gpu.operations`), and blocks that are drawn must fit in the cache. ``--only``,
``--kernels`` and ``--targets`` choose, ``--quick`` takes what has a budget. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from benchmarks.gpu.recording import Launch, Recorded, record_in_child

if TYPE_CHECKING:  # triton is imported when the environment is right
    from benchmarks.gpu.compiling import Specialisation

__all__ = ["BUDGETS", "Finding", "beyond_budget", "inspect", "moved_too_much"]

ALL = ("sm_80", "sm_90", "sm_100", "gfx942")
# Instructions an element on sm_90, all launches of an operation together, but for the one that looks for gradients which are not
# finite: `begin`.
BUDGETS = {
    "step on codes, fixed8.6": 120,
    "step on codes, bfp8, rows of 2304": 180,
    "quantize, stochastic, fixed8.6, float32": 60,
    "quantize, stochastic, bfp8, rows of 2304, float32": 60,
}
READ_OF_BLOCK = 5  # bytes an element that a step on blocks reads: code and gradient
MOST_MOVED = 1.1  # bytes, as a multiple of the least


@dataclass(frozen=True)
class Finding:
    """One kernel on one GPU."""

    name: str
    target: str
    registers: int
    instructions: float  # an element
    accessed: float  # bytes an element that loads and stores name
    problems: list[str]


def inspect(specialisation: Specialisation, target: str) -> Finding:
    """Compile one kernel for one GPU and return what there is to say about it."""
    from triton.compiler.errors import CompilationError

    from benchmarks.gpu.compiling import compile_for
    from benchmarks.gpu.exactness import find_problems
    from benchmarks.gpu.roofline import cost_of

    try:
        code = compile_for(specialisation, target)
    except CompilationError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # errors in inlined functions are wrapped
            cause = cause.__cause__
        problem = f"does not compile: {' '.join(str(cause).split())[-300:]}"
        return Finding(specialisation.name, target, 0, math.nan, math.nan, [problem])
    problems = sorted(set(find_problems(code.assembly, target)))
    if code.resources.stack or code.resources.spills:
        problems.append(f"local memory: {code.resources.stack} bytes of stack, {code.resources.spills} of spills")
    try:
        cost = cost_of(specialisation, code)
    except ValueError:  # the usual path was not found: what has a budget is beyond it then
        return Finding(specialisation.name, target, code.resources.registers, math.nan, math.nan, problems)
    return Finding(specialisation.name, target, code.resources.registers, cost.instructions, cost.accessed, problems)


def inspect_all(recorded: Iterable[Recorded], targets: Iterable[str]) -> dict[tuple[str, str], Finding]:
    """Return findings by the identity of a launch and the GPU; compile on all processors."""
    launches: dict[str, Launch] = {}
    for operation in recorded:
        for launch in operation.launches:
            launches.setdefault(launch.identity, launch)
    jobs = [(identity, target) for identity in launches for target in targets]
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    findings = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        found = pool.map(inspect, [launches[identity] for identity, _ in jobs], [target for _, target in jobs])
        for number, (job, finding) in enumerate(zip(jobs, found, strict=True), 1):
            findings[job] = finding
            if number % 50 == 0 or finding.problems:
                print(f"{number} of {len(jobs)} kernels", _line(finding), sep="\n", file=sys.stderr, flush=True)
    return findings


def instructions_of(operation: Recorded, findings: dict[tuple[str, str], Finding], target: str) -> float:
    """Return the instructions an element of all launches of an operation, but for `begin`."""
    counted = [launch for launch in operation.launches if launch.function != "begin"]
    return sum(findings[launch.identity, target].instructions for launch in counted)


def beyond_budget(recorded: Iterable[Recorded], findings: dict[tuple[str, str], Finding]) -> Iterator[str]:
    """Yield the operations that take more instructions than they may, as sentences."""
    for operation in recorded:
        most = BUDGETS.get(operation.name)
        if most and operation.launches and (operation.launches[0].identity, "sm_90") in findings:
            count = instructions_of(operation, findings, "sm_90")
            if not count <= most:
                yield f"{operation.name}: {count:.0f} instructions an element, of at most {most}"


def moved_too_much(recorded: Iterable[Recorded], findings: dict[tuple[str, str], Finding]) -> Iterator[str]:
    """Yield the operations that move more bytes than they may, as sentences."""
    from benchmarks.gpu.roofline import GPUS, fits_in_cache

    for operation in recorded:
        least = operation.bytes + operation.scratch
        if operation.moved > MOST_MOVED * least:
            yield f"{operation.name}: {operation.moved:.1f} bytes an element, of at least {least:g}"
        for launch, (name, gpu) in product(operation.launches, GPUS.items()):
            finding = findings.get((launch.identity, gpu.target))
            if launch.takes_whole_blocks and finding is not None and not operation.is_simple:
                block = READ_OF_BLOCK * launch.row * int(launch.constexprs["R"])
                if not fits_in_cache(gpu, block, finding.registers, launch.num_warps):
                    yield f"{operation.name}: blocks in work do not fit in the cache of the {name}"


@dataclass(frozen=True)
class Options:
    """Compile the GPU kernels and look at the code."""

    only: str = ""
    """Names of the operations must match this regular expression."""
    kernels: str = ""
    """Names of their kernels must match this regular expression."""
    targets: tuple[str, ...] = ALL
    """GPUs to compile for."""
    quick: bool = False
    """Compile only operations that have a budget."""
    json: Path | None = None
    """Write the findings there, too."""


def main(options: Options) -> int:
    os.environ.pop("TRITON_INTERPRET", None)  # it would take the compiler's place
    recorded = [
        replace(r, launches=[launch for launch in r.launches if re.search(options.kernels, launch.function)])
        for r in record_in_child(options.quick, options.only)
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        findings = inspect_all(recorded, options.targets)
    for operation in recorded:
        scratch = f" and {operation.scratch:g} of scratch" if operation.scratch else ""
        print(f"{operation.name}: {operation.moved:.2f} bytes an element, at least {operation.bytes:g}{scratch}")
        for launch in operation.launches:
            print(*(_line(findings[launch.identity, target]) for target in options.targets), sep="\n")
    broken = [*beyond_budget(recorded, findings), *moved_too_much(recorded, findings)]
    print(*broken, sep="\n")
    if options.json is not None:
        named = [asdict(f) for f in findings.values()]
        counted = {r.name: instructions_of(r, findings, t) for r in recorded for t in options.targets if t == "sm_90"}
        moved = {r.name: (r.moved, r.bytes, r.scratch) for r in recorded}
        found = {"findings": named, "instructions": counted, "moved": moved, "beyond": broken}
        options.json.write_text(json.dumps(found), encoding="utf-8")
    wrong = sum(bool(f.problems) for f in findings.values())
    print(f"{wrong} of {len(findings)} kernels have problems, {len(broken)} operations are beyond their budget")
    return 1 if wrong or broken or not findings else 0


def _line(f: Finding) -> str:
    text = f"    {f.name:20} {f.target:7} {f.registers:4} registers {f.instructions:7.1f} instructions {f.accessed:6.2f} bytes"
    return "\n".join([text, *(f"        {problem}" for problem in f.problems[:5])])


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.gpu_code")))
