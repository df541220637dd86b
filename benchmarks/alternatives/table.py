"""Tables of scores, and which of their differences chance does not explain.

    python -m benchmarks.alternatives.table docs/results/alternatives/cifar10.json [FILE ...]

Files of the same experiment with other rows or seeds are put together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from qlangevin.experiments.report.differences import lower
from qlangevin.experiments.report.summary import Estimate, estimate

__all__ = ["Rows", "differences", "merge", "table"]

Rows: TypeAlias = dict[str, dict[str, dict[str, float]]]  # row, seed, score


class Column(NamedTuple):
    """A score: its heading, and how its numbers are written."""

    heading: str
    factor: float
    decimals: int

    def text(self, values: Estimate) -> str:
        """Write the mean over the seeds, with its standard error."""
        mean, error = (None if v is None else f"{self.factor * v:.{self.decimals}f}" for v in values[:2])
        return f"{mean} ± {error}" if error else f"{mean}"


COLUMNS = {
    "error": Column("error, %", 100.0, 2),
    "nll": Column("NLL", 1.0, 4),
    "ece": Column("ECE, %", 100.0, 2),
    "auroc": Column("AUROC", 1.0, 3),
}


def merge(files: list[dict[str, Any]]) -> Rows:
    """Return the rows of several results together. Raises ValueError if their settings differ in more than the seed."""
    rows: Rows = {}
    for content in files:
        settings, first = ({**f["settings"], "seed": None} for f in (content, files[0]))
        if wrong := [name for name in first if settings.get(name) != first[name]]:
            raise ValueError(f"results of other settings cannot be put together: they differ in {', '.join(wrong)}")
        for row, seeds in content["rows"].items():
            rows.setdefault(row, {}).update(seeds)
    return rows


def _estimates(rows: Rows) -> dict[str, dict[str, Estimate]]:
    """Return the estimate of each score of each row, the least NLL first."""
    names = [name for name in COLUMNS if all(name in s for seeds in rows.values() for s in seeds.values())]
    found = {row: {name: estimate([s[name] for s in seeds.values()]) for name in names} for row, seeds in rows.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]["nll"].mean))


def table(rows: Rows) -> str:
    """Return a table in Markdown, the least NLL first."""
    found = _estimates(rows)
    headings = [COLUMNS[name].heading for name in next(iter(found.values()))]
    lines = ["| | " + " | ".join([*headings, "samples", "kB", "gradient steps"]) + " |"]
    lines.append("|---" * (len(headings) + 4) + "|")
    for row, scores in found.items():
        costs = next(iter(rows[row].values()))
        cells = [COLUMNS[name].text(values) for name, values in scores.items()]
        cells += [f"{costs['samples']}", f"{costs['bytes'] / 1000:,.0f}", f"{costs['steps']:,}"]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def differences(rows: Rows) -> str:
    """Return, for each score and row, the rows that are above it by more than chance explains; rows by their place."""
    found = list(_estimates(rows).items())
    lines = []
    for name in found[0][1]:
        above = {
            place: [str(k) for k, (_, b) in enumerate(found, 1) if lower(a[name], b[name]) == "holds"]
            for place, (_, a) in enumerate(found, 1)
        }
        words = [f"{place} < {' '.join(others)}" for place, others in above.items() if others]
        lines.append(f"{COLUMNS[name].heading}: {'; '.join(words) or 'none'}")
    return "\n".join(lines)


def main() -> None:
    """Print the table of saved scores and the differences that count."""
    parser = argparse.ArgumentParser(prog="alternatives.table", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    rows = merge([json.loads(path.read_text()) for path in parser.parse_args().files])
    print(table(rows))
    print("\nDifferences that count, rows numbered from above:")
    print(differences(rows))


if __name__ == "__main__":
    main()
