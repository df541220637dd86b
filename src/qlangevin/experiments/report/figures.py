"""Figures of results: scores against fractional bits, scores side by side, calibration, chains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ..results import Result, chain_lengths
from .looks import FRAME, label, look, styled, window
from .summary import SCORES, Cell, Cells, Estimate, Score, method_name, score, scores, sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["ScoreRow", "draw_curves", "draw_dots", "draw_reliability", "draw_traces", "score_rows"]

WIDTH = 5.4  # inches: fonts stay legible on a phone
COLUMNS = 3
WIDE = 1.5  # times the best: beyond it the best are shown once more, enlarged
LOGARITHMIC = 5  # times the best: beyond it the axis of all points is logarithmic
NEAR = 1.3  # times the best: the most that is enlarged


def _new_figure(height: float) -> Figure:
    """Return an empty figure of the common width."""
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _error(e: Estimate, scale: float = 1.0) -> float:
    """Return the standard error, zero if it is not known."""
    return scale * (e.error or 0.0)


@styled
def draw_curves(cells: Cells, name: str) -> Figure:
    """Draw a score against fractional bits, a line for each method; full precision as horizontal lines.

    If the scores differ widely, draw all of them above and those near the best, enlarged, below.
    """
    widths, scale = sweep(cells), 100 if SCORES[name].percent else 1
    lines = {
        m: _line(cells, m, name, widths, scale) for m in dict.fromkeys(m for m, f in cells if f in widths.values())
    }
    flat = {m: e.mean * scale for m in dict.fromkeys(m for m, _ in cells) if (e := scores(cells, m, name).get("fp32"))}
    values = [y for line in lines.values() for _, y, _ in line] + list(flat.values())
    wide = max(values) > WIDE * min(values)
    figure = _new_figure(5.8 if wide else 3.6)
    axes = figure.subplots(2 if wide else 1, 1, sharex=True, squeeze=False)[:, 0]
    for ax in axes:
        _draw_lines(ax, lines, flat)
        ax.set_ylabel(f"test {SCORES[name].label}")
    axes[-1].set_xlabel("fractional bits")
    axes[-1].set_xticks(list(widths))
    if wide:
        _enlarge(axes[0], axes[1], values, lines, flat)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, handlelength=3)
    return figure


def _line(cells: Cells, method: str, name: str, widths: dict[int, str], scale: float) -> list[tuple[int, float, float]]:
    """Return (bits, score, standard error) for each width."""
    found = scores(cells, method, name)
    return [(b, found[f].mean * scale, _error(found[f], scale)) for b, f in widths.items() if f in found]


def _draw_lines(ax: Axes, lines: Mapping[str, list[tuple[int, float, float]]], flat: Mapping[str, float]) -> None:
    """Draw a line with error bars for each method, and a horizontal one for each in full precision."""
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
    all_points: Axes,
    near: Axes,
    values: list[float],
    lines: Mapping[str, list[tuple[int, float, float]]],
    flat: Mapping[str, float],
) -> None:
    """Make the upper axes show all points, the lower those near the best or full precision; triangles mark points above."""
    if max(values) > LOGARITHMIC * min(values) > 0:
        all_points.set_yscale("log", subs=(2, 5))
        all_points.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        all_points.yaxis.set_minor_formatter(lambda y, _: f"{y:g}")
    all_points.set_title("all points")
    best, high = min(values), window(values)[1]
    high = min(high, NEAR * best) if best > 0 else high
    high = max([high, *(best + 1.3 * (level - best) for level in flat.values())])
    near.set_ylim(best - 0.08 * (high - best), high)
    near.set_title("enlarged: near the best (a triangle is a point above the frame)")
    for i, (method, line) in enumerate(lines.items()):
        if above := [x + 0.13 * (i - (len(lines) - 1) / 2) for x, y, _ in line if y > high]:  # side by side
            near.plot(above, [high] * len(above), "^", color=look(method).colour, markersize=5, clip_on=False, zorder=5)


@dataclass(frozen=True)
class ScoreRow:
    """A row of `draw_dots`: its method and group, and a value for each panel; ``hollow`` is a second one, drawn as a ring."""

    method: str
    group: str
    values: tuple[Estimate | None, ...]
    hollow: tuple[float | None, ...]


def score_rows(cells: Cells, names: Sequence[str]) -> list[ScoreRow]:
    """Return the scores of all cells, and as rings those of the last sample alone where several were averaged."""
    found = []
    for (method, format), runs in cells.items():
        several = any(run["samples"] > 1 for run in runs)
        single = [score(runs, name, "single") if several else None for name in names]
        values = tuple(score(runs, name) for name in names)
        found.append(ScoreRow(method, format, values, tuple(e.mean if e else None for e in single)))
    return found


class Tick(NamedTuple):
    """A label of the vertical axis: the method of a row, or the heading of a group."""

    y: float
    text: str
    heading: bool


class Dot(NamedTuple):
    """A row in one panel: an estimate, and a second value drawn as a ring."""

    y: float
    method: str
    estimate: Estimate | None
    ring: float | None


@styled
def draw_dots(rows: Sequence[ScoreRow], panels: Sequence[Score], zero: bool = False) -> Figure:
    """Draw a panel for each score, its axis from zero on or not, and a line for each row; the rows of a group under its name.

    The dotted line goes through the first row, which is SGLD in full precision where that was run.
    """
    ticks = _row_ticks(rows)
    places = [tick.y for tick in ticks if not tick.heading]
    figure = _new_figure(0.75 + 0.23 * len(ticks))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for i, (ax, panel) in enumerate(zip(axes, panels, strict=True)):
        _draw_panel(ax, panel, [Dot(y, r.method, r.values[i], r.hollow[i]) for y, r in zip(places, rows, strict=True)])
        if zero:
            ax.set_xlim(0, 1.02 * ax.get_xlim()[1])
        elif (first := rows[0].values[i]) and rows[0].method == "sgldfp":
            ax.axvline(first.mean * (100 if panel.percent else 1), color=FRAME, linestyle=":", linewidth=1, zorder=0)
    _label_rows(axes[0], ticks)
    return figure


def _row_ticks(rows: Sequence[ScoreRow]) -> list[Tick]:
    """Return the ticks from top to bottom, at 0, 1, 2, ...: a heading before each group, then its rows."""
    labels: list[tuple[str, bool]] = []
    for before, row in zip([None, *rows], rows, strict=False):
        if before is None or before.group != row.group:
            labels.append((label(row.group), True))
        labels.append((label(method_name(row.method), 22), False))
    return [Tick(float(y), text, heading) for y, (text, heading) in enumerate(labels)]


def _label_rows(ax: Axes, ticks: Sequence[Tick]) -> None:
    """Label the vertical axis, headings in bold."""
    ax.set_ylim(len(ticks) - 0.4, -0.6)
    ax.set_yticks([tick.y for tick in ticks], [tick.text for tick in ticks])
    for text, tick in zip(ax.get_yticklabels(), ticks, strict=True):
        text.set_fontweight("bold" if tick.heading else "normal")


def _draw_panel(ax: Axes, panel: Score, dots: Sequence[Dot]) -> None:
    """Draw the dots and rings of one score; a triangle at the edge, with its number, is outside the frame."""
    scale = 100 if panel.percent else 1
    ends = [end for dot in dots if (e := dot.estimate) for end in (e.mean - _error(e), e.mean + _error(e))]
    rings = [dot.ring for dot in dots if dot.ring is not None]
    low, high = window([value * scale for value in (*ends, *rings)] or [0.0])
    for dot in dots:
        colour = look(dot.method).colour
        if dot.ring is not None and dot.ring * scale <= high:
            ax.plot(dot.ring * scale, dot.y, marker="o", markerfacecolor="none", color=colour, markersize=5.5, zorder=2)
        if dot.estimate is not None:
            _draw_estimate(ax, panel, dot.y, dot.method, dot.estimate, high)
    ax.set_xlim(low, high)
    ax.set_title(panel.label)
    ax.locator_params(axis="x", nbins=4)
    ax.grid(axis="x")
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=8)


def _draw_estimate(ax: Axes, panel: Score, y: float, method: str, e: Estimate, high: float) -> None:
    """Draw a mean with its error bar, or a triangle and a number if it is beyond the frame, which ends at ``high``."""
    scale, (colour, _, marker) = 100 if panel.percent else 1, look(method)
    if e.mean * scale <= high:
        ax.errorbar(e.mean * scale, y, xerr=_error(e, scale), color=colour, marker=marker, markersize=5, capsize=2.5)
        return
    ax.plot(high, y, marker=">", color=colour, clip_on=False, zorder=4)
    ax.annotate(panel.number(e.mean), (high, y), (-6, 0), textcoords="offset points", ha="right", va="center", size=8)


def _grid(count: int, height: float, **sharing: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of so many panels, three to a line."""
    columns = min(COLUMNS, count)
    lines = math.ceil(count / columns)
    figure = _new_figure(height * lines + 0.35)
    axes = list(figure.subplots(lines, columns, squeeze=False, **sharing).flat)
    for ax in axes[count:]:
        ax.remove()
    for i, ax in enumerate(axes[:count]):
        ax.tick_params(labelsize=8, labelbottom=i + columns >= count)
    return figure, axes[:count]


