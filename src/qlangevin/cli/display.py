"""What commands print: tables for people on standard output, or one JSON object."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .. import theory
from .._version import __version__
from ..distributed.ranks import launched
from ..experiments import bound, gaussian
from ..experiments.environment import environment
from ..experiments.methods import METHODS

__all__ = [
    "as_json",
    "bound_remarks",
    "bound_table",
    "complaint",
    "evaluation_table",
    "fail",
    "gaussian_remarks",
    "gaussian_table",
    "lines",
    "machine",
    "means_table",
    "number",
    "print_json",
    "rank",
    "result_remarks",
    "scores_table",
    "sentence",
    "tables",
    "terms_table",
]


def print_json(answer: Any) -> None:
    print(json.dumps(answer, indent=2, allow_nan=False), flush=True)


def as_json(name: str, settings: Any, rows: Iterable[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What a command was told and what came out."""
    options = {key: str(x) if isinstance(x, Path) else x for key, x in dataclasses.asdict(settings).items()}
    options.pop("json", None)
    about = {"experiment": name, "version": __version__, "settings": options, "environment": environment()}
    return {**about, **more, "rows": list(rows)}


def complaint(box: str) -> str:
    """What tyro has against a command line, in one sentence: the first part of its box, and what it would take instead."""
    rows = [re.sub(r"\x1b\[[\d;]*m", "", row).strip("│ ") for row in box.splitlines()]
    parts = [list(part) for rule, part in itertools.groupby(rows[1:], lambda row: set(row) <= set("─-╰╯")) if not rule]
    said = re.sub(r"^Error parsing (?:(?!-)\S+ )?|\.$", "", " ".join(parts[0] if parts else rows))
    near = [row.split()[0] for part in parts if re.match("Perhaps|Arguments similar", part[0]) for row in part[1:]]
    options = list(dict.fromkeys(word for word in near if word.startswith("--")))
    instead = [f"perhaps you meant {' or '.join(options)}"] if options else []
    instead += [" ".join(part) for part in parts[1:] if part[0].startswith("Available")]
    return "; ".join(re.sub(r"^[A-Z](?=[a-z ])", lambda m: m[0].lower(), text) for text in (said, *instead))


