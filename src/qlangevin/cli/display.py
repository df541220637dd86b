"""Print results of commands: tables for people on standard output, or one JSON object. rich is imported on first use."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import theory
from .._version import __version__
from ..experiments import bound, gaussian
from ..experiments.convergence import warn_of_non_convergence
from ..experiments.environment import environment
from ..experiments.methods import method_name
from ..sampling import diagnosis

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..slt import LLC

__all__ = [
    "as_json",
    "bound_remarks",
    "bound_table",
    "convergence_remarks",
    "diagnosis_table",
    "evaluation_table",
    "gaussian_remarks",
    "gaussian_table",
    "llc_table",
    "print_json",
    "print_lines",
    "print_tables",
    "result_remarks",
    "scores_table",
    "terms_table",
    "text_table",
]


def print_json(answer: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(answer, indent=2, allow_nan=False), flush=True)


def as_json(name: str, settings: Any, rows: Iterable[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the settings of a command and the rows of its result, with version and environment."""
    options = {name: str(x) if isinstance(x, Path) else x for name, x in dataclasses.asdict(settings).items()}
    options.pop("json", None)
    about = {"experiment": name, "version": __version__, "settings": options, "environment": environment()}
    return {**about, **more, "rows": list(rows)}


def console() -> Console:
    """Return the console of standard output: as wide as the terminal, else 120 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def print_tables(*tables: Table) -> None:
    """Print tables, without padding where they do not fit; rather too wide than with numbers cut short."""
    from rich.console import Console

    for table in tables:
        out, wide = console(), Console(width=1000)
        if wide.measure(table).maximum > out.width:
            table.padding = (0, 0)
        out.width = max(out.width, wide.measure(table).maximum)
        out.print(table)


def print_lines(*text: str) -> None:
    """Print lines as they are."""
    if text:
        console().print("\n".join(text), highlight=False, markup=False, soft_wrap=True)


def _number(value: float | None, format: str) -> str:
    """Format a number; a dash if there is none."""
    return "—" if value is None or not math.isfinite(value) else f"{value:{format}}"


def _new_table(title: str, columns: Sequence[str], left: Sequence[str]) -> Table:
    """Return an empty table; columns named in ``left`` are aligned left, the others right."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        out.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return out


def gaussian_table(result: gaussian.GaussianResult) -> Table:
    """Return Figure 1 as a table; each stepsize is named once."""
    columns = ("α", "method", "variance ± s.e.", "exact", "z", "W2", "exact", "steps", "time")
    out = _new_table(f"Standard Gaussian in {result.settings.format}", columns, ("method",))
    last = None
    for row in result.rows:
        out.add_row(
            f"{row.stepsize:g}" if row.stepsize != last else "",
            row.method,
            f"{row.variance:.4f} ± {row.standard_error:.4f}",
            _number(row.exact_variance, ".4f"),
            _number(row.z, "+.1f"),
            f"{row.w2:.4f}",
            _number(row.exact_w2, ".4f"),
            f"{row.chain_steps / 1e6:.3g}M",
            f"{row.seconds:.1f} s",
        )
        last = row.stepsize
    return out


def llc_table(parts: Sequence[LLC]) -> Table:
    """Return the learning coefficients of the parts of a model."""
    settings = parts[0].settings
    title = f"Local learning coefficient, {settings.format_name}, nβ = {settings.nbeta:.5g}"
    out = _new_table(title, ("part", "weights", "LLC ± s.e.", "R-hat", "ESS", "loss at w*"), ("part",))
    for part in parts:
        figures = (_number(part.r_hat, ".3f"), _number(part.ess, ".0f"), f"{part.init_loss:.4g}")
        out.add_row(part.name, str(part.size), f"{part.mean:.4g} ± {part.stderr:.2g}", *figures)
    return out


def gaussian_remarks(settings: gaussian.GaussianSettings, result: gaussian.GaussianResult) -> list[str]:
    """Return the remarks that explain the table and say how to reproduce it."""
    text = [
        "exact: of the stationary law, without sampling; steps: of all chains together",
        "z: (sampled - exact)/s.e. of the variance, beyond ±4 once in 16 000 rows",
        f"seed {settings.seed}, {settings.parallel} chains, {_describe_environment()}",
    ]
    text += [
        f"α = {row.stepsize:g}: a burn-in of {row.burn_in} steps is short of 3/α, the chains may not have converged"
        for row in result.rows[:: len(gaussian.METHODS)]
        if row.burn_in * row.stepsize < 2.99
    ]
    return text


def _describe_environment(recorded: dict[str, Any] | None = None) -> str:
    """Describe the environment recorded in a result; by default that of this process."""
    return ", ".join(f"{name} {value}" for name, value in (recorded or environment()).items())


def _figures(scores: dict[str, float]) -> tuple[str, str, str, str]:
    """Format error, NLL, Brier score and ECE."""
    return f"{scores['error']:.2%}", f"{scores['nll']:.4f}", f"{scores['brier']:.4f}", f"{scores['ece']:.2%}"


