"""The paper in a minute: the Gaussian of Figure 1, then the paper's methods on small digits, as an HTML report.

The digits are those of scikit-learn, the network has one hidden layer. The methods run in 8 bits, SGD and SGLD also in full
precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._validate import check_integer
from . import gaussian, run
from .environment import cores
from .plotting import save_figure
from .presets import Digits
from .processes import Progress, ignore_progress
from .sweep import plan_runs, sweep

__all__ = ["DemoResult", "DemoSettings", "remarks", "run_demo"]

LEAD = (
    "An 8-bit weight can only be a multiple of the gap Δ, so every step of a sampler has to round. Rounding is noise of its own, "
    "and small steps need many of them: without correction the noise adds up, and the chain samples a distribution that is far "
    "too wide (middle). The variance-corrected quantizer rounds and adds the Langevin noise in one draw whose variance is the "
    "right one (right): the same 8 bits, the right distribution. A full-precision copy of the weights helps, too (left), and "
    "costs four more bytes a weight."
)
CAPTION = (
    "SGLD on a standard Gaussian in 8-bit fixed point: samples as bars, the target as a line (Figure 1 of the paper)."
)


@dataclass(frozen=True)
class DemoSettings:
    """The paper in a minute: Figure 1, and its methods in 8 bits on small digits, as an HTML report."""

    out: Path = Path("results/demo")
    """Folder of the report and the runs; finished runs are skipped."""
    seeds: int = 2
    """Runs of each method on digits."""
    jobs: int | None = None
    """Runs at the same time; by default as many as there are cores."""

    def __post_init__(self) -> None:
        check_integer("seeds", self.seeds, 1)
        if self.jobs is not None:
            check_integer("jobs", self.jobs, 1)

    @property
    def gaussian(self) -> gaussian.GaussianSettings:
        """Settings of Figure 1: fewer chains than by default."""
        return gaussian.GaussianSettings(chains=2000)

    @property
    def work(self) -> float:
        """Total of the progress, in runs: the Gaussian counts as much as half of them."""
        return 1.5 * self.seeds * len(Digits.rows)


@dataclass(frozen=True, eq=False)
class DemoResult:
    """Rows of the Gaussian, results on the digits, and the page of the report."""

    gaussian: gaussian.GaussianResult
    results: list[dict[str, Any]]
    page: Path


def run_demo(settings: DemoSettings, progress: Progress = ignore_progress) -> DemoResult:
    """Sample, save the runs and the report. Raises RuntimeError if a run fails."""
    from .report import Lead, write_report  # only here: --help imports this module, and must be quick

    figure, share = settings.out / "gaussian.png", settings.work / 3 / settings.gaussian.total_steps
    Digits().load_data(None)  # fails at once if scikit-learn is not installed
    settings.out.mkdir(parents=True, exist_ok=True)
    rows = gaussian.run_gaussian(settings.gaussian, lambda label, steps: progress(label, steps * share))
    save_figure(figure, lambda path: gaussian.draw(rows, path))
    configs = plan_runs(Digits(), (), (), range(settings.seeds))
    outcomes = sweep(configs, settings.out / "runs", None, settings.jobs or cores(), 1, progress)
    if failed := [f"{outcome.folder}: {outcome.error}" for outcome in outcomes if outcome.error]:
        raise RuntimeError("; ".join(failed))
    results = [run.read_result(outcome.folder) for outcome in outcomes]
    lead = Lead(figure, CAPTION, LEAD)
    return DemoResult(rows, results, write_report(results, settings.out, "Why rounding noise must be corrected", lead))


def remarks(made: DemoResult) -> list[str]:
    """Return the remarks that explain the tables."""
    return [
        "Gaussian: the target has variance 1; naive rounding makes it wider, the more so the smaller the step",
        "digits: mean over seeds; bytes a weight are of weights and sampler state, without gradients",
        f"report: {made.page}",
    ]