def sentence(error: BaseException) -> str:
    """What is wrong, in a line."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def fail(message: str, code: int) -> int:
    """Say what went wrong, and return the exit code."""
    here = "" if rank() is None else f" (rank {rank()})"
    print(f"qlangevin{here}: {message}", file=sys.stderr, flush=True)
    return code


def rank() -> str | None:
    """Which of several processes this is, to say who speaks; None if it is the only one."""
    return os.environ["RANK"] if launched() and os.environ["WORLD_SIZE"] != "1" else None


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def tables(*made: Table) -> None:
    """Closer together where there is no room; and rather too wide than with numbers cut short."""
    for table in made:
        out, anywhere = console(), Console(width=1000)
        if anywhere.measure(table).maximum > out.width:
            table.padding = (0, 0)
        out.width = max(out.width, anywhere.measure(table).maximum)
        out.print(table)


def lines(*text: str) -> None:
    console().print("\n".join(text), highlight=False, markup=False, soft_wrap=True)


def number(value: float | None, format: str) -> str:
    return "—" if value is None or not math.isfinite(value) else f"{value:{format}}"


def _table(title: str, columns: Sequence[str], left: Sequence[str]) -> Table:
    out = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        out.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return out


def gaussian_table(result: gaussian.Result) -> Table:
    """Figure 1 in numbers, a stepsize named once."""
    columns = ("α", "method", "variance ± s.e.", "exact", "z", "W2", "exact", "steps", "time")
    out = _table(f"Standard Gaussian in {result.settings.format}", columns, ("method",))
    last = None
    for row in result.rows:
        out.add_row(
            f"{row.stepsize:g}" if row.stepsize != last else "",
            row.method,
            f"{row.variance:.4f} ± {row.standard_error:.4f}",
            number(row.exact_variance, ".4f"),
            number(row.z, "+.1f"),
            f"{row.w2:.4f}",
            number(row.exact_w2, ".4f"),
            f"{row.chain_steps / 1e6:.3g}M",
            f"{row.seconds:.1f} s",
        )
        last = row.stepsize
    return out


def gaussian_remarks(settings: gaussian.Settings, result: gaussian.Result) -> list[str]:
    """What one has to know to read the table and to get it again."""
    text = [
        "exact: of the stationary law, without sampling; steps: of all chains together",
        "z: (sampled - exact)/s.e. of the variance, beyond ±4 once in 16 000 rows",
        f"seed {settings.seed}, {settings.parallel} chains, {machine()}",
    ]
    text += [
        f"α = {row.stepsize:g}: a burn-in of {row.burn_in} steps is short of 3/α, the chains may not have converged"
        for row in result.rows[:: len(gaussian.METHODS)]
        if row.burn_in * row.stepsize < 2.99
    ]
    return text


def machine(about: dict[str, Any] | None = None) -> str:
    """What computes here, or what computed a result."""
    return ", ".join(f"{name} {value}" for name, value in (about or environment()).items())


def _figures(scores: dict[str, float]) -> tuple[str, str, str, str]:
    """Error, NLL, Brier score and calibration error."""
    return f"{scores['error']:.2%}", f"{scores['nll']:.4f}", f"{scores['brier']:.4f}", f"{scores['ece']:.2%}"


def scores_table(title: str, results: Iterable[dict[str, Any]]) -> Table:
    """A line for each run: how good its average is, what it costs."""
    columns = ("method", "format", "seed", "error", "NLL", "Brier", "ECE", "R-hat", "samples", "bytes/weight", "time")
    out = _table(title, columns, ("method", "format"))
    for result in results:
        scores, settings = result["scores"], result["settings"]
        out.add_row(
            METHODS[settings["method"]].name,
            settings["format"],
            str(settings["seed"]),
            *_figures(scores),
            number(result["r_hat"], ".2f"),
            str(result["samples"]),
            f"{result['memory']['training']:.1f}",
            f"{result['seconds']['train']:.1f} s",
        )
    return out


def bound_table(result: bound.Result) -> Table:
    """The distance that the theorems allow, that of the exact law, and the sampled one."""
    columns = ("format", "α", "method", "bound", "exact", "sampled")
    out = _table("W2 to a standard Gaussian", columns, ("format", "method"))
    last: tuple[str, float] | None = None
    for row in result.rows:
        here = (row.format, row.stepsize)
        named = (row.format, f"{row.stepsize:g}") if here != last else ("", "")
        out.add_row(*named, row.method, *(number(x, ".4f") for x in (row.bound, row.exact, row.sampled)))
        last = here
    return out


def terms_table(settings: bound.Settings) -> Table:
    """The theorems term by term, in the format of the first panel at the stepsize of the second."""
    constants = theory.Constants(1.0, 1.0, gradient=bound.mean_gradient(settings.stepsize, settings.gap))
    found = bound.terms(constants, settings.stepsize, settings.gap)
    columns = ("term", *found)
    out = _table(f"Theorems 1 to 3 in {settings.format} at α = {settings.stepsize:g}", columns, ("term",))
    for name in next(iter(found.values())).terms:
        out.add_row(name, *(f"{b.terms[name]:.4f}" for b in found.values()))
    out.add_row("W2 is at most", *(f"{b.total:.4f}" for b in found.values()))
    return out


def bound_remarks(settings: bound.Settings, result: bound.Result) -> list[str]:
    """What one has to know to read the tables."""
    best = theory.best_stepsize(theory.Constants(1.0, 1.0), settings.gap)
    bits = theory.bits_needed(theory.Constants(1.0, 1.0, hessian=1.0), accuracy=0.001)
    text = [
        "bound: what the theorem allows after infinitely many steps; exact: of the stationary law; sampled: of many chains",
        f"naive SGLDLP-L in {settings.format}: Theorem 2 is smallest at α = {best:.3g}, and grows as α goes to 0",
        f"full-precision accumulators, m = M = Ψ = d = 1, small α: {bits} (a Gaussian has Ψ = 0, and no such bias)",
    ]
    if result.resolution is not None:
        text.append(f"sampled: {settings.chains} chains cannot tell distances below {result.resolution:.3f} from 0")
    return [*text, f"seed {settings.seed}, {machine()}"]


def result_remarks(result: dict[str, Any]) -> list[str]:
    """What one has to know of a result."""
    single = result["single"]
    text = [f"the last sample alone: error {single['error']:.2%}, NLL {single['nll']:.4f}, ECE {single['ece']:.2%}"]
    notes = [*filter(None, [result["data"]["note"]]), *result["scaled"]]
    changed = [f"scaled down or changed: {'; '.join(notes)}"] if notes else []
    return [*text, *changed, machine(result["environment"])]


def means_table(title: str, results: Sequence[dict[str, Any]]) -> Table:
    """A line for each method and format: means over seeds."""
    columns = ("method", "format", "seeds", "error", "NLL", "ECE", "bytes/weight", "time")
    out = _table(title, columns, ("method", "format"))
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["settings"]["method"], result["settings"]["format"]), []).append(result)
    for (method, format), runs in groups.items():
        error, nll, ece = (sum(r["scores"][name] for r in runs) / len(runs) for name in ("error", "nll", "ece"))
        seconds = sum(r["seconds"]["train"] for r in runs) / len(runs)
        held = f"{runs[0]['memory']['training']:.1f}"
        figures = (f"{error:.2%}", f"{nll:.4f}", f"{ece:.2%}", held, f"{seconds:.1f} s")
        out.add_row(METHODS[method].name, format, str(len(runs)), *figures)
    return out


def evaluation_table(found: Sequence[dict[str, Any]]) -> Table:
    """A line for each average."""
    columns = ("method", "format", "runs", "error", "NLL", "Brier", "ECE", "R-hat", "samples", "AUROC", "(mutual inf.)")
    out = _table("Averages over stored samples", columns, ("method", "format"))
    for one in found:
        scores, settings, ood = one["scores"], one["settings"], one["ood"] or {}
        out.add_row(
            METHODS[settings["method"]].name,
            settings["format"],
            str(len(one["runs"])),
            *_figures(scores),
            number(one["r_hat"], ".2f"),
            str(one["samples"]),
            number(ood.get("entropy"), ".3f"),
            number(ood.get("mutual_information"), ".3f"),
        )
    return out
