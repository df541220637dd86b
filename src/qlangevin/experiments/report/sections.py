"""Arrange results as a document: sections, tables and figures in order, with captions that say what to look at."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence

from ..convergence import warn_of_non_convergence
from ..results import Result, computing_seconds
from . import figures
from .claims import QUALITY, RULE, Claim, claims
from .document import Block, Code, Document, Note, Picture, Section, Text
from .looks import render
from .summary import SCORES, Cells, by_experiment, method_name, mixtures, shown_formats, sweep, title
from .tables import (
    COSTS,
    bits_table,
    claims_tables,
    cost_estimates,
    cost_table,
    format_duration,
    machines_table,
    paper_table,
    runs_table,
    scores_table,
    widths_table,
)

__all__ = ["build_document"]

SHARED = ("cifar10", "cifar100", "imdb")
TABLES = {  # experiments that share tables in the paper: title, and (experiments, scores, title) of each table
    SHARED: (
        "Tables 1 and 2 of the paper",
        (
            (SHARED, ("error",), "Table 1, test error (%)"),
            (("cifar10", "cifar100"), ("ece",), "Table 2, expected calibration error (%)"),
            (("imdb",), ("ece",), "Not in the paper, expected calibration error (%)"),
            (SHARED, ("nll", "brier"), "Not in the paper, NLL and Brier score"),
        ),
    ),
    ("imagenet",): (
        "Table 3 of the paper",
        (
            (("imagenet",), ("error", "top5"), "Table 3, test error (%)"),
            (("imagenet",), ("nll", "ece", "brier"), "Not in the paper, further scores"),
        ),
    ),
}

NAMES = (
    "How the methods are called: FP is full precision, LP low precision. F keeps a second, full-precision copy of the weights "
    "that takes the updates; L has none, its weights are low precision from the first step to the last. Naïve rounds after "
    "the noise was added; VC, variance-corrected, draws noise and rounding as one. A small c stands for the cyclical "
    "schedule. SGD keeps its last weights, SGLD averages the predictions of its samples."
)
CALIBRATION = (
    "A point is a bin of predictions of like confidence, its area their share. On the dotted line those that are 80 % sure are "
    "right in 80 % of the cases; below it they are too sure, above it not sure enough. Look at the large points: a small one "
    "far from the line is few predictions. The ECE is the mean distance to the line."
)
CHAINS = (
    "The mean log-likelihood of the test set under each stored sample alone, a line for each chain. A chain that has arrived "
    "wanders around one level; a slope means that it was still on its way. R-hat near 1 says the same in a number (the worst "
    "of the seeds), and of several chains that they agree; ESS is how many independent samples they are worth. Panels share "
    "a scale unless they say otherwise."
)
BITS = (
    "Do the bits suffice? With noise of variance v a step on a grid of gap Δ has that variance if v > v0 = Δ²/4, and with the "
    "corrected rounding down to v_s, that of rounding the drift. Shares are of the weights, at the end of a run. Inflation "
    "is the variance that steps have over v: the effective temperature over the one asked for. Resolution is Δ|∇U|/(2T): above "
    "1 the grid, not the noise, moves the weights. Drift, noise and width (of the posterior, from the samples) are compared "
    "with the gap."
)
BESIDE = (
    "Each column is one of our experiments, and beside it what the paper printed. A dash is a row of the paper for which there "
    "is no run here, or no number there."
)


def build_document(results: Sequence[Result], heading: str, lead: Sequence[Block] = ()) -> Document:
    """Return the report of these results."""
    experiments, found = by_experiment(results), claims(results)
    sections = []
    for names, (section, tables) in TABLES.items():
        if shared := {name: experiments[name] for name in names if name in experiments}:
            shown = [({n: shared[n] for n in own if n in shared}, scores, text) for own, scores, text in tables]
            blocks = [paper_table(*table) for table in shown if table[0]]
            remarks = [note for name in shared for note in _remarks(shared[name], name)]
            unmixed = [note for name in shared for note in _warn(shared[name], f"{title(name)}: ")]
            sections.append(Section(section, (Text(BESIDE), *remarks, *blocks, *unmixed)))
    for name, cells in experiments.items():
        of = [claim for claim in found if claim.experiment == name]
        sections.append(Section(title(name), tuple(_experiment(name, cells, of))))
    sections.append(Section("How these numbers came about", tuple(_provenance(results, experiments))))
    opening = (*lead, Text(_summarize(results, experiments, found)), Text(NAMES))
    return Document(heading, opening, tuple(sections))


def _summarize(results: Sequence[Result], experiments: Mapping[str, Cells], found: Sequence[Claim]) -> str:
    """Return the opening paragraph: runs, computing time and verdicts."""
    spent = sum(computing_seconds(run) for run in results)
    names = ", ".join(title(name) for name in experiments)
    text = f"{_count(len(results), 'run')} of {names}; {format_duration(spent)} of computing."
    printed, others = ([claim for claim in found if claim.printed is whose] for whose in (True, False))
    for group, what, of in (
        (printed, "claim", "of the paper"),
        (others, "comparison", "that the paper has no figures of"),
    ):
        if group:
            text += f" Of {_count(len(group), what)} {of} {_tally(group)}."
    return text


def _tally(found: Sequence[Claim]) -> str:
    """Count verdicts, in words."""
    holds, fails, open_ = (sum(c.verdict == v for c in found) for v in ("holds", "does not hold", "undecided"))
    return (
        f"{holds} {'holds' if holds == 1 else 'hold'} here, {fails} {'does' if fails == 1 else 'do'} not, {open_} "
        f"{'is' if open_ == 1 else 'are'} undecided"
    )


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _remarks(cells: Cells, experiment: str) -> Iterator[Note]:
    """Yield notes on settings that differ from the paper's, and on averages over runs with different settings."""
    runs = [run for each in cells.values() for run in each]
    counts: dict[str, int] = {}
    for run in runs:
        for line in (*([run["data"]["note"]] if run["data"].get("note") else []), *(run.get("scaled") or [])):
            counts[line] = counts.get(line, 0) + 1
    lines = [line if n == len(runs) else f"{line} (in {n} of {len(runs)} runs)" for line, n in counts.items()]
    if lines:
        usual = "with its usual settings" if experiment == "digits" else "as in the paper"
        yield Note(f"{title(experiment)} is not run {usual}: {'; '.join(lines)}.")
    if odd := mixtures(cells):
        yield Note(f"{title(experiment)}: {'; '.join(odd)}. Report them apart for numbers that mean something.")