def _name(cell: Cell, cells: Mapping[Cell, Any]) -> str:
    """Return the name of the method, with the format where several cells have that method."""
    name = label(method_name(cell[0]), 24)
    return name if sum(method == cell[0] for method, _ in cells) == 1 else f"{name}, {label(cell[1], 12)}"


@styled
def draw_reliability(cells: Cells) -> Figure:
    """Draw accuracy against confidence, a panel for each cell, the bins of all its runs together."""
    figure, axes = _grid(len(cells), 1.8, sharex=True, sharey=True)
    for ax, (cell, runs) in zip(axes, cells.items(), strict=True):
        colour = look(cell[0]).colour
        ax.plot([0, 1], [0, 1], color=FRAME, linewidth=1, linestyle=":")
        for points in _pool_bins(runs):
            x, y, share = zip(*points, strict=True)
            ax.plot(x, y, color=colour, linewidth=1.1, alpha=0.6)
            ax.scatter(x, y, [8 + 90 * s for s in share], color=colour, linewidths=0, clip_on=False, zorder=3)
        ece = score(runs, "ece")
        ax.set_title(f"{_name(cell, cells)}\nECE {SCORES['ece'].bare(ece)} %" if ece else _name(cell, cells))
        ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), aspect="equal")
    figure.supxlabel("confidence", size=9)
    figure.supylabel("accuracy", size=9)
    return figure


