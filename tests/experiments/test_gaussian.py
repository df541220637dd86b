"""Figure 1: the samplers against the exact law, the bookkeeping, the picture."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qlangevin import native
from qlangevin.experiments import gaussian
from qlangevin.experiments.gaussian import METHODS, GaussianResult, GaussianSettings
from qlangevin.theory import Method, stationary

SMALL = GaussianSettings(stepsizes=(0.05, 0.01), chains=2000, seed=1)


@pytest.fixture(scope="module")
def result() -> GaussianResult:
    return gaussian.run_gaussian(SMALL)


def test_sampled_variance_is_the_exact_one(result: GaussianResult) -> None:
    # Six rows, each beyond 4.5 standard errors by chance with probability 7e-6: a false alarm in 24 000 seeds.
    assert [(row.stepsize, row.method) for row in result.rows] == [(a, m) for a in SMALL.stepsizes for m in METHODS]
    for row in result.rows:
        assert row.z is not None
        assert abs(row.z) < 4.5, row
        assert row.standard_error < 0.05 * row.variance


def test_histogram_is_the_stationary_law(result: GaussianResult) -> None:
    # Some 60 points a row. Were the 2000 chains looked at once, a share would have the standard error below, and be off by
    # 5.5 of them with probability 4e-8, 1e-5 in all; they are looked at more often. The last term is for rare points.
    methods: dict[str, Method] = {"naive SGLDLP-L": "stochastic", "VC SGLDLP-L": "corrected"}
    for row, shares in zip(result.rows, result.shares, strict=True):
        assert float(shares.sum()) == pytest.approx(1)
        if row.method in methods:
            p = stationary(SMALL.format, row.stepsize, methods[row.method]).probabilities
            error = (p * (1 - p) / SMALL.chains).sqrt()
            assert bool(((shares - p).abs() <= 5.5 * error + 2 / SMALL.chains).all())


@pytest.mark.slow
def test_naive_is_wrong_and_corrected_is_right_in_w2() -> None:
    result = gaussian.run_gaussian(GaussianSettings(stepsizes=(1e-3,), chains=4000, seed=2))
    accumulator, naive, corrected = (row.w2 for row in result.rows)
    assert accumulator < 0.05
    assert corrected < 0.07  # Δ/√12 = 0.036, and what 4000 chains add
    assert naive > 0.4


def test_the_seed_decides_everything_but_the_time() -> None:
    settings = GaussianSettings(stepsizes=(0.1,), chains=300, steps=30)

    def rows(settings: GaussianSettings) -> list[dict[str, Any]]:
        return [asdict(replace(row, seconds=0.0)) for row in gaussian.run_gaussian(settings).rows]

    first = rows(settings)
    assert rows(settings) == first
    assert rows(replace(settings, seed=1)) != first
    with native.disabled():
        assert rows(settings) == first


def test_schedule_and_progress() -> None:
    assert GaussianSettings().schedule(1e-3) == (4500, 3000)
    assert GaussianSettings(full=True).schedule(1e-3) == (22_500, 5000)
    assert GaussianSettings(steps=10).schedule(1e-3) == (10, 6)
    assert GaussianSettings(steps=1).schedule(1e-3) == (1, 0)
    settings = GaussianSettings(stepsizes=(0.1, 0.2), chains=2, steps=107)
    seen: list[int] = []
    result = gaussian.run_gaussian(settings, lambda label, steps: seen.append(steps))
    assert sum(seen) == settings.total_steps == 6 * 107
    assert sum(row.chain_steps for row in result.rows) == 2 * settings.total_steps


def test_float_formats_work_too(tmp_path: Path) -> None:
    result = gaussian.run_gaussian(GaussianSettings(stepsizes=(0.02,), format="e4m3", chains=1000))
    assert result.rows[0].exact_variance is None  # no closed form for a full-precision accumulator over a float grid
    for row in result.rows[1:]:
        assert row.z is not None
        assert abs(row.z) < 4.5  # false alarm: 7e-6 each
    gaussian.draw(result, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


def test_accumulator_variance_solves_its_equation() -> None:
    alpha, gap = 0.1, 1 / 8
    v = gaussian.accumulator_variance("fixed8.3", alpha)
    assert v is not None
    y = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    least = float((gap**2 * y * (1 - y)).mean())  # E[v_s], θ spread evenly over a gap
    assert v == pytest.approx((1 - alpha) ** 2 * v + alpha**2 * least + 2 * alpha, rel=1e-7)
    assert gaussian.accumulator_variance("fixed8.6", alpha) is None  # reaches to 2: clipping counts


def test_picture(result: GaussianResult, tmp_path: Path) -> None:
    gaussian.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stepsizes": ()}, "stepsizes must not be empty"),
        ({"stepsizes": (1e-3, -1.0)}, "stepsizes must be above 0 .* got -1.0"),
        ({"stepsizes": (float("nan"),)}, "stepsizes must be above 0 .* got nan"),
        ({"stepsizes": (1e-12,)}, "1e-12 would take 4.5e\\+12 steps"),
        ({"chains": 1}, "chains must be at least 2"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seed": -1}, "seed must be .* got -1"),
        ({"format": "fixed8"}, "unknown format 'fixed8'"),
        ({"format": "fp32"}, "fp32 has about"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GaussianSettings(**arguments)
