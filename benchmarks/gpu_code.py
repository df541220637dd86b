"""``python -m benchmarks.gpu_code``: compile the kernels that `qlangevin.gpu` launches, and look at the code. Needs no GPU.

Every kernel with every set of constants is compiled for every GPU of `gpu.compiling.TARGETS`. The code must compute what the
source says (`gpu.exactness`), keep everything in registers, and stay within the budget of instructions, if there is one.
``--only`` and ``--targets`` choose. Output is a table; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:  # triton is imported when the environment is right
    from benchmarks.gpu.compiling import Specialisation

__all__ = ["BUDGETS", "QUICK", "Finding", "inspect", "specialisations"]

ALL = ("sm_80", "sm_90", "sm_100", "gfx942")
# Instructions an element on sm_90, by the name of the specialisation.
BUDGETS = {
    r"sgld.*fixed8": 120,
    r"sgld.*bfp8.*row": 180,
    r"quantize.*stochastic": 60,
}
QUICK = "|".join(BUDGETS)  # what the tests compile each time
MOST_BYTES = 1.1  # accessed, over those that have to be moved


@dataclass(frozen=True)
class Finding:
    """One kernel on one GPU."""

    name: str
    target: str
    registers: int
    instructions: float  # an element
    bytes: float  # an element, that have to be moved
    accessed: float
    problems: list[str]


def specialisations(only: str = "") -> list[Specialisation]:
    """Return the kernels and constants that `qlangevin.gpu` launches, those whose name matches a pattern."""
    from qlangevin import gpu

    return [s for s in gpu.specialisations() if re.search(only, s.name)]


def inspect(specialisation: Specialisation, target: str) -> Finding:
    """Compile one kernel for one GPU and return what there is to say about it."""
    from benchmarks.gpu.compiling import compile_for
    from benchmarks.gpu.exactness import find_problems
    from benchmarks.gpu.roofline import cost_of

    code = compile_for(specialisation, target)
    problems = sorted(set(find_problems(code.assembly, target)))
    if code.resources.stack or code.resources.spills:
        problems.append(f"local memory: {code.resources.stack} bytes of stack, {code.resources.spills} of spills")
    cost = cost_of(specialisation, code)
    if target == "sm_90":
        problems.extend(_beyond_budget(specialisation.name, cost.instructions))
    return Finding(
        specialisation.name, target, code.resources.registers, cost.instructions, cost.bytes, cost.accessed, problems
    )


def _beyond_budget(name: str, instructions: float) -> Iterator[str]:
    for pattern, most in BUDGETS.items():
        if re.search(pattern, name) and instructions > most:
            yield f"{instructions:.0f} instructions an element, of at most {most}"


@dataclass(frozen=True)
class Options:
    """Compile the GPU kernels and look at the code."""

    only: str = ""
    """Names of the kernels must match this regular expression."""
    targets: tuple[str, ...] = ALL
    """GPUs to compile for."""
    json: Path | None = None
    """Write the findings there, too."""


def main(options: Options) -> int:
    os.environ.pop("TRITON_INTERPRET", None)  # it would take the compiler's place
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        findings = [inspect(s, target) for s in specialisations(options.only) for target in options.targets]
    for f in findings:
        code = f"{f.registers:4} registers {f.instructions:7.1f} instructions"
        print(f"{f.name:60} {f.target:7} {code} {f.bytes:6.2f} bytes ({f.accessed:.2f} accessed)")
        print(*(f"    {problem}\n" for problem in f.problems[:5]), sep="", end="")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(f) for f in findings]), encoding="utf-8")
    wrong = sum(bool(f.problems) for f in findings)
    print(f"{wrong} of {len(findings)} have problems")
    return 1 if wrong or not findings else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.gpu_code")))
