"""The commands of ``qlangevin``: each is a dataclass whose fields are the options and whose docstrings are the help.

``execute`` does the work, prints the result on standard output and returns the exit code; progress goes to standard error.
Whatever takes long to import (torchmetrics, ArviZ, matplotlib, scikit-learn, rich, the report) is imported on first use, so that
help is quick.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import tyro

from .._progress import SELDOM, progress_bar
from .._validate import check_integer
from ..distributed.ranks import PATIENCE, TIMEOUT, join
from ..experiments import presets, run
from ..experiments.data import DatasetName
from ..experiments.environment import cores
from ..experiments.methods import MethodName
from ..experiments.score import evaluate, find_samples
from ..experiments.sweep import plan_runs, sweep
from . import display
from .demo import Demo
from .diagnose import Diagnose
from .errors import fail, rank
from .figures import Bound, Gaussian
from .llc import Llc

__all__ = ["CommandLine", "Llc", "Run"]

Preset = TypeVar("Preset", bound=presets.Experiment)
Runs: TypeAlias = Annotated[tuple[Path, ...], tyro.conf.Positional]


@dataclass(frozen=True)
class Common:
    """Folders, and the form of the output."""

    out: Path | None = None
    """Folder of the run, or of the runs of a sweep; by default below results/."""
    data_dir: Path | None = None
    """Folder of the data set, or of several; by default $QLANGEVIN_DATA, else the data set is downloaded."""
    json: bool = False
    """Print one JSON object instead of a table, and no progress."""


@dataclass(frozen=True)
class Waiting:
    """Seconds that the ranks of torchrun wait for one another."""

    timeout: float = TIMEOUT
    """Of several ranks: seconds that one may be late in a step, or give no sign of life, until the others end."""
    patience: float = PATIENCE
    """Of several ranks: seconds until all must have come."""


@dataclass(frozen=True)
class RunExperiment(Generic[Preset]):
    """Run one experiment with one method."""

    settings: Preset
    common: Common
    waiting: Waiting
    resume: Path | None = None
    """Resume the run in this folder, with its own settings. The command that started it resumes it, too."""

    def execute(self) -> int:
        config, folder = self._choose()
        try:
            with join(patience=self.waiting.patience, timeout=self.waiting.timeout) as ranks:
                shown = ranks.first and not self.common.json
                with progress_bar(1.0, config.run_name, shown=shown, lines=SELDOM) as advance:
                    result = run.run_experiment(config, folder, self.common.data_dir, advance, ranks, cores())
        except KeyboardInterrupt:
            return fail(f"interrupted; {self._resume_hint(config, folder)}", 130)
        if not ranks.first:
            return 0
        if self.common.json:
            display.print_json(result)
        else:
            display.print_tables(display.scores_table(config.name, [result]))
            display.print_lines(
                *display.convergence_remarks([result]), *display.result_remarks(result), f"run: {folder}"
            )
        return 0

    def _resume_hint(self, config: presets.Experiment, folder: Path) -> str:
        """Return the words that tell the user how to resume."""
        if not (folder / presets.CONFIG).exists():
            return "nothing was done yet"
        if rank() is not None:
            return "the same command resumes"
        given = [] if self.common.data_dir is None else ["--data-dir", str(self.common.data_dir)]
        return f"to resume: {shlex.join(['qlangevin', 'run', config.name, '--resume', str(folder), *given])}"

    def _choose(self) -> tuple[presets.Experiment, Path]:
        """Return configuration and folder: as given, or those of the run to resume."""
        if self.resume is None:
            return self.settings, self.common.out or Path("results", self.settings.name, self.settings.run_name)
        config = presets.read_config(self.resume)
        if config.name != self.settings.name:
            raise ValueError(f"{self.resume} is a run of {config.name}, not of {self.settings.name}")
        if self.settings not in (config, type(config)()) or self.common.out:
            raise ValueError("--resume takes the settings of the run; leave all others out")
        return config, self.resume


@dataclass(frozen=True)
class SweepExperiment(Generic[Preset]):
    """Run one experiment with several methods, formats and seeds."""

    settings: Preset
    common: Common
    methods: tuple[MethodName, ...] = ()
    """Methods, each in all formats; by default the rows of the paper's table or figure."""
    formats: tuple[str, ...] = ()
    """Number formats; methods in full precision need none."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; every method and format is run with each."""
    jobs: int | None = None
    """Runs at the same time; by default as many as there are cores."""

    def execute(self) -> int:
        jobs = cores() if self.jobs is None else check_integer("jobs", self.jobs, 1)
        configs = plan_runs(self.settings, self.methods, self.formats, self.seeds)
        folder = self.common.out or Path("results", self.settings.name)
        threads = max(1, cores() // min(jobs, len(configs)))
        try:
            with progress_bar(float(len(configs)), "sweep", shown=not self.common.json, lines=SELDOM) as advance:
                outcomes = sweep(configs, folder, self.common.data_dir, jobs, threads, advance)
        except KeyboardInterrupt:
            return fail("interrupted; the same command resumes", 130)
        results = [run.read_result(outcome.folder) for outcome in outcomes if outcome.error is None]
        failed = [f"{outcome.folder}: {outcome.error}" for outcome in outcomes if outcome.error]
        if self.common.json:
            display.print_json({"runs": results, "failed": failed})
        else:
            display.print_tables(display.scores_table(self.settings.name, results))
            done = f"{len(results)} of {len(configs)} runs done: {folder}"
            display.print_lines(*display.convergence_remarks(results), done, f"next: qlangevin report {folder}")
        return fail(f"failed: {'; '.join(failed)}", 1) if failed else 0


@dataclass(frozen=True)
class Evaluate:
    """Score the samples of finished or unfinished runs, alone or as chains of one average."""

    runs: Runs
    """Folders of runs, or of folders of runs."""
    together: bool = False
    """Average over the samples of all runs, which may differ only in the seed, the number of chains and of workers."""
    ood: DatasetName | None = None
    """Data set of another kind, such as fashion-mnist for mnist: measure how well uncertainty tells it apart (AUROC)."""
    limit_test: int | None = None
    """Test on the first examples only; by default as in the run."""
    data_dir: Path | None = None
    """Folder of the data set, or of several."""
    json: bool = False
    """Print one JSON object instead of a table, and no progress."""

    def execute(self) -> int:
        if not self.runs:
            raise ValueError("give at least one folder of a run")
        runs = find_samples(self.runs)
        groups = [runs] if self.together else [[folder] for folder in runs]
        with progress_bar(float(len(groups)), "evaluating", shown=not self.json, lines=SELDOM) as advance:
            evaluated = [evaluate(group, self.data_dir, self.limit_test, self.ood, advance) for group in groups]
        if self.json:
            display.print_json({"runs": evaluated})
        else:
            display.print_tables(display.evaluation_table(evaluated))
            display.print_lines(*display.convergence_remarks(evaluated))
        return 0


@dataclass(frozen=True)
class Report:
    """Make tables, figures and one HTML page of saved results, beside the paper's own numbers."""

    runs: Runs
    """Folders of runs, folders of such folders, result.json files or collections of results."""
    out: Path = Path("results/report")
    """Folder of the report."""
    title: str = "Low-precision SGLD: results"
    """Title of the report."""
    json: bool = False
    """Print one JSON object, with the verdicts on the paper's claims, instead of a line."""

    def execute(self) -> int:
        from ..experiments.report import claims, load_results, write_report

        results = load_results(self.runs)
        page = write_report(results, self.out, self.title)
        remarks = display.convergence_remarks(results)
        if self.json:
            verdicts = [dataclasses.asdict(claim) for claim in claims(results)]
            not_converged = remarks[0] if remarks else None
            answer = {"page": str(page), "runs": len(results), "claims": verdicts, "not_converged": not_converged}
            display.print_json(answer)
        else:
            display.print_lines(f"{len(results)} runs: {page}", *remarks)
        return 0


@dataclass(frozen=True)
class Bench:
    """Measure time and memory against the baselines; needs the source repository and the environment of `make bench`."""

    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Arguments of benchmarks.run, such as the parts to run; `-- --help` lists them."""

    def execute(self) -> int:
        root = Path(__file__).parents[3]
        if not (root / "benchmarks" / "run.py").exists():
            raise ValueError(
                "the benchmarks are in the source repository, which is not here; clone it, and `make bench`"
            )
        command = [sys.executable, "-m", "benchmarks.run", *self.arguments]
        return subprocess.run(command, cwd=root, check=False).returncode


def _subcommands(kind: Any, *more: Any) -> Any:
    """Return the union of subcommands: ``kind`` of each experiment, and ``more``."""
    union = [
        Annotated[kind[preset], tyro.conf.subcommand(name, prefix_name=False, description=preset.__doc__)]
        for name, preset in presets.EXPERIMENTS.items()
    ]
    return functools.reduce(operator.or_, [*more, *union])


Experiments: Any = _subcommands(RunExperiment, Annotated[Gaussian, tyro.conf.subcommand("gaussian", prefix_name=False)])
Sweeps: Any = _subcommands(SweepExperiment)


@dataclass(frozen=True)
class Run:
    """Run an experiment of the paper with one method, or resume a run."""

    experiment: Experiments
    """Experiment to run."""

    def execute(self) -> int:
        return self.experiment.execute()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Sweep:
    """Run an experiment with several methods, formats and seeds; finished runs are skipped."""

    experiment: Sweeps
    """Experiment to run."""

    def execute(self) -> int:
        return self.experiment.execute()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CommandLine:
    """A command with its options."""

    command: (
        Annotated[Demo, tyro.conf.subcommand("demo", prefix_name=False)]
        | Annotated[Run, tyro.conf.subcommand("run", prefix_name=False)]
        | Annotated[Sweep, tyro.conf.subcommand("sweep", prefix_name=False)]
        | Annotated[Evaluate, tyro.conf.subcommand("evaluate", prefix_name=False)]
        | Annotated[Diagnose, tyro.conf.subcommand("diagnose", prefix_name=False)]
        | Annotated[Report, tyro.conf.subcommand("report", prefix_name=False)]
        | Annotated[Llc, tyro.conf.subcommand("llc", prefix_name=False)]
        | Annotated[Bound, tyro.conf.subcommand("bound", prefix_name=False)]
        | Annotated[Bench, tyro.conf.subcommand("bench", prefix_name=False)]
    )
