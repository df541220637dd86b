"""``python -m benchmarks.gpu_cost``: estimated times of steps on GPUs, from their compiled code; the tables of docs/gpu-cost.md.

Needs no GPU, and measures nothing. Instructions are counted on the machine code (`gpu.paths`), times follow from them and from
the published figures of three GPUs (`gpu.roofline`). ``--write docs/gpu-cost.md`` writes the tables into that page.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

if TYPE_CHECKING:  # triton is imported when the environment is right
    from benchmarks.gpu.compiling import Specialisation
    from benchmarks.gpu.roofline import Cost, Gpu

SIZES = {"ResNet-18, 11.17M weights": 11.17e6, "7 billion weights": 7e9}
# What the tables show: a name for people, and that of the operation in `gpu.operations`.
SHOWN = {
    "VC SGLDLP-L step on codes, `fixed8`, Gaussian noise": "step on codes, fixed8.6",
    "VC SGLDLP-L step on codes, `bfp8`, rows of 2304": "step on codes, bfp8, rows of 2304",
    "`quantize`, stochastic, `fixed8`": "quantize, stochastic, fixed8.6, float32",
    "`quantize`, stochastic, `bfp8`, rows of 2304": "quantize, stochastic, bfp8, rows of 2304, float32",
}
MARK = re.compile(r"(<!-- tables -->\n).*(<!-- end of tables -->)", re.DOTALL)


@dataclass(frozen=True)
class Options:
    """Estimate the time of a step on GPUs."""

    write: Path | None = None
    """Write the tables into this page, between its marks."""


@dataclass(frozen=True)
class Line:
    """A kernel, and its cost on each GPU."""

    name: str
    costs: Mapping[str, Cost]


def lines() -> list[Line]:
    """Compile what is shown, and what it is compared with."""
    from benchmarks.gpu.compiling import compile_for
    from benchmarks.gpu.recording import record_in_child
    from benchmarks.gpu.references import SGD, randn
    from benchmarks.gpu.roofline import GPUS, cost_of, together

    ours = {operation.name: operation for operation in record_in_child(quick=True)}
    shown = []
    for name, key in SHOWN.items():
        launches, size = ours[key].launches, ours[key].bytes
        shown.append(
            Line(
                name, {g: together([cost_of(x, compile_for(x, GPUS[g].target)) for x in launches], size) for g in GPUS}
            )
        )
    others: dict[str, Callable[[str], Specialisation]] = {
        "`torch.randn`: Philox4x32-10, Box-Muller": randn,
        "plain SGD, FP32": lambda target: SGD,
    }
    for name, make in others.items():
        made = {g: make(GPUS[g].target) for g in GPUS}
        shown.append(Line(name, {g: cost_of(x, compile_for(x, GPUS[g].target)) for g, x in made.items()}))
    return shown


def tables(rows: list[Line], gpus: Mapping[str, Gpu]) -> str:
    """Return the tables as markdown: instructions and bytes, then the times for each size."""
    targets = " | ".join(f"{gpu} ({g.target})" for gpu, g in gpus.items())
    parts = ["### Instructions and bytes a weight\n", f"| | {targets} | bytes |", "|---" * (len(gpus) + 2) + "|"]
    for row in rows:
        counts = " | ".join(f"{row.costs[gpu].instructions:.0f}" for gpu in gpus)
        parts.append(f"| {row.name} | {counts} | {next(iter(row.costs.values())).bytes:.3g} |")
    for title, elements in SIZES.items():
        parts += [f"\n### {title}: estimated time\n", f"| | {' | '.join(gpus)} |", "|---" * (len(gpus) + 1) + "|"]
        parts += [
            f"| {row.name} | {' | '.join(_cell(row.costs[g], gpus[g], elements) for g in gpus)} |" for row in rows
        ]
    return "\n".join(parts) + "\n"


def _cell(cost: Cost, gpu: Gpu, elements: float) -> str:
    from benchmarks.gpu.roofline import estimate_seconds, limit_of

    seconds = estimate_seconds(cost, gpu, elements)
    text = f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
    return f"{text}, {limit_of(cost, gpu)}"


def main(options: Options) -> int:
    os.environ.pop("TRITON_INTERPRET", None)  # it would take the compiler's place
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        rows = lines()
    from benchmarks.gpu.roofline import GPUS

    text = tables(rows, GPUS)
    print(text)
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(MARK.sub(lambda m: f"{m[1]}\n{text}\n{m[2]}", page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.gpu_cost")))
