"""Group results by experiment, method and format; estimate each score as mean and standard error over the seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ..config import MAY_DIFFER_IN_SEEDS
from ..methods import METHODS, method_name
from ..results import LATER, Result
from .paper import FAMILIES, ROWS, TITLES

__all__ = [
    "SCORES", "Cell", "Cells", "Estimate", "Score", "by_cell", "by_experiment", "estimate", "family", "fractional_bits",
    "method_name", "mixtures", "score", "scores", "shown_formats", "sweep", "title",
]  # fmt: skip

Cell: TypeAlias = tuple[str, str]  # (method, format)
Cells: TypeAlias = dict[Cell, list[Result]]  # of one experiment; the runs of a cell differ in the seed

ENOUGH = 3  # widths that make a curve
ORDER = tuple(dict.fromkeys((*ROWS["fp32"], *ROWS["bfp8"], *METHODS)))


class Estimate(NamedTuple):
    """A mean over seeds and its standard error, which a single seed does not have."""

    mean: float
    error: float | None
    seeds: int


@dataclass(frozen=True)
class Score:
    """Name of a score, and the format of its numbers."""

    title: str
    percent: bool = False
    digits: int = 4

    @property
    def label(self) -> str:
        return f"{self.title} (%)" if self.percent else self.title

    def number(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:.2f}"
        return f"{value:.{self.digits}f}" if value < 10 else f"{value:.4g}"

    def bare(self, e: Estimate) -> str:
        if e.error is None:
            return self.number(e.mean)
        error = self.number(e.error)
        if float(error) == 0 < e.error:  # shown with a digit that is not zero
            small = e.error * (100 if self.percent else 1)
            error = f"{small:.{-math.floor(math.log10(small))}f}"
        return f"{self.number(e.mean)} ± {error}"

    def text(self, e: Estimate | None) -> str:
        """Return mean ± standard error (seeds)."""
        return "—" if e is None else f"{self.bare(e)} ({e.seeds})"


SCORES = {
    "nll": Score("NLL"),
    "error": Score("error", percent=True),
    "ece": Score("ECE", percent=True),
    "brier": Score("Brier score"),
    "top5": Score("top-5 error", percent=True),
}


def estimate(values: Sequence[float]) -> Estimate:
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n), n)


def score(runs: Iterable[Result], name: str, of: str = "scores") -> Estimate | None:
    """Estimate a score over the runs that have it; None if none has. ``of="single"`` is that of the last sample alone."""
    found = [(run.get(of) or {}).get(name) for run in runs]
    values = [value for value in found if value is not None]
    return estimate(values) if values else None


def scores(cells: Cells, method: str, name: str) -> dict[str, Estimate]:
    """Estimate a method's score in each format."""
    found = {format: score(runs, name) for (m, format), runs in cells.items() if m == method}
    return {format: e for format, e in found.items() if e is not None}


def title(experiment: str) -> str:
    return TITLES.get(experiment, experiment)


def family(format: str) -> str:
    """Return the family of a format, a group of the paper's tables: all 8-bit fixed points, all 8-bit block floating points."""
    if re.fullmatch(r"fixed8\.-?\d+", format):
        return "fixed8"
    return "bfp8" if re.fullmatch(r"bfp8(e\d+)?(/\w+)?", format) else format


def fractional_bits(format: str) -> int | None:
    match = re.fullmatch(r"fixed\d+\.(-?\d+)", format)
    return int(match[1]) if match else None


def _integer_bits(format: str) -> int | None:
    match = re.fullmatch(r"fixed(\d+)\.(-?\d+)", format)
    return int(match[1]) - int(match[2]) if match else None


def _rank(known: Iterable[str], name: str) -> tuple[int, str]:
    order = list(known)
    return (order.index(name) if name in order else len(order), name)


def by_experiment(results: Iterable[Result]) -> dict[str, Cells]:
    """Group results by experiment, in the paper's order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result["experiment"], []).append(result)
    return {name: by_cell(found[name]) for name in sorted(found, key=lambda name: _rank(TITLES, name))}


def by_cell(results: Iterable[Result]) -> Cells:
    """Group results by method and format: full precision, fixed point, block floating point, others; methods as in the paper."""
    cells: Cells = {}
    for result in sorted(results, key=lambda result: result["settings"]["seed"]):
        settings = result["settings"]
        cells.setdefault((settings["method"], settings["format"]), []).append(result)

    def sort_key(cell: Cell) -> Any:
        method, format = cell
        return _rank(FAMILIES, family(format)), fractional_bits(format) or 0, format, _rank(ORDER, method)

    return {cell: cells[cell] for cell in sorted(cells, key=sort_key)}


def sweep(cells: Cells) -> dict[int, str]:
    """Return the formats of a sweep over fractional bits, narrowest first; empty if it has fewer than three.

    Widths are comparable if the integer bits are the same: the most frequent ones count.
    """
    groups: dict[int, dict[int, str]] = {}
    for _, format in cells:
        integer, bits = _integer_bits(format), fractional_bits(format)
        if integer is not None and bits is not None:
            groups.setdefault(integer, {})[bits] = format
    best = max(groups.values(), key=len, default={})
    return dict(sorted(best.items())) if len(best) >= ENOUGH else {}


def shown_formats(cells: Cells) -> list[str]:
    """Return the low-precision formats that get figures of their own: of a sweep only the one nearest to 8 bits."""
    swept = set(sweep(cells).values())
    formats = list(dict.fromkeys(format for _, format in cells if format != "fp32"))
    shown = [format for format in formats if format not in swept]
    if swept:
        shown.insert(0, min((f for f in formats if f in swept), key=lambda f: abs(int(f[5:].split(".")[0]) - 8)))
    return shown


def mixtures(cells: Cells) -> list[str]:
    """Describe the cells whose runs differ in more than the seed."""
    lines = []
    for (method, format), runs in cells.items():
        settings = [run["settings"] for run in runs]
        names = dict.fromkeys(name for s in settings for name in s if name not in MAY_DIFFER_IN_SEEDS)
        odd = [f"{name} ({', '.join(values)})" for name in names if len(values := _values(settings, name)) > 1]
        if odd:
            lines.append(f"{method_name(method)} in {format} is averaged over runs with different {', '.join(odd)}")
    return lines


def _values(settings: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(str(s.get(name, LATER.get(name, "absent"))) for s in settings))
