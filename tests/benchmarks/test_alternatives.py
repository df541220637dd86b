"""Alternatives to sampling: the law of SWAG's draws, rounded copies, chains that are not run twice, data of another kind."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from benchmarks.alternatives import __main__ as alternatives
from benchmarks.alternatives import rows, stores
from benchmarks.alternatives import table as tables
from benchmarks.alternatives.outside import load_outside
from qlangevin.experiments.data import load_dataset
from qlangevin.experiments.presets import Digits
from qlangevin.experiments.run import run_experiment
from tests.helpers.official import REVIEWS, write

SMALL = {"epochs": 2, "batch": 5, "samples": 2, "limit_train": 100, "limit_test": 50, "hidden": 8}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def snapshot(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
        for name, t in network().state_dict().items()
    }


def test_draws_of_swag_have_its_mean_and_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Var θ = d/2 + Σ D²/(2 (K - 1)), with d the mean of D². A false alarm of 5 s.e. in 30 weights: 2e-5 for each moment."""
    draws, snapshots = 4000, [snapshot(seed) for seed in range(5)]
    monkeypatch.setattr(stores, "DRAWS", draws)
    drawn = list(stores.swag(snapshots, network(), seed=0))
    for name, _ in network().named_parameters():
        each, made = (torch.stack([s[name] for s in group]) for group in (snapshots, drawn))
        squares = (each - each.mean(0)).square()
        variance = squares.mean(0) / 2 + squares.sum(0) / (2 * 4)
        assert ((made.mean(0) - each.mean(0)).abs() <= 5 * (variance / draws).sqrt()).all()
        assert ((made.var(0) / variance - 1).abs() <= 5 * (2 / draws) ** 0.5).all()
    for name, _ in network().named_buffers():  # a variance that is drawn may be negative
        assert all(torch.equal(draw[name], snapshots[-1][name]) for draw in drawn)


def test_copies_are_rounded_but_for_buffers() -> None:
    weights = snapshot(0)
    rounded = stores.rounded(weights, network(), "bfp5", "stochastic", seed=0)
    assert torch.equal(rounded["0.weight"], ql.quantize(weights["0.weight"], "bfp5", "stochastic", ql.Key(0, 0)))
    assert torch.equal(rounded["1.running_var"], weights["1.running_var"])
    assert not torch.equal(stores.rounded(weights, network(), "bfp5", "stochastic", 1)["0.weight"], rounded["0.weight"])


def test_runs_of_a_sweep_are_not_done_again(tmp_path: Path) -> None:
    config = Digits(method="sgdfp", **SMALL)  # type: ignore[arg-type]
    run_experiment(config, tmp_path / "sweep" / config.run_name)
    work = rows.Work(config, tmp_path / "out", runs=tmp_path / "sweep")
    assert rows.sgd(work) == rows.Made([tmp_path / "sweep" / config.run_name], 40)
    assert not (tmp_path / "out").exists()
    assert rows.sgld(work).folders == [tmp_path / "out/sgldfp-fp32-seed0"]
    other = replace(work, config=replace(config, lr=0.05))  # a run of that name, with other settings
    assert rows.sgd(other).folders == [tmp_path / "out/sgdfp-fp32-seed0"]


@pytest.mark.slow
def test_all_rows_of_a_small_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [f"{name}={value}" for name, value in {**SMALL, "cycles": 1, "cycle_samples": 2}.items()]
    command = ["alternatives", "digits", "--seeds", "0", "--out", str(tmp_path), "--option", *options]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(stores, "DRAWS", 3)
    alternatives.main()
    found = json.loads((tmp_path / "scores.json").read_text())["rows"]
    assert found.keys() == rows.ROWS.keys() - {rows.ESTIMATED}  # without batch normalization it is SGD
    assert found["deep ensemble of 5, SGD"]["0"]["samples"] == 5
    assert found["deep ensemble of 5, SGD"]["0"]["steps"] == 5 * found["SGD"]["0"]["steps"]
    assert found["SGD, rounded to bfp8 after training"]["0"]["bytes"] < found["SGD"]["0"]["bytes"]
    assert found["SGD with momentum"]["0"]["samples"] == found["SGD with RMS gains"]["0"]["samples"] == 1
    assert all(0 <= seeds["0"]["error"] <= 1 for seeds in found.values())


