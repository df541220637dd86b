"""The commands of ``qlangevin``: each a dataclass whose fields are the options and whose docstrings are the help.

``execute`` does the work, prints the result on standard output and returns the exit code; progress goes to standard error.
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

from .._progress import progress_bar
from .._validate import check_integer
from ..distributed.ranks import join
from ..experiments import bound, demo, gaussian, presets, run
from ..experiments.data.datasets import Name
from ..experiments.environment import cores
from ..experiments.evaluate import evaluate
from ..experiments.methods import MethodName
from ..experiments.plotting import check_picture, save
from ..experiments.report import build
from ..experiments.sweep import plan, sweep
from . import display

__all__ = ["Command", "Run"]

Preset = TypeVar("Preset", bound=presets.Experiment)
Runs: TypeAlias = Annotated[tuple[Path, ...], tyro.conf.Positional]


@dataclass(frozen=True)
class Gaussian(gaussian.Settings):
    __doc__ = gaussian.Settings.__doc__

    out: Path = Path("results/gaussian.png")
    """Where the picture goes; the suffix says what it is (png, pdf, svg)."""
    json: bool = False
    """Print one JSON object instead of the table, and no progress."""

    def execute(self) -> int:
        check_picture(self.out)
        with join() as ranks:
            share = self.total_steps / ranks.size  # of each about as much
            with progress_bar(share, shown=not self.json and ranks.first) as advance:
                result = gaussian.run(self, advance, ranks)
        if not ranks.first:
            return 0
        try:
            save(self.out, lambda path: gaussian.draw(result, path))
        finally:  # whatever becomes of the picture, the numbers are not lost
            rows = (dataclasses.asdict(row) | {"z": row.z} for row in result.rows)
            if self.json:
                display.print_json(display.as_json("gaussian", self, rows))
            else:
                display.tables(display.gaussian_table(result))
                display.lines(*display.gaussian_remarks(self, result), f"picture: {self.out}")
        return 0


@dataclass(frozen=True)
class Bound(bound.Settings):
    __doc__ = bound.Settings.__doc__

    out: Path = Path("results/bound.png")
    """Where the picture goes; the suffix says what it is (png, pdf, svg)."""
    json: bool = False
    """Print one JSON object instead of the tables, and no progress."""

    def execute(self) -> int:
        check_picture(self.out)
        with progress_bar(self.total_steps, shown=not self.json) as advance:
            result = bound.run(self, advance)
        try:
            save(self.out, lambda path: bound.draw(result, path))
        finally:
            if self.json:
                display.print_json(display.as_json("bound", self, map(dataclasses.asdict, result.rows)))
            else:
                display.tables(display.bound_table(result), display.terms_table(self))
                display.lines(*display.bound_remarks(self, result), f"picture: {self.out}")
        return 0


@dataclass(frozen=True)
class Where:
    """Where things are, and how to say what came out."""

    out: Path | None = None
    """Folder of the run, or of the runs of a sweep; by default below results/."""
    data_dir: Path | None = None
    """Folder of the data set, or of several; $QLANGEVIN_DATA by default, else it is downloaded."""
    json: bool = False
    """Print one JSON object instead of a table, and no progress."""


@dataclass(frozen=True)
class RunOne(Generic[Preset]):
    config: Preset
    where: Where
    resume: Path | None = None
    """Go on with the run in this folder, with its own settings. The command that began it does so, too."""

    def execute(self) -> int:
        config, folder = self._chosen()
        try:
            with join() as ranks:
                shown = ranks.first and not self.where.json
                with progress_bar(1.0, config.run_name, shown=shown) as advance:
                    result = run.run_experiment(config, folder, self.where.data_dir, advance, ranks, cores())
        except KeyboardInterrupt:
            return display.fail(f"interrupted; {self._again(config, folder)}", 130)
        if not ranks.first:
            return 0
        if self.where.json:
            display.print_json(result)
        else:
            display.tables(display.scores_table(config.name, [result]))
            display.lines(*display.result_remarks(result), f"run: {folder}")
        return 0

    def _again(self, config: presets.Experiment, folder: Path) -> str:
        """How to go on."""
        if not (folder / run.CONFIG).exists():
            return "nothing was done yet"
        if display.rank() is not None:
            return "the same command goes on"
        given = [] if self.where.data_dir is None else ["--data-dir", str(self.where.data_dir)]
        return f"to go on: {shlex.join(['qlangevin', 'run', config.name, '--resume', str(folder), *given])}"

    def _chosen(self) -> tuple[presets.Experiment, Path]:
        if self.resume is None:
            return self.config, self.where.out or Path("results", self.config.name, self.config.run_name)
        config = run.configuration(self.resume)
        if config.name != self.config.name:
            raise ValueError(f"{self.resume} is a run of {config.name}, not of {self.config.name}")
        if self.config not in (config, type(config)()) or self.where.out:
            raise ValueError("--resume goes on with the settings the run has; leave the others out")
        return config, self.resume


@dataclass(frozen=True)
class SweepOne(Generic[Preset]):
    config: Preset
    where: Where
    methods: tuple[MethodName, ...] = ()
    """Methods, all in each format; by default the rows of the paper's table or figure."""
    formats: tuple[str, ...] = ()
    """Number formats; full precision needs none."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds; each makes a run of every method and format."""
    jobs: int | None = None
    """Runs side by side; by default as many as there are cores."""

    def execute(self) -> int:
        jobs = cores() if self.jobs is None else check_integer("jobs", self.jobs, 1)
        configs = plan(self.config, self.methods, self.formats, self.seeds)
        folder = self.where.out or Path("results", self.config.name)
        threads = max(1, cores() // min(jobs, len(configs)))
        try:
            with progress_bar(float(len(configs)), "sweep", shown=not self.where.json) as advance:
                outcomes = sweep(configs, folder, self.where.data_dir, jobs, threads, advance)
        except KeyboardInterrupt:
            return display.fail("interrupted; the same command goes on", 130)
        results = [run.read_result(outcome.folder) for outcome in outcomes if outcome.error is None]
        failed = [f"{outcome.folder}: {outcome.error}" for outcome in outcomes if outcome.error]
        if self.where.json:
            display.print_json({"runs": results, "failed": failed})
        else:
            display.tables(display.scores_table(self.config.name, results))
            display.lines(f"{len(results)} of {len(configs)} runs done: {folder}", f"next: qlangevin report {folder}")
        return display.fail(f"failed: {'; '.join(failed)}", 1) if failed else 0


@dataclass(frozen=True)
class Evaluate:
    """Score the samples of finished or unfinished runs again, alone or as chains of one average."""

    runs: Runs
    """Folders of runs."""
    together: bool = False
    """Average over the samples of all runs, which must differ in nothing but the seed."""
    ood: Name | None = None
    """Data of another kind: how well uncertainty tells it apart (AUROC), such as fashion-mnist for mnist."""
    limit_test: int | None = None
    """Test with the first examples only; by default as the run."""
    data_dir: Path | None = None
    """Folder of the data set, or of several."""
    json: bool = False
    """Print one JSON object instead of a table, and no progress."""

    def execute(self) -> int:
        if not self.runs:
            raise ValueError("give at least one folder of a run")
        groups = [self.runs] if self.together else [(run,) for run in self.runs]
        with progress_bar(float(len(groups)), "evaluating", shown=not self.json) as advance:
            found = [evaluate(g, self.data_dir, self.limit_test, self.ood, advance) for g in groups]
        if self.json:
            display.print_json({"runs": found})
        else:
            display.tables(display.evaluation_table(found))
        return 0


@dataclass(frozen=True)
class Report:
    """Tables, figures and one HTML page from saved results, beside the paper's own numbers."""

    runs: Runs
    """Folders of runs, folders of such folders, result.json files or collections of results."""
    out: Path = Path("results/report")
    """Folder of the report."""
    title: str = "Low-precision SGLD: results"
    """Its title."""
    json: bool = False
    """Print one JSON object, with the verdicts on the paper's claims, instead of a line."""

    def execute(self) -> int:
        results = build.load(self.runs)
        page = build.write(results, self.out, self.title)
        if self.json:
            verdicts = [dataclasses.asdict(claim) for claim in build.claims(results)]
            display.print_json({"page": str(page), "runs": len(results), "claims": verdicts})
        else:
            display.lines(f"{len(results)} runs: {page}")
        return 0


@dataclass(frozen=True)
class Demo(demo.Settings):
    __doc__ = demo.Settings.__doc__

    json: bool = False
    """Print one JSON object instead of the tables, and no progress."""

    def execute(self) -> int:
        with progress_bar(self.work, "starting", shown=not self.json) as advance:
            made = demo.run_demo(self, advance)
        if self.json:
            display.print_json({"runs": made.results})
        else:
            display.tables(display.gaussian_table(made.gaussian), display.means_table("digits", made.results))
            display.lines(*demo.remarks(made))
        return 0


@dataclass(frozen=True)
class Bench:
    """Time and memory against the rivals; needs the source repository and `make bench`'s environment."""

    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Passed on to benchmarks.run, such as the parts to run; `-- --help` shows them."""

    def execute(self) -> int:
        root = Path(__file__).parents[3]
        if not (root / "benchmarks" / "run.py").exists():
            raise ValueError(
                "the benchmarks are in the source repository, which is not here; clone it, and `make bench`"
            )
        command = [sys.executable, "-m", "benchmarks.run", *self.arguments]
        return subprocess.run(command, cwd=root, check=False).returncode


def _named(kind: Any, *more: Any) -> Any:
    """A union of subcommands: an experiment each."""
    union = [
        Annotated[kind[preset], tyro.conf.subcommand(name, prefix_name=False, description=preset.__doc__)]
        for name, preset in presets.EXPERIMENTS.items()
    ]
    return functools.reduce(operator.or_, [*more, *union])


Experiments: Any = _named(RunOne, Annotated[Gaussian, tyro.conf.subcommand("gaussian", prefix_name=False)])
Sweeps: Any = _named(SweepOne)


@dataclass(frozen=True)
class Run:
    """Run an experiment of the paper with one method, or go on with it."""

    experiment: Experiments
    """Which one."""

    def execute(self) -> int:
        return self.experiment.execute()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Sweep:
    """Run an experiment with many methods, formats and seeds; what is done is skipped."""

    experiment: Sweeps
    """Which one."""

    def execute(self) -> int:
        return self.experiment.execute()  # type: ignore[no-any-return]


Command = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Sweep, tyro.conf.subcommand("sweep")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Bound, tyro.conf.subcommand("bound")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
)
