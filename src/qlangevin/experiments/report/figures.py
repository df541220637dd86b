"""Figures of results: scores against fractional bits, scores side by side, calibration, chains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from .looks import FRAME, label, look, styled, window
from .results import Result, chains_of
from .summary import SCORES, Cell, Cells, Estimate, Score, method_name, score, scores, sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Row", "curves", "dots", "reliability", "rows", "trace"]

WIDTH = 5.4  # inches: fonts stay legible on a telephone
COLUMNS = 3
WIDE = 1.5  # times the best: beyond it the best are shown once more, enlarged
LOGARITHMIC = 5  # times the best: beyond it the axis of all points is logarithmic
NEAR = 1.3  # times the best: the most that is enlarged


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _error(e: Estimate, scale: float = 1.0) -> float:
    return scale * (e.error or 0.0)


@styled
def curves(cells: Cells, name: str) -> Figure:
    """A score against fractional bits, a line for each method; full precision as horizontal lines.

    If the scores are of different size, once all of them and once enlarged near the best.
    """
    widths, scale = sweep(cells), 100 if SCORES[name].percent else 1
    lines = {
        m: _line(cells, m, name, widths, scale) for m in dict.fromkeys(m for m, f in cells if f in widths.values())
    }
    flat = {m: e.mean * scale for m in dict.fromkeys(m for m, _ in cells) if (e := scores(cells, m, name).get("fp32"))}
    values = [y for line in lines.values() for _, y, _ in line] + list(flat.values())
    wide = max(values) > WIDE * min(values)
    figure = _figure(5.8 if wide else 3.6)
    axes = figure.subplots(2 if wide else 1, 1, sharex=True, squeeze=False)[:, 0]
    for ax in axes:
        _lines(ax, lines, flat)
        ax.set_ylabel(f"test {SCORES[name].label}")
    axes[-1].set_xlabel("fractional bits")
    axes[-1].set_xticks(list(widths))
    if wide:
        _enlarge(axes[0], axes[1], values, lines, flat)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, handlelength=3)
    return figure


def _line(cells: Cells, method: str, name: str, widths: dict[int, str], scale: float) -> list[tuple[int, float, float]]:
    """(bits, score, standard error)"""
    found = scores(cells, method, name)
    return [(b, found[f].mean * scale, _error(found[f], scale)) for b, f in widths.items() if f in found]


def _lines(ax: Axes, lines: Mapping[str, list[tuple[int, float, float]]], flat: Mapping[str, float]) -> None:
    for method, line in lines.items():
        if line:
            x, y, error = zip(*line, strict=True)
            colour, dash, marker = look(method)
            ax.errorbar(
                x, y, error, color=colour, linestyle=dash, marker=marker, markersize=4.5, linewidth=1.6, capsize=2.5,
                label=label(method_name(method)),
            )  # fmt: skip
    for method, height in flat.items():
        colour, dash, _ = look(method)
        ax.axhline(height, color=colour, linestyle=dash, linewidth=1.2, label=label(method_name(method)), zorder=1)
    ax.grid(axis="y")


def _enlarge(
    whole: Axes,
    near: Axes,
    values: list[float],
    lines: Mapping[str, list[tuple[int, float, float]]],
    flat: Mapping[str, float],
) -> None:
    """The upper axis holds everything, the lower what is near the best or full precision; a triangle is above its frame."""
    if max(values) > LOGARITHMIC * min(values) > 0:
        whole.set_yscale("log", subs=(2, 5))
        whole.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        whole.yaxis.set_minor_formatter(lambda y, _: f"{y:g}")
    whole.set_title("all points")
    best, high = min(values), window(values)[1]
    high = min(high, NEAR * best) if best > 0 else high
    high = max([high, *(best + 1.3 * (level - best) for level in flat.values())])
    near.set_ylim(best - 0.08 * (high - best), high)
    near.set_title("enlarged: near the best (a triangle is a point above the frame)")
    for i, (method, line) in enumerate(lines.items()):
        if above := [x + 0.13 * (i - (len(lines) - 1) / 2) for x, y, _ in line if y > high]:  # side by side
            near.plot(above, [high] * len(above), "^", color=look(method).colour, markersize=5, clip_on=False, zorder=5)


@dataclass(frozen=True)
class Row:
    """A line of `dots`: what it is of, and a value for each panel; ``hollow`` is a second one, drawn as a ring."""

    method: str
    group: str
    values: tuple[Estimate | None, ...]
    hollow: tuple[float | None, ...]


def rows(cells: Cells, names: Sequence[str]) -> list[Row]:
    """Scores of all cells, and as rings those of the last sample alone where more than one was averaged."""
    found = []
    for (method, format), runs in cells.items():
        several = any(run["samples"] > 1 for run in runs)
        single = [score(runs, name, "single") if several else None for name in names]
        values = tuple(score(runs, name) for name in names)
        found.append(Row(method, format, values, tuple(e.mean if e else None for e in single)))
    return found


@styled
def dots(rows: Sequence[Row], panels: Sequence[Score], zero: bool = False) -> Figure:
    """A panel for each score, from zero on or not, a line for each row; the rows of a group under its name.

    The dotted line goes through the first row, which is SGLD in full precision where that was run.
    """
    places, ticks, y = [], [], 0.0
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1].group != row.group:
            ticks.append((y, label(row.group), True))
            y += 1
        ticks.append((y, label(method_name(row.method), 22), False))
        places.append(y)
        y += 1
    figure = _figure(0.75 + 0.23 * y)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for i, (ax, panel) in enumerate(zip(axes, panels, strict=True)):
        _dots(ax, panel, [(p, r.method, r.values[i], r.hollow[i]) for p, r in zip(places, rows, strict=True)])
        if zero:
            ax.set_xlim(0, 1.02 * ax.get_xlim()[1])
        elif (first := rows[0].values[i]) and rows[0].method == "sgldfp":
            ax.axvline(first.mean * (100 if panel.percent else 1), color=FRAME, linestyle=":", linewidth=1, zorder=0)
    axes[0].set_ylim(y - 0.4, -0.6)
    axes[0].set_yticks([place for place, _, _ in ticks], [text for _, text, _ in ticks])
    for tick, (_, _, heading) in zip(axes[0].get_yticklabels(), ticks, strict=True):
        tick.set_fontweight("bold" if heading else "normal")
    return figure


def _dots(ax: Axes, panel: Score, points: Sequence[tuple[float, str, Estimate | None, float | None]]) -> None:
    scale = 100 if panel.percent else 1
    ends = [v for _, _, e, _ in points if e for v in (e.mean - _error(e), e.mean + _error(e))]
    low, high = window([v * scale for v in (*ends, *(ring for *_, ring in points if ring is not None))] or [0.0])
    for y, method, e, ring in points:
        colour, _, marker = look(method)
        if ring is not None and ring * scale <= high:
            ax.plot(ring * scale, y, marker="o", markerfacecolor="none", color=colour, markersize=5.5, zorder=2)
        if e is None:
            continue
        if e.mean * scale > high:
            ax.plot(high, y, marker=">", color=colour, clip_on=False, zorder=4)
            ax.annotate(
                panel.number(e.mean), (high, y), (-6, 0), textcoords="offset points", ha="right", va="center", size=8
            )
        else:
            ax.errorbar(
                e.mean * scale, y, xerr=_error(e, scale), color=colour, marker=marker, markersize=5, capsize=2.5
            )
    ax.set_xlim(low, high)
    ax.set_title(panel.label)
    ax.locator_params(axis="x", nbins=4)
    ax.grid(axis="x")
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=8)


def _grid(count: int, height: float, **sharing: Any) -> tuple[Figure, list[Axes]]:
    """As many panels, three to a line."""
    columns = min(COLUMNS, count)
    lines = math.ceil(count / columns)
    figure = _figure(height * lines + 0.35)
    axes = list(figure.subplots(lines, columns, squeeze=False, **sharing).flat)
    for ax in axes[count:]:
        ax.remove()
    for i, ax in enumerate(axes[:count]):
        ax.tick_params(labelsize=8, labelbottom=i + columns >= count)
    return figure, axes[:count]


def _name(cell: Cell, cells: Mapping[Cell, Any]) -> str:
    """The method, and its format where the method alone does not say which."""
    name = label(method_name(cell[0]), 24)
    return name if sum(method == cell[0] for method, _ in cells) == 1 else f"{name}, {label(cell[1], 12)}"


@styled
def reliability(cells: Cells) -> Figure:
    """Accuracy against confidence, a panel for each cell, the bins of all its runs together."""
    figure, axes = _grid(len(cells), 1.8, sharex=True, sharey=True)
    for ax, (cell, runs) in zip(axes, cells.items(), strict=True):
        colour = look(cell[0]).colour
        ax.plot([0, 1], [0, 1], color=FRAME, linewidth=1, linestyle=":")
        for points in _pooled(runs):
            x, y, share = zip(*points, strict=True)
            ax.plot(x, y, color=colour, linewidth=1.1, alpha=0.6)
            ax.scatter(x, y, [8 + 90 * s for s in share], color=colour, linewidths=0, clip_on=False, zorder=3)
        ece = score(runs, "ece")
        ax.set_title(f"{_name(cell, cells)}\nECE {SCORES['ece'].bare(ece)} %" if ece else _name(cell, cells))
        ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), aspect="equal")
    figure.supxlabel("confidence", size=9)
    figure.supylabel("accuracy", size=9)
    return figure


def _pooled(runs: Sequence[Result]) -> list[list[tuple[float, float, float]]]:
    """(confidence, accuracy, share of the predictions) of each bin; runs with the same bins count as one."""
    lines: dict[tuple[float, ...], list[list[float]]] = {}
    for run in runs:
        bins = run["reliability"]
        sums = lines.setdefault(tuple(bins["edges"]), [[0.0, 0.0, 0.0] for _ in bins["counts"]])
        for sum, n, c, a in zip(sums, bins["counts"], bins["confidence"], bins["accuracy"], strict=True):
            sum[:] = sum[0] + n, sum[1] + n * (c or 0.0), sum[2] + n * (a or 0.0)
    totals = [math.fsum(n for n, _, _ in sums) for sums in lines.values()]
    pooled = [
        [(c / n, a / n, n / total) for n, c, a in sums if n] for sums, total in zip(lines.values(), totals, strict=True)
    ]
    return [points for points in pooled if points]


@styled
def trace(cells: Cells) -> Figure:
    """Mean test log-likelihood of each stored sample, a panel for each cell, a line for each chain of each run."""
    figure, axes = _grid(len(cells), 1.6, sharex=True)
    levels = {cell: [v for run in runs for v in run["trace"]["log_likelihood"]] for cell, runs in cells.items()}
    low, high = window([-v for values in levels.values() for v in values] or [0.0])
    for ax, (cell, runs) in zip(axes, cells.items(), strict=True):
        colour = look(cell[0]).colour
        for i, (x, y) in enumerate(line for run in runs for line in _chains(run)):
            ax.plot(
                x,
                y,
                color=colour,
                linewidth=1,
                marker="o" if len(x) < 3 else "",
                markersize=4,
                alpha=1 if i == 0 else 0.5,
            )
        inside = not levels[cell] or low <= -median(levels[cell]) <= high
        if inside:
            ax.set_ylim(-high, -low)
        else:
            ax.text(0.98, 0.04, "own scale", transform=ax.transAxes, ha="right", size=8, style="italic")
        ax.set_title(f"{_name(cell, cells)}\n{_convergence(runs)}")
        ax.locator_params(axis="x", nbins=3)
        ax.ticklabel_format(axis="y", useOffset=False)
        ax.grid(axis="y")
    figure.supxlabel("step", size=9)
    figure.supylabel("log-likelihood", size=9)
    return figure


def _chains(run: Result) -> Iterator[tuple[list[int], list[float]]]:
    """The trace of each chain."""
    ends = list(accumulate(chains_of(run), initial=0))
    for begin, end in pairwise(ends):
        yield run["trace"]["steps"][begin:end], run["trace"]["log_likelihood"][begin:end]


def _convergence(runs: Sequence[Result]) -> str:
    """R-hat and the effective sample size, the worst of the runs."""
    r_hat = [run["r_hat"] for run in runs if run.get("r_hat") is not None]
    ess = [run["ess"] for run in runs if run.get("ess") is not None]
    if max(run["samples"] for run in runs) == 1:
        return "a single sample"
    chains = max(len(chains_of(run)) for run in runs)
    over = f" of {chains} chains" if chains > 1 else ""
    parts = [f"R-hat{over} {max(r_hat):.2f}"] if r_hat else ["R-hat not known"]
    return ", ".join([*parts, *([f"ESS {min(ess):.0f}"] if ess else [])])
