"""Tables of results: the paper's own, scores and costs of an experiment, scores against bits, claims, machines, runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from ..methods import METHODS
from ..results import Result, computing_seconds
from .claims import Claim
from .document import Heading, Table
from .paper import FAMILIES, PAPER, ROWS
from .summary import SCORES, Cells, Estimate, Score, estimate, family, method_name, score, scores, sweep, title

__all__ = [
    "COSTS", "bits_table", "claims_tables", "cost_estimates", "cost_table", "format_duration", "group_name", "machines_table",
    "paper_table", "runs_table", "scores_table", "widths_table",
]  # fmt: skip

PRINTED = "paper"  # the heading of a column of the paper's own figures
FOLD = 12  # rows up to which a table is shown unfolded
COSTS = (
    Score("training:\nbytes a weight", digits=2),
    Score("on disk:\nbytes a weight", digits=2),
    Score("ms a step", digits=2),
)


class FormatGroup(NamedTuple):
    """A group of rows of the paper's tables: a family of formats, and the format that each experiment has of it."""

    family: str
    formats: dict[str, str]


def group_name(format: str) -> str:
    """Return the heading of a format, such as: 8-bit fixed point (fixed8.6)."""
    name = FAMILIES.get(family(format))
    return format if name is None else name if format == "fp32" else f"{name} ({format})"


def paper_table(experiments: Mapping[str, Cells], names: Sequence[str], heading: str) -> Table:
    """Return scores in the paper's groups and rows, a column for each experiment and score, beside the paper's own figures."""
    rows: list[tuple[str, ...] | Heading] = []
    for group in _group_formats(experiments):
        rows.append(_heading(group))
        rows += [_paper_row(experiments, names, group, method) for method in _methods(experiments, group.family)]
    return Table(f"{heading}: mean ± standard error (seeds)", _paper_head(experiments, names), tuple(rows))


