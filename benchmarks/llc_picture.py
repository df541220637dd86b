"""The picture and the table of `llc_truths`, from its rows.

python -m benchmarks.llc_picture docs/results/llc
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw", "write_table"]

COLOURS = {"fp32": "#7a7a7a", "bf16": "#0072b2", "bfp8": "#009e73", "bfp8/16": "#cc79a7"}
SPREAD = 1.04  # between points that share a stepsize
Rows = Sequence[dict[str, Any]]


def draw(rows: Rows, path: Path) -> None:
    """Draw LLC against the stepsize, a panel for each problem: λ as a line, and what a chain without rounding has."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["problem"] for row in rows))
    height = math.ceil((len(names) + 1) / 2)
    figure = Figure(figsize=(9, 2.7 * height), layout="constrained")
    axes: Any = figure.subplots(height, 2, squeeze=False)
    for ax, name in zip(axes.flat, names, strict=False):
        ax.set(xscale="log", title=name, xlabel="lr (ε)", ylabel="LLC")
        _draw_problem(ax, [row for row in rows if row["problem"] == name and row["llc"] is not None])
    for ax in axes.flat[len(names) :]:
        ax.axis("off")
    axes.flat[len(names)].legend(*axes.flat[0].get_legend_handles_labels(), loc="center", frameon=False)
    figure.savefig(path, dpi=130)


def _draw_problem(ax: Any, rows: Rows) -> None:
    ax.axhline(rows[0]["coefficient"], color="k", lw=1, label="λ")
    expected = {row["lr"]: row["expected"] for row in rows}
    ax.plot([*expected], [*expected.values()], "k:", lw=1.5, label="no rounding, at this ε, nβ and γ")
    for i, (library, format) in enumerate(dict.fromkeys((row["library"], row["format"]) for row in rows)):
        some = [row for row in rows if (row["library"], row["format"]) == (library, format)]
        ax.errorbar(
            [row["lr"] * SPREAD ** (i - 2) for row in some], [row["llc"] for row in some],
            [row["stderr"] for row in some], color=COLOURS[format], ms=4, lw=1, capsize=2,
            fmt="o-" if library == "qlangevin" else "v--", label=f"{library} {format}",
        )  # fmt: skip
    lrs = sorted(expected)
    ax.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
    ax.minorticks_off()
    if max(row["llc"] / row["expected"] for row in rows) > 3:
        ax.set_yscale("log")
        ax.set_yticks(
            ticks := [t for t in (5, 10, 20, 50, 100, 200, 500) if t < 1.5 * max(r["llc"] for r in rows)], ticks
        )


def write_table(rows: Rows) -> str:
    """Return the table in Markdown: a row for each problem and stepsize, a column for each library and format."""
    kinds = list(dict.fromkeys((row["library"], row["format"]) for row in rows))
    head = ["model", "λ", "ε", "no rounding", *(f"{library} {format}" for library, format in kinds)]
    lines = [head, ["---"] * len(head)]
    for name, lr in dict.fromkeys((row["problem"], row["lr"]) for row in rows):
        some = {(r["library"], r["format"]): r for r in rows if (r["problem"], r["lr"]) == (name, lr)}
        first = next(iter(some.values()))
        error = f" ± {first['expected_stderr']:.2f}" if first["expected_stderr"] else ""
        cells = [_cell(some[kind]) for kind in kinds]
        lines.append([name, f"{first['coefficient']:g}", f"{lr:g}", f"{first['expected']:.2f}{error}", *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row: dict[str, Any]) -> str:
    return "not finite" if row["llc"] is None else f"{row['llc']:.2f} ± {row['stderr']:.2f}"


def main(folder: Path) -> None:
    rows = json.loads((folder / "truths.json").read_text())["rows"]
    (folder / "truths.md").write_text(write_table(rows))
    draw(rows, folder / "truths.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
