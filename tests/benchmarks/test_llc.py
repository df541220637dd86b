"""Formulas of learning coefficients, and short runs of the benchmarks that estimate them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks import llc_control, llc_training, llc_truths
from benchmarks.llc_problems import deep_linear_coefficient, make_problems, reduced_rank_coefficient


def test_two_layers_are_reduced_rank_regression() -> None:
    for m, h, n in itertools.product(range(1, 7), repeat=3):
        for r in range(min(m, h, n) + 1):
            assert deep_linear_coefficient((m, h, n), r) == pytest.approx(reduced_rank_coefficient(m, h, n, r))


def test_known_coefficients() -> None:
    assert reduced_rank_coefficient(1, 1, 1, 0) == 0.5  # x²y²
    assert reduced_rank_coefficient(3, 3, 3, 3) == 4.5  # regular: half of the 9 dimensions of the product
    assert deep_linear_coefficient((1, 1, 1, 1), 0) == 0.5
    for problem in make_problems():
        assert problem.coefficient <= problem.size / 2
        assert float(problem.excess([w[None] for w in problem.minimum])) == 0


def test_monomials_come_near_their_coefficients_as_data_grow() -> None:
    fourth = make_problems()[3]
    assert fourth.at_zero_lr is not None
    assert fourth.at_zero_lr(1e4, 10.0) < fourth.at_zero_lr(1e6, 10.0) < fourth.coefficient


@pytest.mark.slow
def test_truths_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llc_truths, "has_devinterp", lambda: False)
    llc_truths.main(["--out", str(tmp_path), "--scale", "1e-4"])
    rows = json.loads((tmp_path / "truths.json").read_text())["rows"]
    assert len(rows) == 7 * 3 * 4
    assert (tmp_path / "truths.png").exists()
    assert len((tmp_path / "truths.md").read_text().splitlines()) == 2 + 7 * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_control_is_written(tmp_path: Path) -> None:
    llc_control.main(["--out", str(tmp_path), "--seeds", "2", "--draws", "6", "--train-steps", "5"])
    rows = json.loads((tmp_path / "control.json").read_text())["settings"][0]["rows"]
    assert len(rows["qlangevin bfp8"]["values"]) == 2
    assert rows["qlangevin fp32"]["difference"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_curve_over_training_is_written(tmp_path: Path) -> None:
    llc_training.main(["--out", str(tmp_path), "--chains", "2", "--draws", "6", "--checkpoints", "0", "5"])
    rows = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert [row["step"] for row in rows] == [0, 5]
    assert rows[0]["formats"]["fp32"]["difference"] == 0
    assert (tmp_path / "training.png").exists()
