"""Run the parts of the demo, in processes of their own, and write its page."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._validate import check_integer
from .. import gaussian
from ..environment import cores
from ..processes import Progress, ignore_progress, run_in_processes
from . import bands, digits, images, methods, reference, regression, scores
from .result import DemoResult

__all__ = ["DemoSettings", "run_demo"]

FEATURES = regression.Schedule(chains=128, alpha=2e-4, steps=6000)
NETWORK = regression.Schedule(chains=32, alpha=1e-4, steps=6000)
GAUSSIAN = gaussian.GaussianSettings(stepsizes=(1e-3,), chains=500)


@dataclass(frozen=True)
class DemoSettings:
    """What 8 bits do to a posterior, and what the correction repairs: a table and a page of pictures in a minute."""

    out: Path = Path("results/demo")
    """Folder of the page."""
    jobs: int | None = None
    """Processes; by default as many as there are cores."""

    def __post_init__(self) -> None:
        if self.jobs is not None:
            check_integer("jobs", self.jobs, 1)


@dataclass(frozen=True)
class Part:
    """A part of the demo: a function of this module, its arguments, and about how many seconds it takes."""

    function: str
    arguments: tuple[Any, ...]
    seconds: float


PARTS = (
    *(Part("sample_digits", (settings,), 5.0) for settings in digits.CHOSEN),
    *(Part("sample_regression", (method,), 6.5) for method in methods.SAMPLERS),
    Part("sample_gaussian", (), 4.0),
)


def run_demo(settings: DemoSettings, progress: Progress = ignore_progress) -> DemoResult:
    """Run all parts and write the page; ``progress`` receives a label and the share of the whole just done."""
    from .page import write_demo  # only here: --help imports this module, and must be quick

    images.load_images()  # fails at once if scikit-learn is not installed
    settings.out.mkdir(parents=True, exist_ok=True)
    found = _run_parts(settings.jobs or cores(), progress)
    by_kind: dict[str, list[Any]] = {}
    for part, value in zip(PARTS, found, strict=True):
        by_kind.setdefault(part.function, []).append(value)
    scored = tuple(s for several in by_kind["sample_digits"] for s in several)
    law = by_kind["sample_gaussian"][0]
    features, network = zip(*by_kind["sample_regression"], strict=True)
    made = DemoResult(law, features, network, scored, settings.out / "index.html")
    progress("drawing", 0.0)
    write_demo(made)
    return made


def _run_parts(jobs: int, progress: Progress) -> list[Any]:
    """Run the parts in processes; return their values. Raises RuntimeError if one fails."""
    total = sum(part.seconds for part in PARTS)

    def report(i: int, label: str, share: float, ended: int) -> None:
        progress(label or "", share * PARTS[i].seconds / total)

    progress("starting", 0.0)
    outcomes = run_in_processes(run_part, [(part,) for part in PARTS], jobs, 1, report)
    errors = [outcomes[i].error if i in outcomes else "its process died" for i in range(len(PARTS))]
    if wrong := [f"{part.function}: {error}" for part, error in zip(PARTS, errors, strict=True) if error]:
        raise RuntimeError("; ".join(wrong))
    return [pickle.loads(outcomes[i].value) for i in range(len(PARTS))]


def run_part(part: Part, progress: Progress) -> bytes:
    """Run one part; as bytes, because tensors would be sent as shared memory, which ends with its process."""
    functions: dict[str, Callable[..., Any]] = {
        f.__name__: f for f in (sample_digits, sample_regression, sample_gaussian)
    }
    return pickle.dumps(functions[part.function](*part.arguments, progress))


def sample_gaussian(progress: Progress) -> gaussian.GaussianResult:
    """Sample the Gaussian of the paper's Figure 1."""
    return gaussian.run_gaussian(GAUSSIAN, lambda label, steps: progress(label, steps / GAUSSIAN.total_steps))


def sample_regression(method: methods.Method, progress: Progress) -> tuple[bands.Band, bands.Band]:
    """Sample the linear model and compare it with its exact posterior, then the network, with HMC."""
    data = regression.make_data()
    model = regression.Features(*data)
    sampled = regression.sample(model, method, FEATURES, lambda label, share: progress(label, 0.4 * share))
    features = bands.compare_with_exact(sampled, *model.exact(regression.GRID))
    sampled = regression.sample(
        regression.Network(*data), method, NETWORK, lambda label, share: progress(label, 0.6 * share)
    )
    return features, bands.compare_with_reference(sampled, reference.load_reference())


def sample_digits(settings: digits.DigitSettings, progress: Progress) -> list[scores.Scored]:
    """Run one method on digits; SGD counts as single networks, and as an ensemble of four."""
    data = images.load_images()
    sets = {str(angle): images.rotate(data.test, angle) for angle in images.ANGLES} | {"letters": data.letters}
    run = digits.run_digits(settings, data.train, data.train_labels, sets, progress)
    if settings.samples:
        return [scores.score(run, data.test_labels, settings.name)]
    return [
        scores.score(run, data.test_labels, "one network, SGD", apart=True),
        scores.score(run, data.test_labels, "four networks, SGD"),
    ]