def _pool_bins(runs: Sequence[Result]) -> list[list[tuple[float, float, float]]]:
    """Return (confidence, accuracy, share of the predictions) of each bin; runs with the same bins are pooled."""
    lines: dict[tuple[float, ...], list[list[float]]] = {}
    for run in runs:
        bins = run["reliability"]
        sums = lines.setdefault(tuple(bins["edges"]), [[0.0, 0.0, 0.0] for _ in bins["counts"]])
        for bin, n, c, a in zip(sums, bins["counts"], bins["confidence"], bins["accuracy"], strict=True):
            bin[:] = bin[0] + n, bin[1] + n * (c or 0.0), bin[2] + n * (a or 0.0)
    totals = [math.fsum(n for n, _, _ in sums) for sums in lines.values()]
    pooled = [
        [(c / n, a / n, n / total) for n, c, a in sums if n] for sums, total in zip(lines.values(), totals, strict=True)
    ]
    return [points for points in pooled if points]


@styled
def draw_traces(cells: Cells) -> Figure:
    """Draw the mean test log-likelihood of each stored sample, a panel for each cell, a line for each chain of each run."""
    figure, axes = _grid(len(cells), 1.6, sharex=True)
    levels = {cell: [v for run in runs for v in run["trace"]["log_likelihood"]] for cell, runs in cells.items()}
    low, high = window([-v for values in levels.values() for v in values] or [0.0])
    for ax, (cell, runs) in zip(axes, cells.items(), strict=True):
        colour = look(cell[0]).colour
        for i, (x, y) in enumerate(line for run in runs for line in _split_trace(run)):
            marker, alpha = "o" if len(x) < 3 else "", 1 if i == 0 else 0.5
            ax.plot(x, y, color=colour, linewidth=1, marker=marker, markersize=4, alpha=alpha)
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


def _split_trace(run: Result) -> Iterator[tuple[list[int], list[float]]]:
    """Yield the steps and log-likelihoods of each chain."""
    ends = list(accumulate(chain_lengths(run), initial=0))
    for begin, end in pairwise(ends):
        yield run["trace"]["steps"][begin:end], run["trace"]["log_likelihood"][begin:end]


def _convergence(runs: Sequence[Result]) -> str:
    """Describe R-hat and effective sample size, the worst of the runs."""
    r_hat = [run["r_hat"] for run in runs if run.get("r_hat") is not None]
    ess = [run["ess"] for run in runs if run.get("ess") is not None]
    if max(run["samples"] for run in runs) == 1:
        return "a single sample"
    chains = max(len(chain_lengths(run)) for run in runs)
    over = f" of {chains} chains" if chains > 1 else ""
    parts = [f"R-hat{over} {max(r_hat):.2f}"] if r_hat else ["R-hat not known"]
    return ", ".join([*parts, *([f"ESS {min(ess):.0f}"] if ess else [])])