def scores_table(title: str, results: Iterable[dict[str, Any]]) -> Table:
    """Return a table of runs: the scores of each average, its memory and time."""
    columns = ("method", "format", "seed", "error", "NLL", "Brier", "ECE", "R-hat", "samples", "bytes/weight", "time")
    out = _new_table(title, columns, ("method", "format"))
    for result in results:
        scores, settings = result["scores"], result["settings"]
        out.add_row(
            method_name(settings["method"]),
            settings["format"],
            str(settings["seed"]),
            *_figures(scores),
            _number(result["r_hat"], ".2f"),
            str(result["samples"]),
            f"{result['memory']['training']:.1f}",
            f"{result['seconds']['train']:.1f} s",
        )
    return out


def bound_table(result: bound.BoundResult) -> Table:
    """Return a table of W2: the bounds of the theorems, the exact distances and the sampled ones."""
    columns = ("format", "α", "method", "bound", "sharp", "exact", "sampled")
    out = _new_table("W2 to a standard Gaussian", columns, ("format", "method"))
    last: tuple[str, float] | None = None
    for row in result.rows:
        here = (row.format, row.stepsize)
        named = (row.format, f"{row.stepsize:g}") if here != last else ("", "")
        out.add_row(*named, row.method, *(_number(x, ".4f") for x in (row.bound, row.sharp, row.exact, row.sampled)))
        last = here
    return out


def terms_table(settings: bound.BoundSettings) -> Table:
    """Return the bounds term by term, in the format of the first panel at the stepsize of the second."""
    constants = theory.Constants(1.0, 1.0, gradient=bound.mean_gradient(settings.stepsize, settings.gap))
    found = bound.terms(constants, settings.stepsize, settings.gap)
    columns = ("term", *found)
    out = _new_table(f"Theorems 1 to 3 in {settings.format} at α = {settings.stepsize:g}", columns, ("term",))
    for name in next(iter(found.values())).terms:
        out.add_row(name, *(f"{b.terms[name]:.4f}" for b in found.values()))
    out.add_row("W2 is at most", *(f"{b.total:.4f}" for b in found.values()))
    return out


def bound_remarks(settings: bound.BoundSettings, result: bound.BoundResult) -> list[str]:
    """Return the remarks that explain the tables."""
    best = theory.best_stepsize(theory.Constants(1.0, 1.0), settings.gap)
    bits = theory.bits_needed(theory.Constants(1.0, 1.0, hessian=1.0), accuracy=0.001)
    text = [
        "bound: by the theorem, after infinitely many steps; sharp: Theorem 3 with the exact error of Q^vc",
        "exact: of the stationary law; sampled: of many chains",
        f"naive SGLDLP-L in {settings.format}: Theorem 2 is smallest at α = {best:.3g}, and grows as α goes to 0",
        f"full-precision accumulators, m = M = Ψ = d = 1, small α: {bits} (a Gaussian has Ψ = 0, and no such bias)",
    ]
    if result.resolution is not None:
        text.append(f"sampled: {settings.chains} chains cannot tell distances below {result.resolution:.3f} from 0")
    return [*text, f"seed {settings.seed}, {_describe_environment()}"]


def result_remarks(result: dict[str, Any]) -> list[str]:
    """Return the remarks on one result."""
    error, nll, ece = ((result["single"] or {}).get(name) for name in ("error", "nll", "ece"))
    known = f"error {_number(error, '.2%')}, NLL {_number(nll, '.4f')}, ECE {_number(ece, '.2%')}"
    text = [f"the last sample alone: {known}"]
    notes = [*filter(None, [result["data"]["note"]]), *result["scaled"]]
    changed = [f"scaled down or changed: {'; '.join(notes)}"] if notes else []
    return [*text, *changed, _describe_environment(result["environment"])]


def convergence_remarks(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the line that stands below a table of results whose R-hat is too large, if it is."""
    return [*filter(None, [warn_of_non_convergence(results)])]


def text_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of texts; the first column is aligned left."""
    out = _new_table(title, head, head[:1])
    for row in rows:
        out.add_row(*row)
    return out


def diagnosis_table(title: str, rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of parameters: shares of weights by what limits them, inflation, and the format that would do."""
    out = _new_table(title, diagnosis.HEAD, diagnosis.HEAD[:2])
    for row in rows:
        out.add_row(*row)
    return out


def evaluation_table(found: Sequence[dict[str, Any]]) -> Table:
    """Return a table of evaluated averages."""
    columns = ("method", "format", "runs", "error", "NLL", "Brier", "ECE", "R-hat", "samples", "AUROC", "(mutual inf.)")
    out = _new_table("Averages over stored samples", columns, ("method", "format"))
    for one in found:
        scores, settings, ood = one["scores"], one["settings"], one["ood"] or {}
        out.add_row(
            method_name(settings["method"]),
            settings["format"],
            str(len(one["runs"])),
            *_figures(scores),
            _number(one["r_hat"], ".2f"),
            str(one["samples"]),
            _number(ood.get("entropy"), ".3f"),
            _number(ood.get("mutual_information"), ".3f"),
        )
    return out
