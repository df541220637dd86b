"""Tables of results: in the paper's layout, of one experiment, over widths, of costs, of claims, of the runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from ..methods import METHODS
from .claims import Claim
from .document import Heading, Table
from .paper import FAMILIES, PAPER, ROWS
from .results import Result, computing
from .summary import SCORES, Cells, Estimate, Score, estimate, family, method_name, score, scores, sweep, title

__all__ = [
    "COSTS",
    "claims_table",
    "cost_table",
    "costs",
    "duration",
    "group_name",
    "machines",
    "paper_table",
    "runs_table",
]
__all__ += ["scores_table", "widths_table"]

PRINTED = "paper"  # the heading of a column of the paper's own figures
FOLD = 12  # rows that are shown without being asked for
COSTS = (
    Score("training:\nbytes a weight", digits=2),
    Score("on disk:\nbytes a weight", digits=2),
    Score("ms a step", digits=2),
)


def group_name(format: str) -> str:
    """8-bit fixed point (fixed8.6)."""
    name = FAMILIES.get(family(format))
    return format if name is None else name if format == "fp32" else f"{name} ({format})"


def paper_table(experiments: Mapping[str, Cells], names: Sequence[str], heading: str) -> Table:
    """Scores in the paper's groups and rows, a column for each experiment and score, and the paper's own figures beside."""
    head = [""]
    rows: list[tuple[str, ...] | Heading] = []
    for experiment, name in product(experiments, names):
        both = " ".join([title(experiment)] * (len(experiments) > 1) + [SCORES[name].label] * (len(names) > 1))
        head += [both or title(experiment), *([PRINTED] if (experiment, name) in PAPER else [])]
    for kind, formats in _groups(experiments):
        rows.append(_heading(kind, formats))
        for method in _methods(experiments, kind):
            row = [method_name(method)]
            for (experiment, cells), name in product(experiments.items(), names):
                runs = cells.get((method, formats.get(experiment, "")), [])
                row.append(SCORES[name].text(score(runs, name)))
                if printed := PAPER.get((experiment, name)):
                    row.append(printed.get((kind, method), "—"))
            rows.append(tuple(row))
    return Table(f"{heading}: mean ± standard error (seeds)", tuple(head), tuple(rows))


def _groups(experiments: Mapping[str, Cells]) -> list[tuple[str, dict[str, str]]]:
    """(family, experiment -> format): one for each family, or for each format where an experiment has several of a family."""
    kinds = dict.fromkeys(kind for (e, _), rows in PAPER.items() if e in experiments for kind, _ in rows)
    kinds |= dict.fromkeys(family(format) for cells in experiments.values() for _, format in cells)
    found = []
    for kind in sorted(kinds, key=lambda kind: list(FAMILIES).index(kind) if kind in FAMILIES else len(FAMILIES)):
        here = {e: list(dict.fromkeys(f for _, f in cells if family(f) == kind)) for e, cells in experiments.items()}
        if all(len(formats) <= 1 for formats in here.values()):
            found.append((kind, {e: formats[0] for e, formats in here.items() if formats}))
        else:
            each = dict.fromkeys(format for formats in here.values() for format in formats)
            found += [(kind, {e: format for e, formats in here.items() if format in formats}) for format in each]
    return found


def _heading(kind: str, formats: Mapping[str, str]) -> Heading:
    each = list(dict.fromkeys(formats.values()))
    if kind not in FAMILIES or kind == "fp32" or not each:
        return Heading(FAMILIES.get(kind, kind))
    if len(each) == 1:
        return Heading(group_name(each[0]))
    return Heading(f"{FAMILIES[kind]} ({', '.join(f'{title(e)}: {format}' for e, format in formats.items())})")


def _methods(experiments: Mapping[str, Cells], kind: str) -> list[str]:
    """The paper's rows of a group, then others that have been run."""
    printed = {m for (e, _), rows in PAPER.items() if e in experiments for k, m in rows if k == kind}
    run = [m for cells in experiments.values() for m, format in cells if family(format) == kind]
    return [m for m in dict.fromkeys((*ROWS.get(kind, ()), *run)) if m in printed or m in run]


def scores_table(cells: Cells) -> Table:
    """All scores of one experiment, a row for each method and format."""
    names = [name for name in ("nll", "error", "ece", "brier") if any(score(r, name) for r in cells.values())]
    rows: list[tuple[str, ...] | Heading] = []
    last = None
    for (method, format), runs in cells.items():
        if format != last:
            rows.append(Heading(group_name(format)))
        last = format
        texts = [SCORES[name].bare(e) if (e := score(runs, name)) else "—" for name in names]
        rows.append((method_name(method), *texts, str(len(runs)), _range(run["samples"] for run in runs)))
    head = ("", *(SCORES[name].label for name in names), "seeds", "samples")
    return Table("Scores: mean ± standard error over seeds", head, tuple(rows))


def _range(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def widths_table(cells: Cells, name: str) -> Table:
    """A score over a sweep; the last row is each method's counterpart in full precision."""
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
    known = METHODS.get(method)
    return "" if known is None else "csgldfp" if known.cyclical else "sgldfp" if known.noise else "sgdfp"


def costs(runs: Sequence[Result]) -> tuple[Estimate, Estimate, Estimate]:
    """Bytes a weight while training and on disk, milliseconds a step."""
    return (
        estimate([run["memory"]["training"] for run in runs]),
        estimate([run["memory"]["sample"] for run in runs]),
        estimate([1000 * run["seconds"]["train"] / run["steps"] for run in runs]),
    )


def cost_table(cells: Cells) -> Table:
    rows = []
    for (method, format), runs in cells.items():
        training, stored, step = costs(runs)
        figures = (f"{training.mean:.2f}", f"{stored.mean:.2f}", COSTS[2].bare(step), f"{runs[0]['steps']}")
        evaluate = estimate([run["seconds"]["evaluate"] for run in runs])
        rows.append((method_name(method), format, *figures, f"{evaluate.mean:.1f} s"))
    head = ("", "format", "training", "on disk", "ms a step", "steps", "evaluation")
    return Table("Memory in bytes a weight, and time", head, tuple(rows))


def claims_table(found: Sequence[Claim]) -> Table:
    rows = tuple((claim.text, claim.verdict, claim.numbers) for claim in found)
    return Table("What the paper says, and what came out here", ("claim", "verdict", "numbers"), rows, wordy=True)


def machines(results: Sequence[Result]) -> Table:
    """What computed the numbers."""
    counts: dict[tuple[str, ...], list[float]] = {}
    for run in results:
        e = run["environment"]
        name = (e["machine"], *(str(e[n]) for n in ("cores", "threads", "kernels", "torch")), run["version"])
        counts.setdefault(name, []).append(computing(run))
    rows = tuple((*name, str(len(each)), duration(sum(each))) for name, each in counts.items())
    head = ("machine", "cores", "threads", "kernels", "torch", "qlangevin", "runs", "computing time")
    return Table("Machines", head, rows)


def runs_table(experiments: Mapping[str, Cells]) -> Table:
    """Every method with its seeds and the time it took."""
    rows: list[tuple[str, ...] | Heading] = []
    for experiment, cells in experiments.items():
        rows.append(Heading(title(experiment)))
        for (method, format), runs in cells.items():
            seeds = ", ".join(str(run["settings"]["seed"]) for run in runs)
            spent = sum(computing(run) for run in runs)
            rows.append((method_name(method), format, seeds, duration(spent), max(run["finished"] for run in runs)))
    head = ("", "format", "seeds", "computing time", "finished")
    return Table("Runs", head, tuple(rows), folded=len(rows) > FOLD)


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
