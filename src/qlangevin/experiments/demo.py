"""In a minute: why rounding noise must be corrected, on a Gaussian one can solve and on digits one can read.

The Gaussian of Figure 1 comes first. Then the paper's methods in 8 bits, and SGD and SGLD in full precision, on scikit-learn's
digits with a network of one hidden layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._validate import check_integer
from . import gaussian, run
from .environment import cores
from .plotting import save
from .presets import Digits
from .report import build
from .sweep import plan, sweep

__all__ = ["Demo", "Settings", "remarks", "run_demo"]

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
class Settings:
    """The paper in a minute: Figure 1, and its methods in 8 bits on small digits, as an HTML report."""

    out: Path = Path("results/demo")
    """Folder of the report and the runs; runs that are there already are not done again."""
    seeds: int = 2
    """Runs of each method on digits."""
    jobs: int | None = None
    """Runs side by side; by default as many as there are cores."""

    def __post_init__(self) -> None:
        check_integer("seeds", self.seeds, 1)
        if self.jobs is not None:
            check_integer("jobs", self.jobs, 1)

    @property
    def gaussian(self) -> gaussian.Settings:
        return gaussian.Settings(chains=2000)

    @property
    def work(self) -> float:
        """What the progress is a part of: the Gaussian counts as much as half of the runs."""
        return 1.5 * self.seeds * len(Digits.rows)


@dataclass(frozen=True, eq=False)
class Demo:
    """What came out."""

    gaussian: gaussian.Result
    results: list[dict[str, Any]]
    page: Path


def run_demo(settings: Settings, progress: Callable[[str, float], None] = lambda label, share: None) -> Demo:
    """Sample, save the runs and the report. Raises RuntimeError if a run fails."""
    figure, share = settings.out / "gaussian.png", settings.work / 3 / settings.gaussian.total_steps
    run.load(Digits(), None)  # what is not installed is missed at once
    settings.out.mkdir(parents=True, exist_ok=True)
    first = gaussian.run(settings.gaussian, lambda label, steps: progress(label, steps * share))
    save(figure, lambda path: gaussian.draw(first, path))
    configs = plan(Digits(), (), (), range(settings.seeds))
    outcomes = sweep(configs, settings.out / "runs", None, settings.jobs or cores(), 1, progress)
    if failed := [f"{outcome.folder}: {outcome.error}" for outcome in outcomes if outcome.error]:
        raise RuntimeError("; ".join(failed))
    results = [run.read_result(outcome.folder) for outcome in outcomes]
    lead = build.Lead(figure, CAPTION, LEAD)
    return Demo(first, results, build.write(results, settings.out, "Why rounding noise must be corrected", lead))


def remarks(made: Demo) -> list[str]:
    """What to look at."""
    return [
        "Gaussian: the target has variance 1; naive rounding makes it wider, the more so the smaller the step",
        "digits: mean over seeds; bytes a weight are of weights and sampler state, without gradients",
        f"report: {made.page}",
    ]