def _experiment(experiment: str, cells: Cells, found: Sequence[Claim]) -> Iterator[Block]:
    """Yield the section of one experiment."""
    yield Text(_description(cells))
    yield from _remarks(cells, experiment)
    verdicts: tuple[Block, ...] = (Text(_rule(found)), *claims_tables(found)) if found else ()
    swept = bool(sweep(cells))
    if swept:
        yield from (*_widths(experiment, cells), *verdicts)  # the claims about a sweep are about its curves
    formats = shown_formats(cells)
    shown = {cell: runs for cell, runs in cells.items() if cell[1] in ("fp32", *formats)}
    yield _score_picture(experiment, shown)
    if not any(experiment in names for names in TABLES):
        yield scores_table(shown)
    yield from _warn(cells)
    yield from () if swept else verdicts
    for format in formats or ["fp32"]:
        yield from _details(experiment, format, {c: runs for c, runs in shown.items() if c[1] in ("fp32", format)})
    if (bits := bits_table(shown)) is not None:
        yield from (Text(BITS), bits)
    yield _cost_picture(experiment, shown)
    yield cost_table(shown)


def _warn(cells: Cells, prefix: str = "") -> Iterator[Note]:
    """Yield the line that stands below tables of runs whose R-hat is too large, if it is."""
    if text := warn_of_non_convergence([run for runs in cells.values() for run in runs]):
        yield Note(f"{prefix}{text}")


def _description(cells: Cells) -> str:
    """Describe networks and data of an experiment."""
    texts = []
    for runs in cells.values():
        for run in runs:
            data, model = run["data"], run["model"]
            texts.append(
                f"{model['name']} with {model['weights']:,} weights on {data['name']}, {data['train']:,} examples to train on "
                f"and {data['test']:,} to test with."
            )
    return " ".join(dict.fromkeys(texts))


def _rule(found: Sequence[Claim]) -> str:
    """Return the rule by which verdicts are given."""
    return f"{RULE} {QUALITY}" if any("quality" in claim.text or "matches" in claim.text for claim in found) else RULE


