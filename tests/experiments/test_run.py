"""A run: its result, which is the same every time, and its progress."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from qlangevin import SampleStore, metrics
from qlangevin.experiments import run
from qlangevin.experiments.data import make_loader
from qlangevin.experiments.methods import METHODS, MethodName
from qlangevin.experiments.results import check_result
from qlangevin.experiments.run import run_experiment
from qlangevin.experiments.score import open_posterior
from tests.helpers.experiments import SMALL, STEPS, Watch, kept, lasting, of


@pytest.mark.parametrize("method", get_args(MethodName))
def test_every_method_gives_a_result_and_the_same_one_again(method: MethodName, tmp_path: Path) -> None:
    config, how = of(method), METHODS[method]
    result = run_experiment(config, tmp_path / "a")
    check_result(result, "the result")
    assert result == json.loads((tmp_path / "a/result.json").read_text())
    assert result["settings"] == config.to_json()
    assert result["samples"] == (4 if how.cyclical else 9 if how.noise else 1)
    assert result["steps"] == STEPS
    assert result["data"]["note"] == "200 of 1197 training images, 120 of 600 test images"
    assert result["scaled"] == config.scaled
    parts, exponents = (1 if how.low_precision else 4) + (4 if how.accumulator else 0), 24 if how.low_precision else 0
    assert result["memory"]["training"] == parts + exponents / 910
    assert lasting(run_experiment(config, tmp_path / "b")) == lasting(result)
    assert kept(tmp_path / "b") == kept(tmp_path / "a")


def test_scores_are_those_of_the_average_over_the_samples(whole: Path) -> None:
    result, digits = run.read_result(whole), SMALL.load_data(None)
    average = open_posterior(SMALL, digits, whole)
    loader = make_loader(digits.test, 50, shuffle=False)
    expected = metrics.evaluate(average.predict_loader(loader, progress=False))
    assert expected.pop("count") == 120
    assert {name: result["scores"][name] for name in expected} == pytest.approx(expected, rel=1e-5)
    last = metrics.evaluate(average[-1:].predict_loader(loader, progress=False))
    assert result["single"]["nll"] == pytest.approx(last["nll"], rel=1e-5)
    assert result["single"]["error"] == pytest.approx(last["error"])


def test_the_parts_of_a_result_fit_together(whole: Path) -> None:
    result = run.read_result(whole)
    bins, trace = result["reliability"], result["trace"]
    assert sum(bins["counts"]) == result["data"]["test"] == 120
    right = sum(n * a for n, a in zip(bins["counts"], bins["accuracy"], strict=True) if n)
    assert 1 - right / 120 == pytest.approx(result["scores"]["error"])
    assert [value is None for value in bins["confidence"]] == [count == 0 for count in bins["counts"]]
    assert len(trace["steps"]) == len(trace["log_likelihood"]) == len(trace["error"]) == result["samples"] == 9
    assert trace["steps"] == [s.step for s in SampleStore.open(whole)] == [16 + 16 * i // 9 for i in range(1, 10)]
    assert trace["log_likelihood"][-1] == pytest.approx(-result["single"]["nll"])
    assert trace["error"][-1] == pytest.approx(result["single"]["error"])
    assert result["scores"]["top5"] <= result["scores"]["error"]
    assert result["r_hat"] > 0
    assert result["ess"] > 0


def test_too_few_samples_have_no_r_hat(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for samples in (1, 4, 7):
        result = run_experiment(replace(SMALL, samples=samples), tmp_path / str(samples))
        assert (result["r_hat"], result["ess"]) == (None, None)
    assert capfd.readouterr().err == ""  # ArviZ would complain


def test_seeds_differ_and_workers_do_not_matter(whole: Path, tmp_path: Path) -> None:
    other = run_experiment(replace(SMALL, seed=1), tmp_path / "seed")
    assert other["scores"]["nll"] != run.read_result(whole)["scores"]["nll"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that forking and threads do not go well together
        helped = run_experiment(replace(SMALL, workers=1), tmp_path / "workers")
    assert helped["scores"] == run.read_result(whole)["scores"]


def test_torchs_generator_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run_experiment(replace(SMALL, samples=1), tmp_path / "run")
    assert torch.equal(torch.rand(3), expected)


def test_progress_adds_up_to_one(tmp_path: Path) -> None:
    watch = Watch()
    run_experiment(SMALL, tmp_path / "run", progress=watch)
    assert watch.total == pytest.approx(1)
    assert [watch.labels.count(label) for label in ("training", "evaluating")] == [1 + STEPS, 1]
    assert len(watch.labels) == STEPS + 2