def _paper_head(experiments: Mapping[str, Cells], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the columns; a column has the name of its experiment, its score or both, whatever differs."""
    head = [""]
    for experiment, name in product(experiments, names):
        both = " ".join([title(experiment)] * (len(experiments) > 1) + [SCORES[name].label] * (len(names) > 1))
        head += [both or title(experiment), *([PRINTED] if (experiment, name) in PAPER else [])]
    return tuple(head)


def _paper_row(
    experiments: Mapping[str, Cells], names: Sequence[str], group: FormatGroup, method: str
) -> tuple[str, ...]:
    """Return the scores of one method, each followed by the paper's figure if there is one."""
    row = [method_name(method)]
    for (experiment, cells), name in product(experiments.items(), names):
        runs = cells.get((method, group.formats.get(experiment, "")), [])
        row.append(SCORES[name].text(score(runs, name)))
        if printed := PAPER.get((experiment, name)):
            row.append(printed.get((group.family, method), "—"))
    return tuple(row)


def _group_formats(experiments: Mapping[str, Cells]) -> list[FormatGroup]:
    """Return a group for each family, or for each format of it where an experiment has several of the family."""
    groups = []
    for kind in _families(experiments):
        formats = {e: list(dict.fromkeys(f for _, f in cells if family(f) == kind)) for e, cells in experiments.items()}
        if all(len(own) <= 1 for own in formats.values()):
            groups.append(FormatGroup(kind, {e: own[0] for e, own in formats.items() if own}))
        else:
            groups += _split_by_format(kind, formats)
    return groups


def _families(experiments: Mapping[str, Cells]) -> list[str]:
    """Return the families of formats that the paper or a run has, in the paper's order."""
    printed = (kind for (experiment, _), rows in PAPER.items() if experiment in experiments for kind, _ in rows)
    run = (family(format) for cells in experiments.values() for _, format in cells)
    order = list(FAMILIES)
    return sorted(dict.fromkeys((*printed, *run)), key=lambda kind: order.index(kind) if kind in order else len(order))


def _split_by_format(kind: str, formats: Mapping[str, Sequence[str]]) -> list[FormatGroup]:
    """Return a group for each format of a family, with the experiments that have it."""
    each = dict.fromkeys(format for own in formats.values() for format in own)
    return [FormatGroup(kind, {e: format for e, own in formats.items() if format in own}) for format in each]


def _heading(group: FormatGroup) -> Heading:
    """Return the heading of a group: its family and its formats."""
    kind, formats = group
    each = list(dict.fromkeys(formats.values()))
    if kind not in FAMILIES or kind == "fp32" or not each:
        return Heading(FAMILIES.get(kind, kind))
    if len(each) == 1:
        return Heading(group_name(each[0]))
    return Heading(f"{FAMILIES[kind]} ({', '.join(f'{title(e)}: {format}' for e, format in formats.items())})")


def _methods(experiments: Mapping[str, Cells], kind: str) -> list[str]:
    """Return the methods of a group: the paper's rows, then others that have been run."""
    printed = {m for (e, _), rows in PAPER.items() if e in experiments for k, m in rows if k == kind}
    run = [m for cells in experiments.values() for m, format in cells if family(format) == kind]
    return [m for m in dict.fromkeys((*ROWS.get(kind, ()), *run)) if m in printed or m in run]


def scores_table(cells: Cells) -> Table:
    """Return all scores of one experiment, a row for each method and format."""
    names = [name for name in ("nll", "error", "ece", "brier") if any(score(r, name) for r in cells.values())]
    rows: list[tuple[str, ...] | Heading] = []
    last = None
    for (method, format), runs in cells.items():
        if format != last:
            rows.append(Heading(group_name(format)))
        last = format
        texts = [SCORES[name].bare(e) if (e := score(runs, name)) else "—" for name in names]
        r_hat = max((run["r_hat"] for run in runs if run.get("r_hat") is not None), default=None)
        worst = "—" if r_hat is None else f"{r_hat:.2f}"
        rows.append((method_name(method), *texts, worst, str(len(runs)), _range(run["samples"] for run in runs)))
    head = ("", *(SCORES[name].label for name in names), "R-hat", "seeds", "samples")
    return Table("Scores: mean ± standard error over seeds, and the worst R-hat", head, tuple(rows))


def _range(values: Iterable[int]) -> str:
    """Return the least and the greatest of some numbers, or the only one."""
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def widths_table(cells: Cells, name: str) -> Table:
    """Return a score over a sweep; the last row is each method's counterpart in full precision."""
    widths = sweep(cells)
    methods = list(dict.fromkeys(m for m, format in cells if format in widths.values()))
    found = {m: scores(cells, m, name) for m in methods}
    rows = [
        (f"{bits} ({format})", *(SCORES[name].text(found[m].get(format)) for m in methods))
        for bits, format in widths.items()
    ]
    full = [scores(cells, _counterpart(m), name).get("fp32") for m in methods]
    if any(full):
        rows.append(("full precision", *(SCORES[name].text(e) for e in full)))
    return Table(
        f"{SCORES[name].label} against fractional bits: mean ± standard error (seeds)",
        ("fractional bits", *map(method_name, methods)),
        tuple(rows),
    )


def _counterpart(method: str) -> str:
    """Return the method in full precision with the same noise and schedule; empty for an unknown method."""
    known = METHODS.get(method)
    return "" if known is None else "csgldfp" if known.cyclical else "sgldfp" if known.noise else "sgdfp"


def cost_estimates(runs: Sequence[Result]) -> tuple[Estimate, Estimate, Estimate]:
    """Estimate bytes per weight while training and on disk, and milliseconds per step."""
    return (
        estimate([run["memory"]["training"] for run in runs]),
        estimate([run["memory"]["sample"] for run in runs]),
        estimate([1000 * run["seconds"]["train"] / run["steps"] for run in runs]),
    )


def cost_table(cells: Cells) -> Table:
    """Return memory and time, a row for each method and format."""
    rows = []
    for (method, format), runs in cells.items():
        training, stored, step = cost_estimates(runs)
        figures = (f"{training.mean:.2f}", f"{stored.mean:.2f}", COSTS[2].bare(step), f"{runs[0]['steps']}")
        evaluate = estimate([run["seconds"]["evaluate"] for run in runs])
        rows.append((method_name(method), format, *figures, f"{evaluate.mean:.1f} s"))
    head = ("", "format", "training", "on disk", "ms a step", "steps", "evaluation")
    return Table("Memory in bytes a weight, and time", head, tuple(rows))


def bits_table(cells: Cells) -> Table | None:
    """Return the diagnosis at the end of the first seed's run, a row for each method and format; None if no run has one."""
    head = (
        "",
        "format",
        "v > v0",
        "between",
        "v < v_s",
        "inflation",
        "resolution",
        "drift/gap",
        "noise/gap",
        "gap/width",
    )
    rows = []
    for (method, format), runs in cells.items():
        if found := next(
            (run["diagnosis"]["total"] for run in runs if (run.get("diagnosis") or {}).get("total")), None
        ):
            shares = [_figure(found.get(name), ".0%") for name in ("above", "between", "below")]
            names = ("inflation", "resolution", "drift", "noise", "gap_over_width")
            numbers = [_figure(found.get(name), ".3g") for name in names]
            more = [_figure(found.get(name), ".1%") for name in ("saturated", "zero_gradients")]
            rows.append((method_name(method), format, *shares, *numbers, *more))
    if not rows:
        return None
    return Table("Do the bits suffice?", (*head, "saturated", "zero gradients"), tuple(rows))


def _figure(value: float | None, format: str) -> str:
    return "—" if value is None else f"{value:{format}}"


def claims_tables(found: Sequence[Claim]) -> Iterator[Table]:
    """Yield the paper's claims with verdicts and numbers, then comparisons of which it has no figures."""
    titles = {
        True: "What the paper says, and what came out here",
        False: "Comparisons that the paper has no figures of",
    }
    for printed, heading in titles.items():
        if rows := tuple((c.text, c.verdict, c.numbers) for c in found if c.printed is printed):
            yield Table(heading, ("claim", "verdict", "numbers"), rows, wordy=True)


def machines_table(results: Sequence[Result]) -> Table:
    """Return the machines and versions that computed the results."""
    counts: dict[tuple[str, ...], list[float]] = {}
    for run in results:
        e = run["environment"]
        name = (e["machine"], *(str(e[n]) for n in ("cores", "threads", "kernels", "torch")), run["version"])
        counts.setdefault(name, []).append(computing_seconds(run))
    rows = tuple((*name, str(len(each)), format_duration(sum(each))) for name, each in counts.items())
    head = ("machine", "cores", "threads", "kernels", "torch", "qlangevin", "runs", "computing time")
    return Table("Machines", head, rows)


def runs_table(experiments: Mapping[str, Cells]) -> Table:
    """Return every method with its seeds and its computing time."""
    rows: list[tuple[str, ...] | Heading] = []
    for experiment, cells in experiments.items():
        rows.append(Heading(title(experiment)))
        for (method, format), runs in cells.items():
            seeds = ", ".join(str(run["settings"]["seed"]) for run in runs)
            spent = sum(computing_seconds(run) for run in runs)
            rows.append(
                (method_name(method), format, seeds, format_duration(spent), max(run["finished"] for run in runs))
            )
    head = ("", "format", "seeds", "computing time", "finished")
    return Table("Runs", head, tuple(rows), folded=len(rows) > FOLD)


def format_duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
