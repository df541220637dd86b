"""The picture of the bounds: its rows against the theorems, the exact law and each other; which cases are sampled."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from qlangevin import theory
from qlangevin.experiments import bound, gaussian
from qlangevin.experiments.bound import BoundResult, BoundRow, BoundSettings

SMALL = BoundSettings(stepsizes=(1e-4, 0.02, 0.3), frac=(2, 3), stepsize=0.02, chains=2000, max_steps=300, seed=1)


@pytest.fixture(scope="module")
def result() -> BoundResult:
    return bound.run_bound(SMALL)


def test_there_is_a_row_for_each_method_in_each_case(result: BoundResult) -> None:
    cases = [
        ("fixed8.3", 1e-4),
        ("fixed8.3", 0.02),
        ("fixed8.3", 0.3),
        ("fixed7.2", 0.02),
    ]  # fixed8.3 at 0.02 is in both
    assert [(row.format, row.stepsize, row.method) for row in result.rows] == [
        (*case, method) for case in cases for method in gaussian.METHODS
    ]
    assert [row.frac for row in result.rows] == [3] * 9 + [2] * 3


def test_rows_keep_what_the_theorems_promise(result: BoundResult) -> None:
    for row in result.rows:
        assert row.exact is not None
        assert row.exact < (row.bound if row.sharp is None else row.sharp) <= row.bound
        assert (row.sharp is None) == (row.method != "VC SGLDLP-L")


def test_samples_are_as_far_from_the_target_as_the_exact_law(result: BoundResult) -> None:
    # The two differ by no more than the W2 between a sample and its law, the largest part of which is the error of the
    # mean: three times the resolution are five standard errors of it, a false alarm in some 10^6 rows.
    assert result.resolution is not None
    assert result.resolution == pytest.approx(math.sqrt(3.34 / 2000), rel=0.3)  # the root mean square of 2000 samples
    for row in result.rows:
        assert (row.sampled is None) == (row.steps is None) == (row.stepsize == 1e-4)  # 45 000 steps are too many
        if row.sampled is not None and row.exact is not None:
            assert abs(row.sampled - row.exact) < 3 * result.resolution


def test_exact_distances_are_those_of_the_law() -> None:
    rows = bound.run_bound(replace(SMALL, chains=0)).rows
    assert {row.sampled for row in rows} == {None}
    for row in rows:
        if row.method == "SGLDLP-F":
            alpha, gap = row.stepsize, 2.0**-row.frac
            assert row.exact == pytest.approx(math.sqrt((2 + alpha * gap**2 / 6) / (2 - alpha)) - 1)
        else:
            law = theory.stationary(row.format, row.stepsize, "corrected" if row.method[0] == "V" else "stochastic")
            assert row.exact == pytest.approx(law.w2)


def test_naive_diverges_and_corrected_does_not() -> None:
    small = BoundSettings(stepsizes=(1e-3, 1e-4, 1e-5), frac=(3,), chains=0)
    rows = bound.run_bound(small).rows
    naive, corrected = ([row for row in rows if row.method == name] for name in ("naive SGLDLP-L", "VC SGLDLP-L"))

    def growth(rows: list[BoundRow], field: str) -> float:
        return float(getattr(rows[2], field) / getattr(rows[1], field))

    assert growth(naive, "bound") == pytest.approx(math.sqrt(10), rel=0.02)
    assert 1.7 < growth(naive, "exact") < math.sqrt(10)
    assert growth(corrected, "bound") < 1
    assert growth(corrected, "exact") == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("name", ["fixed6.-1", "fixed6.0", "fixed8.3"])
def test_gradients_are_no_larger_than_the_bound_takes_them_to_be(name: str) -> None:
    gap = theory.grid(name).diff()[0].item()
    for alpha in (1e-5, 1e-3, 0.1, 1.0):
        law = theory.stationary(name, alpha)
        assert float(law.probabilities @ law.points.abs()) <= bound.mean_gradient(alpha, gap)


def test_the_seed_decides_everything(result: BoundResult) -> None:
    assert bound.run_bound(SMALL) == result
    assert bound.run_bound(replace(SMALL, seed=2)).rows != result.rows


def test_progress_comes_to_the_announced_total() -> None:
    settings = replace(SMALL, chains=2)
    seen: list[int] = []
    bound.run_bound(settings, lambda label, steps: seen.append(steps))
    assert sum(seen) == settings.total_steps == 3 * (225 + 15 + 225)


def test_terms_of_any_target() -> None:
    constants = theory.Constants(0.5, 2.0, hessian=3.0, dimension=4, noise=0.3, gradient=5.0)
    table = bound.terms(constants, 0.01, 0.5, gradient_gap=0.1, steps=10, start=1.0)
    assert table.pop("VC SGLDLP-L, sharp") == theory.bound(
        "VC SGLDLP-L", constants, 0.01, 0.5, 0.1, 10, 1.0, theorem3="sharp"
    )
    assert list(table) == list(gaussian.METHODS)
    for name, value in table.items():
        assert value == theory.bound(name, constants, 0.01, 0.5, 0.1, 10, 1.0)


def test_rows_are_json(result: BoundResult) -> None:
    rows = [asdict(row) for row in result.rows]
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize("chains", [0, 2])
def test_picture(chains: int, tmp_path: Path) -> None:
    result = bound.run_bound(replace(SMALL, chains=chains))
    bound.draw(result, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert all(f"<!-- {name}, Theorem {number} -->" in text for number, name in enumerate(gaussian.METHODS, 1))
    assert "<!-- Theorem 3, sharp -->" in text
    assert ("<!-- sampled, 2 chains -->" in text) == (chains == 2)


def test_picture_of_single_places_and_of_a_law_that_is_not_known(tmp_path: Path) -> None:
    result = bound.run_bound(BoundSettings(stepsizes=(0.5,), format="fixed6.5", frac=(0,), chains=0))
    assert [row.exact is None for row in result.rows] == [True, False, False] * 2  # narrow range, and wide gap
    bound.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stepsizes": ()}, "stepsizes must not be empty"),
        ({"frac": ()}, "frac must not be empty"),
        ({"stepsizes": (1e-3, 1.5)}, "stepsizes must be above 0 and at most 2/\\(m \\+ M\\) = 1.* got 1.5"),
        ({"stepsize": float("nan")}, "stepsizes must be above 0 .* got nan"),
        ({"format": "e4m3"}, "format must be fixed point, .* got e4m3"),
        ({"format": "fixed13.3"}, "at most 5000 numbers"),
        ({"frac": (8,)}, "fixed13.8 has about"),
        ({"frac": (-1,)}, "frac must be an integer, at least 0, got -1"),
        ({"integer": 0}, "integer must be an integer, at least 1, got 0"),
        ({"chains": 1}, "chains must be an integer, at least 2, got 1"),
        ({"max_steps": -1}, "max_steps must be an integer, at least 0, got -1"),
        ({"seed": -1}, "seed must be .* got -1"),
    ],
)
def test_bad_settings(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoundSettings(**arguments)
