"""The command ``qlangevin``: parse the arguments, run, print. Whatever computes is in the library.

A command is a dataclass, its fields are the options, its docstrings the help. Results go to standard output, progress and
errors to standard error. Exit codes: 0 done, 1 the picture could not be saved, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from . import __version__, native
from .experiments import gaussian
from .progress import progress_bar

__all__ = ["main"]

Nothing = Annotated[None, tyro.conf.Suppress]  # tyro makes subcommands of a union, which takes two


@dataclass(frozen=True)
class Gaussian(gaussian.Settings):
    __doc__ = gaussian.Settings.__doc__

    out: Path = Path("results/gaussian.png")
    """Where the picture goes; the suffix says what it is (png, pdf, svg)."""
    json: bool = False
    """Print one JSON object instead of the table, and no progress."""


@dataclass(frozen=True)
class Run:
    """Reproduce an experiment of the paper."""

    experiment: Annotated[Gaussian, tyro.conf.subcommand("gaussian", prefix_name=False)] | Nothing


Command = Annotated[Run, tyro.conf.subcommand("run")] | Nothing


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"qlangevin {__version__}")
        return 0
    try:
        command: Any = tyro.cli(
            Command,
            prog="qlangevin",
            description="Low-precision stochastic gradient Langevin dynamics. --version prints the version.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes),
        )
        return run_gaussian(command.experiment)
    except SystemExit as stop:  # tyro has printed the help or what is wrong
        return int(stop.code or 0)
    except ValueError as error:
        return fail(f"error: {error}", 2)
    except OSError as error:
        return fail(f"error: {error}", 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)


def fail(message: str, code: int) -> int:
    print(f"qlangevin: {message}", file=sys.stderr)
    return code


def run_gaussian(settings: Gaussian) -> int:
    """Figure 1: sample, save the picture, print the table."""
    check_picture(settings.out)
    with progress_bar(settings.total_steps, shown=not settings.json) as advance:
        result = gaussian.run(settings, advance)
    try:
        save(settings.out, lambda path: gaussian.draw(result, path))
    finally:  # whatever becomes of the picture, the numbers are not lost
        if settings.json:
            print(json.dumps(as_json(settings, result), indent=2), flush=True)
        else:
            console = Console(width=None if sys.stdout.isatty() else 120)
            console.print(table(result, roomy=console.width >= 96))
            console.print("\n".join(remarks(settings, result)), highlight=False, markup=False, soft_wrap=True)
    return 0


def table(result: gaussian.Result, roomy: bool) -> Table:
    """The rows, a stepsize named once; 80 columns wide unless there is room for more."""
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1 if roomy else 0), pad_edge=False)
    out.title = f"Standard Gaussian in {result.settings.format}"
    for name in ("α", "method", "variance ± s.e.", "exact", "z", "W2", "exact", "steps", "time"):
        out.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
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


def number(value: float | None, format: str) -> str:
    return "—" if value is None else f"{value:{format}}"


def remarks(settings: Gaussian, result: gaussian.Result) -> list[str]:
    """What one has to know to read the table and to get it again."""
    lines = [
        "exact: of the stationary law, without sampling; steps: of all chains together",
        "z: (sampled - exact)/s.e. of the variance, beyond ±4 once in 16 000 rows",
        f"seed {settings.seed}, {settings.parallel} chains, "
        + ", ".join(f"{name} {value}" for name, value in environment().items()),
    ]
    lines += [
        f"α = {row.stepsize:g}: a burn-in of {row.burn_in} steps is short of 3/α, the chains may not have converged"
        for row in result.rows[:: len(gaussian.METHODS)]
        if row.burn_in * row.stepsize < 2.99
    ]
    return [*lines, f"picture: {settings.out}"]


def environment() -> dict[str, Any]:
    """What computed the numbers. It changes how long they take, not what they are."""
    kernels = f"native ({native.level()})" if native.available else "PyTorch (native kernels not installed)"
    return {"kernels": kernels, "threads": torch.get_num_threads(), "torch": torch.__version__}


def as_json(settings: Gaussian, result: gaussian.Result) -> dict[str, Any]:
    options = dataclasses.asdict(settings) | {"out": str(settings.out)}
    return {
        "experiment": "gaussian",
        "version": __version__,
        "settings": {name: value for name, value in options.items() if name != "json"},
        "environment": environment(),
        "rows": [dataclasses.asdict(row) | {"z": row.z} for row in result.rows],
    }


def check_picture(path: Path) -> None:
    """Refuse a path that a picture cannot be saved to, before the work and not after it."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.is_dir():
        raise ValueError(f"--out must be a file, {path} is a directory")
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--out must end in .png, .pdf, .svg or another of {', '.join(sorted(kinds))}, got {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"--out={path} cannot be written: {error.strerror}; choose another place") from error


def save(path: Path, draw: Callable[[Path], None]) -> None:
    """Draw beside ``path``, then move: a file of that name is replaced by a whole one or not at all."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        draw(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
