"""``python -m benchmarks.run``: measure, print tables, and report which goals are reached.

The exit code is 1 if our rounding differs from qtorch's without a known reason. Goals that are missed are only reported,
because a busy machine can miss them all.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, Literal, get_args

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from qlangevin import native

from . import (
    agreement,
    averaging,
    baselines,
    coarsening,
    memory,
    quantizers,
    samplers,
    scaling,
    steps,
    storage,
    training,
    users,
    whole,
)
from .timing import Row, machine

Part = Literal[
    "steps",
    "samplers",
    "quantizers",
    "training",
    "memory",
    "users",
    "storage",
    "averaging",
    "whole",
    "scaling",
    "agreement",
    "coarsening",
]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Options:
    """Time qlangevin against its baselines; all take turns in one run, and their ratios are what counts."""

    quick: bool = False
    """A tenth of the time, where possible; ratios are rougher, and the largest of the training steps is left out."""
    json: bool = False
    """Print one JSON object instead of tables."""
    only: tuple[Part, ...] = PARTS
    """The parts to run."""
    level: str | None = None
    """Use the kernels of another instruction set, such as avx2; for torch's own kernels set ATEN_CPU_CAPABILITY."""


def main(options: Options) -> int:
    """Run the parts, print each as it is done, and return the exit code."""
    if options.level is not None:
        native.use_level(options.level)
    console = Console(quiet=options.json, width=None if sys.stdout.isatty() else 130)
    messages = Console(stderr=True, soft_wrap=True)
    about = machine()
    console.print("  ".join(f"{name}: {value}" for name, value in about.items()), highlight=False, soft_wrap=True)
    if not native.available:
        messages.print("the native kernels are not installed: their times are left out")
    qtorch = import_qtorch(messages) if {"quantizers", "agreement"} & set(options.only) else None

    rows = timings(options, qtorch, console)
    result: dict[str, Any] = {"machine": about, "rows": [row.as_json() for row in rows]}
    unexplained = 0
    if "agreement" in options.only and qtorch is not None:
        found = agreement.run(qtorch, options.quick)
        unexplained = sum(a.different[agreement.UNEXPLAINED] for a in found)
        result["agreement"] = [asdict(a) for a in found]
        console.print(agreement_table(found))
    if "coarsening" in options.only:
        blocks, spreads = coarsening.run(options.quick)
        result |= {"coarsening": [asdict(b) for b in blocks], "spread": [asdict(s) for s in spreads]}
        console.print(coarsening_table(blocks, spreads))
    missed = [row for row in rows if row.reached is False]
    console.print(f"goals reached: {sum(row.reached is True for row in rows)}, missed: {len(missed)}", highlight=False)
    if options.json:
        print(json.dumps(result, indent=2))
    if unexplained:
        messages.print(f"{unexplained} numbers are rounded otherwise than by qtorch, for no known reason")
    return 1 if unexplained else 0


def import_qtorch(messages: Console) -> ModuleType | None:
    """Return qtorch's quantizers; None, with a message, if qtorch cannot be imported."""
    messages.print("qtorch compiles itself the first time, which takes half a minute")
    quant = baselines.import_baseline("qtorch.quant")
    if isinstance(quant, str):
        messages.print(f"qtorch cannot be imported, so nothing is compared with it: {quant}")
        return None
    return quant


def timings(options: Options, qtorch: ModuleType | None, console: Console) -> list[Row]:
    """Run the parts that are compared with a baseline or a goal; print a table for each group of rows."""
    scale = 0.1 if options.quick else 1.0
    rows: list[Row] = []
    for part in (p for p in PARTS if p in options.only):
        if part == "steps" and native.available:
            rows += steps.run(100 * scale)
        elif part == "samplers" and native.available:
            rows += samplers.run(60 * scale)
        elif part == "quantizers" and native.available:
            rows += quantizers.run(60 * scale, qtorch)
        elif part == "training" and native.available:
            rows += training.run(400 * scale, options.quick)
        elif part == "memory" and native.available:
            rows += memory.run(options.quick)
        elif part == "users" and native.available:
            rows += users.run(300 * scale, options.quick)
        elif part == "storage":
            rows += storage.run(60 * scale, options.quick)
        elif part == "averaging":
            rows += averaging.run(60 * scale, options.quick)
        elif part == "whole":
            rows += whole.run(2 if options.quick else 7)
        elif part == "scaling":
            rows += scaling.run(240 * scale, options.quick)
    for group in dict.fromkeys(row.group for row in rows):
        console.print(timing_table(group, [row for row in rows if row.group == group]))
    return rows


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 or name == "baseline" else "right", no_wrap=True)
    return table


def timing_table(group: str, rows: list[Row]) -> Table:
    table = new_table(group, "what", "ours", "baseline", "theirs", "ratio", "goal", "reached")
    for row in rows:
        table.add_row(*row.cells())
    return table


def agreement_table(found: list[agreement.Agreement]) -> Table:
    classes = list(dict.fromkeys(label for a in found for label in a.different))
    classes.sort(key=lambda label: label == agreement.UNEXPLAINED)
    table = new_table("nearest rounding, where it differs from qtorch's", "format", "compared", *classes)
    for a in found:
        table.add_row(a.format, str(a.compared), *(str(a.different.get(label, "")) for label in classes))
    return table


def coarsening_table(blocks: list[coarsening.Coarsening], spreads: list[coarsening.Spread]) -> Table:
    title = f"blocks of {coarsening.FORMAT} on a coarser grid than Δ(μ)"
    table = new_table(title, "variance", "if endless, beyond ±N", "ours", "by the headroom rule")
    for b in blocks:
        table.add_row(f"{b.c:g} v₀", f"{b.must:.2%}", f"{b.exact:.2%}", f"{b.headroom:.2%}")
    table.caption_justify, table.caption_style, table.title_style = "left", "", ""
    table.caption = "variance over target, largest coordinates just below a power of two:" + "".join(
        f"\n{s.near_top} such, {s.c:g} v₀: ours {s.exact:.3f}, Algorithm 5 as printed {s.paper:.3f}" for s in spreads
    )
    return table


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.run", config=(tyro.conf.FlagCreatePairsOff,))))
