"""Many runs at once: methods x formats x seeds, as many side by side as there are cores.

What is done is skipped, what was interrupted goes on, and what fails does not stop the others. Each run is a folder of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import run
from .methods import METHODS, MethodName
from .presets import Experiment
from .processes import Progress, side_by_side

__all__ = ["Outcome", "plan", "sweep"]


@dataclass(frozen=True)
class Outcome:
    """What became of a run; ``error`` says why it has no result."""

    folder: Path
    error: str | None = None


def plan(
    base: Experiment, methods: Sequence[MethodName], formats: Sequence[str], seeds: Sequence[int]
) -> list[Experiment]:
    """The runs: the rows of the paper, or all of these methods in all of these formats; full precision once for each seed."""
    if not seeds:
        raise ValueError("a sweep needs at least one seed")
    rows = list(base.rows)
    if methods or formats:
        methods, formats = methods or [m for m, _ in rows], formats or [f for _, f in rows if f is not None]
        rows = [(method, format) for format in formats or [base.default_format] for method in methods]
    runs = []
    for seed in seeds:
        for method, format in rows:
            config = replace(base, method=method, format=format if METHODS[method].low else None, seed=seed)
            if config not in runs:
                runs.append(config)
    return runs


def sweep(
    configs: Sequence[Experiment],
    folder: Path,
    data_dir: Path | None,
    jobs: int,
    threads: int,
    progress: Progress = lambda label, runs: None,
) -> list[Outcome]:
    """Do the runs in subfolders of ``folder``, ``jobs`` at a time; ``progress`` is told what share of a run more is done.

    Data that are not there and a folder that holds another run are errors, before the first of them. Ctrl-C is passed on to
    the runs, each of which saves where it is, and raised when they have ended.
    """
    folders = [folder / config.run_name for config in configs]
    pairs = list(zip(configs, folders, strict=True))
    left = [(config, f, data_dir) for config, f in pairs if not run.finished(config, f)]
    if left:
        run.load(left[0][0], data_dir)  # what all of them need: to be missed, or downloaded, once
    done = len(pairs) - len(left)
    progress("sweep", done)

    def told(i: int, label: str, share: float, ended: int) -> None:
        progress(f"{done + ended}/{len(configs)} {left[i][0].run_name}", share)

    became = side_by_side(_run, left, jobs, threads, told)
    errors = {left[i][1]: outcome.error for i, outcome in became.items()}
    lost = "its process died; run the same command again"
    return [Outcome(f, errors.get(f, None if run.finished(c, f) else lost)) for c, f in pairs]


def _run(config: Experiment, folder: Path, data_dir: Path | None, progress: Progress) -> None:
    """One run, its chains one after the other: the processors have other runs to do."""
    run.run_experiment(config, folder, data_dir, progress)
