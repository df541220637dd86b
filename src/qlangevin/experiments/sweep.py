"""Run many experiments: methods x formats x seeds, as many at a time as there are cores.

Finished runs are skipped, interrupted ones are resumed, and one that fails does not stop the others. Each run has its folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import run
from .methods import METHODS, MethodName
from .presets import Experiment
from .processes import Progress, ignore_progress, run_in_processes

__all__ = ["RunOutcome", "plan_runs", "sweep"]


@dataclass(frozen=True)
class RunOutcome:
    """Folder of a run of a sweep, and why it has no result; None if it has one."""

    folder: Path
    error: str | None = None


def plan_runs(
    base: Experiment, methods: Sequence[MethodName], formats: Sequence[str], seeds: Sequence[int]
) -> list[Experiment]:
    """Return the configurations of a sweep: all these methods in all these formats, or else the rows of the paper.

    Methods in full precision occur once for each seed.
    """
    if not seeds:
        raise ValueError("a sweep needs at least one seed")
    rows = list(base.rows)
    if methods or formats:
        methods, formats = methods or [m for m, _ in rows], formats or [f for _, f in rows if f is not None]
        rows = [(method, format) for format in formats or [base.default_format] for method in methods]
    configs = [
        replace(base, method=method, format=format if METHODS[method].low_precision else None, seed=seed)
        for seed in seeds
        for method, format in rows
    ]
    return list(dict.fromkeys(configs))


def sweep(
    configs: Sequence[Experiment],
    folder: Path,
    data_dir: Path | None,
    jobs: int,
    threads: int,
    progress: Progress = ignore_progress,
) -> list[RunOutcome]:
    """Do the runs in subfolders of ``folder``, ``jobs`` at a time. ``progress`` receives the share of a run just done.

    Missing data and a folder that holds another run are errors, raised before any run starts. Ctrl-C is passed on to the runs,
    each of which saves its state, and is raised when they have ended.
    """
    runs = [(config, folder / config.run_name) for config in configs]
    left = [(config, run_folder, data_dir) for config, run_folder in runs if not run.is_finished(config, run_folder)]
    if left:
        left[0][0].load_data(data_dir)  # all runs need them: found, or downloaded, once
    done = len(runs) - len(left)
    progress("sweep", done)

    def report(i: int, label: str, share: float, ended: int) -> None:
        progress(f"{done + ended}/{len(configs)} {left[i][0].run_name}", share)

    outcomes = run_in_processes(_run, left, jobs, threads, report)
    errors = {left[i][1]: outcome.error for i, outcome in outcomes.items()}
    died = "its process died; run the same command again"
    return [
        RunOutcome(run_folder, errors.get(run_folder, None if run.is_finished(c, run_folder) else died))
        for c, run_folder in runs
    ]


def _run(config: Experiment, folder: Path, data_dir: Path | None, progress: Progress) -> None:
    """Do one run, its chains one after the other: the other cores have other runs to do."""
    run.run_experiment(config, folder, data_dir, progress)