def test_scores_of_other_settings_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"settings": Digits(method="sgdfp", temperature=0.001, epochs=2).to_json(), "rows": {"SGD": {"0": {}}}}
    (tmp_path / "scores.json").write_text(json.dumps(saved))
    assert alternatives.read_scores(
        tmp_path / "scores.json", Digits(method="sgdfp", temperature=0.001, epochs=2, seed=3)
    )
    monkeypatch.setattr(sys, "argv", ["alternatives", "digits", "--out", str(tmp_path), "--option", "epochs=20"])
    with pytest.raises(SystemExit, match=r"epochs is 2 there and 20 here\. Choose another --out"):
        alternatives.main()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("epoch=5", "is not a setting of digits"),
        ("epochs", "is not a setting of digits"),
        ("format=bfp8", "choose methods and formats by --rows"),
        ("epochs=many", "epochs must be an integer"),
    ],
)
def test_wrong_options_are_named(
    option: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["alternatives", "digits", "--option", option])
    with pytest.raises(SystemExit, match="2"):
        alternatives.main()
    assert message in capsys.readouterr().err


def test_networks_with_batch_normalization_have_a_row_that_estimates_it_anew(tmp_path: Path) -> None:
    config = Digits(method="sgdfp", **SMALL)  # type: ignore[arg-type]
    assert rows.sgd_estimated(rows.Work(config, tmp_path)) == replace(
        rows.sgd(rows.Work(config, tmp_path)), batch_norm=True
    )


def test_the_language_reference_is_cut_into_texts_as_long_as_reviews(tmp_path: Path) -> None:
    write(tmp_path / "imdb", {name: review.encode() for name, review in REVIEWS.items()})
    data = load_dataset("imdb", tmp_path, length=7)
    outside = load_outside(data, tmp_path)
    assert outside is not None
    texts, _ = outside.__getitems__(range(len(outside)))
    assert texts.shape == (len(data.test), 7)
    assert texts.min() > 0  # no padding
    assert texts.max() < (data.words or 0)


def scores_of(*nlls: float) -> dict[str, dict[str, float]]:
    costs = {"samples": 2, "bytes": 3000, "steps": 40}
    return {str(seed): {"error": 0.1, "nll": nll, "ece": 0.05, **costs} for seed, nll in enumerate(nlls)}


def test_tables_say_which_differences_count() -> None:
    found = {"far": scores_of(0.9, 0.91, 0.92), "near": scores_of(0.5, 0.6), "best": scores_of(0.5, 0.51, 0.52)}
    lines = tables.table(found).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| best", "| near", "| far"]
    assert lines[2] == "| best | 10.00 ± 0.00 | 0.5100 ± 0.0058 | 5.00 ± 0.00 | 2 | 3 | 40 |"
    assert tables.differences(found).splitlines() == ["error, %: none", "NLL: 1 < 3", "ECE, %: none"]  # near scatters
    with_one_seed = {"alone": scores_of(0.4), "far": found["far"]}
    assert "NLL: none" in tables.differences(with_one_seed)
    assert "| alone | 10.00 | 0.4000 | 5.00 |" in tables.table(with_one_seed)


def test_results_are_put_together_if_only_their_seeds_differ() -> None:
    one = {"settings": {"seed": 0, "lr": 0.1}, "rows": {"SGD": {"0": {"nll": 1.0}}}}
    other = {"settings": {"seed": 1, "lr": 0.1}, "rows": {"SGD": {"1": {"nll": 2.0}}, "SWAG": {"1": {"nll": 3.0}}}}
    assert tables.merge([one, other]) == {"SGD": {"0": {"nll": 1.0}, "1": {"nll": 2.0}}, "SWAG": {"1": {"nll": 3.0}}}
    with pytest.raises(ValueError, match="they differ in lr"):
        tables.merge([one, {**other, "settings": {"seed": 1, "lr": 0.2}}])