def _slug(*parts: str) -> str:
    """Return a file name; a part with characters that cannot stand in one gets a checksum, so that names stay distinct."""
    names = []
    for part in parts:
        name = part.replace("/", "_")
        safe = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")[:40]
        names.append(safe if safe == name else f"{safe}{zlib.crc32(name.encode('utf-8', 'replace')):08x}")
    return "-".join(names)


def _methods(cells: Cells) -> str:
    return ", ".join(dict.fromkeys(method_name(method) for method, _ in cells))


def _widths(experiment: str, cells: Cells) -> Iterator[Block]:
    """Yield curves and tables of a sweep over fractional bits."""
    for name in ("nll", "error"):
        label = SCORES[name].title
        yield Picture(
            _slug(experiment, name, "bits"),
            render(figures.draw_curves(cells, name)),
            f"{title(experiment)}: test {label} against the number of fractional bits, a line each for {_methods(cells)}",
            f"Test {label} with ever fewer fractional bits (towards the left). Solid lines are SGLD, dashed ones SGD; bars are "
            "standard errors over seeds. Look at how far to the left a line stays at the level of full precision, drawn as "
            "horizontal lines.",
        )
        yield widths_table(cells, name)


def _score_picture(experiment: str, shown: Cells) -> Picture:
    """Return the picture of scores side by side."""
    names = ("nll", "error", "ece")
    full = "; the dotted line is SGLD in full precision: look at which methods stay near it with fewer bits"
    full = full if next(iter(shown)) == ("sgldfp", "fp32") else ""
    return Picture(
        _slug(experiment, "scores"),
        render(figures.draw_dots(figures.score_rows(shown, names), [SCORES[name] for name in names])),
        f"{title(experiment)}: NLL, error and ECE of {_methods(shown)} side by side",
        f"Left is better{full}. A filled point is the average over all samples, a ring the last sample alone: the way from ring "
        "to point is what averaging brings. Bars are standard errors over seeds; a triangle at the right edge, with its number, "
        "is outside the frame.",
    )


def _details(experiment: str, format: str, cells: Cells) -> Iterator[Block]:
    """Yield calibration and traces in one format."""
    where = f"{title(experiment)}, {format}"
    yield Picture(
        _slug(experiment, "reliability", format),
        render(figures.draw_reliability(cells)),
        f"{where}: accuracy against confidence, a panel each for {_methods(cells)}",
        f"{where}: do the networks know what they do not know? {CALIBRATION}",
    )
    yield Picture(
        _slug(experiment, "trace", format),
        render(figures.draw_traces(cells)),
        f"{where}: log-likelihood of the test set along the samples, a panel each for {_methods(cells)}",
        f"{where}: have the chains arrived? {CHAINS}",
    )


def _cost_picture(experiment: str, shown: Cells) -> Picture:
    """Return the picture of memory and time."""
    rows = [figures.ScoreRow(m, f, cost_estimates(runs), (None,) * len(COSTS)) for (m, f), runs in shown.items()]
    return Picture(
        _slug(experiment, "costs"),
        render(figures.draw_dots(rows, COSTS, zero=True)),
        f"{title(experiment)}: bytes a weight while training and on disk, and milliseconds a step, of {_methods(shown)}",
        "What it costs. Training counts the weights and what the sampler keeps beside them; on disk is a stored sample. Times "
        "are of the machine named below, with whatever else it was doing: compare, and do not quote.",
    )


def _provenance(results: Sequence[Result], experiments: Mapping[str, Cells]) -> Iterator[Block]:
    """Yield runs, machines and commands behind the numbers."""
    spent = sum(computing_seconds(run) for run in results)
    seeds = sorted({run["settings"]["seed"] for run in results})
    yield Text(
        f"{_count(len(results), 'run')} with {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))} took "
        f"{format_duration(spent)} of computing in all ({spent / 3600:.2g} hours). Everything on this page is made from these "
        "runs' saved results, which are in runs.json beside it. ± is the standard error over seeds; a number without it is of a "
        "single seed."
    )
    yield machines_table(results)
    yield runs_table(experiments)
    yield Text("The commands, one for each line of the table above, with its first seed:")
    yield Code(tuple(runs[0]["command"] for cells in experiments.values() for runs in cells.values()))
