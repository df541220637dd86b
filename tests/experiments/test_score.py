"""Samples scored again: alone, as chains of one average, against data of another kind."""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qlangevin import Posterior, diagnostics, metrics
from qlangevin.cli.main import main
from qlangevin.experiments import run
from qlangevin.experiments.data import load_dataset, make_loader
from qlangevin.experiments.presets import EXPERIMENTS, Digits, MnistLogistic
from qlangevin.experiments.score import evaluate, find_samples, open_posterior
from tests.helpers.official import PIXELS, idx, mnist, write
from tests.helpers.runs import refused

SMALL = MnistLogistic(epochs=4, batch=10, samples=8, format="fixed8.6")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data in the official form, three chains that differ in their seed, and one that differs in more."""
    folder = tmp_path_factory.mktemp("place")
    mnist(folder / "data/mnist", 40, 30)
    mnist(folder / "data/fashion-mnist", 40, 30)
    dark = idx(PIXELS[:30, 0, :28, :28] // 4)
    write(folder / "data/fashion-mnist", {"t10k-images-idx3-ubyte": dark})
    (folder / "data/fashion-mnist/t10k-images-idx3-ubyte.gz").unlink()
    for seed in range(3):
        run.run_experiment(replace(SMALL, seed=seed), folder / f"seed{seed}", folder / "data")
    run.run_experiment(replace(SMALL, lr=0.05), folder / "slow", folder / "data")
    return folder


def test_a_run_alone_has_the_scores_it_had(place: Path) -> None:
    shares: list[float] = []
    found = evaluate([place / "seed1"], place / "data", progress=lambda label, share: shares.append(share))
    saved = run.read_result(place / "seed1")
    for name in ("scores", "single", "reliability", "trace", "r_hat", "ess", "samples", "settings", "experiment"):
        assert found[name] == saved[name], name
    assert found["runs"] == [str(place / "seed1")]
    assert found["ood"] is None
    assert sum(shares) == pytest.approx(1)


def test_runs_together_are_one_average_of_several_chains(place: Path) -> None:
    folders = [place / f"seed{seed}" for seed in range(3)]
    found = evaluate(folders, place / "data")
    data = SMALL.load_data(place / "data")
    average = open_posterior(SMALL, data, *folders)
    batches = list(make_loader(data.test, 7, shuffle=False))
    expected = metrics.evaluate(average.predict_loader(batches, progress=False))
    assert found["samples"] == 24
    assert found["scores"]["nll"] == pytest.approx(expected["nll"], rel=1e-5)
    assert found["scores"]["error"] == pytest.approx(expected["error"])
    chains = [run.read_result(folder)["trace"]["log_likelihood"] for folder in folders]
    assert found["trace"]["log_likelihood"] == [x for chain in chains for x in chain]
    r_hat, ess, _ = diagnostics.summarize(torch.tensor(chains)).worst
    assert (found["r_hat"], found["ess"]) == (pytest.approx(r_hat), pytest.approx(ess))


def test_chains_too_short_for_r_hat_have_none(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = replace(SMALL, samples=3)
    folders = [tmp_path / str(seed) for seed in range(3)]  # nine samples, but not of one chain
    for seed, folder in enumerate(folders):
        run.run_experiment(replace(config, seed=seed), folder, place / "data")
    found = evaluate(folders, place / "data")
    assert (found["samples"], found["r_hat"], found["ess"]) == (9, None, None)
    assert capfd.readouterr().err == ""


def test_what_is_no_number_is_none_and_not_a_failure(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = diagnostics.Summary(*(torch.full((), float("inf")).numpy() for _ in range(6)))
    monkeypatch.setattr(diagnostics, "summarize", lambda draws: stuck)
    found = evaluate([place / "seed0", place / "seed1"], place / "data")
    assert (found["r_hat"], found["ess"]) == (None, None)
    json.dumps(found, allow_nan=False)


def change_config(run: Path, **changes: Any) -> None:
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | changes))


def test_runs_that_sample_another_law_are_not_averaged(place: Path) -> None:
    with pytest.raises(
        ValueError, match=r"slow and .*seed0 cannot be averaged: lr is 0.1 in .*seed0 and 0.05 in .*slow$"
    ):
        evaluate([place / "seed0", place / "seed1", place / "slow"], place / "data")


@pytest.mark.parametrize("changes", [{"workers": 1}, {"chains": 2}, {"activations": "full"}])
def test_what_does_not_change_the_law_may_differ(place: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    expected = evaluate([place / "seed0", place / "seed1"], place / "data")
    other = tmp_path / "other"
    shutil.copytree(place / "seed1", other)
    change_config(other, **changes)
    found = evaluate([place / "seed0", other], place / "data")
    assert {**found, "runs": None} == {**expected, "runs": None}


def test_a_chain_is_not_counted_twice_and_the_test_set_is_one(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(place / "seed1", other)
    with pytest.raises(ValueError, match=r"other and .*seed1 have the same seed, 1: the same chain twice"):
        evaluate([place / "seed1", other], place / "data")
    change_config(other, limit_test=20)
    with pytest.raises(ValueError, match=r"were tested on different examples; choose some with --limit-test"):
        evaluate([place / "seed0", other], place / "data")
    assert evaluate([place / "seed0", other], place / "data", limit_test=20)["samples"] == 16


def test_every_setting_is_of_the_law_or_not() -> None:
    """A new setting has to be decided about: by default it is of the law."""
    for preset in EXPERIMENTS.values():
        outside = {f.name for f in fields(preset)} - preset().law.keys()
        assert outside == {"seed", "chains", "workers", "limit_test"}


def test_runs_are_found_where_a_report_finds_them(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "seed0", tmp_path / "a/one")
    shutil.copytree(place / "seed1", tmp_path / "a/deep/two")
    shutil.copytree(place / "seed2", tmp_path / "a/one/begin")  # where the other began: not a run of its own
    one, two = tmp_path / "a/one", tmp_path / "a/deep/two"
    assert find_samples([tmp_path]) == find_samples([tmp_path / "a", one]) == [two, one]
    assert find_samples([one, two / "result.json", tmp_path / "a/deep/../one"]) == [one, two]
    (tmp_path / "runs.json").write_text('{"runs": []}')
    with pytest.raises(ValueError, match=r"runs.json is a file and holds no samples; give the folders of runs"):
        find_samples([tmp_path / "runs.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"there is no run in or below .*empty: no folder has a config.json"):
        find_samples([tmp_path / "empty"])


def test_fewer_test_examples(place: Path) -> None:
    found = evaluate([place / "seed0"], place / "data", limit_test=11)
    assert sum(found["reliability"]["counts"]) == 11
    assert found["settings"]["limit_test"] == 11
    for limit, message in ((0, "at least 1, got 0"), (31, "limit_test must be at most 30, got 31")):
        with pytest.raises(ValueError, match=message):
            evaluate([place / "seed0"], place / "data", limit_test=limit)


def test_uncertainty_tells_data_of_another_kind_apart(place: Path) -> None:
    found = evaluate([place / "seed0"], place / "data", ood="fashion-mnist")["ood"]
    assert found["data"] == "fashion-mnist"
    model: Posterior = open_posterior(SMALL, load_dataset("mnist", place / "data"), place / "seed0")
    inside, outside = (
        load_dataset(name, place / "data").test.__getitems__(range(30))[0] for name in ("mnist", "fashion-mnist")
    )
    expected = metrics.ood(model.uncertainty(inside), model.uncertainty(outside))
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    itself = evaluate([place / "seed0"], place / "data", ood="mnist")["ood"]
    assert itself["entropy"] == itself["mutual_information"] == 0.5
    assert found["entropy"] != 0.5


def test_data_of_another_shape_are_refused(place: Path) -> None:
    shapes = r"--ood=digits has inputs of shape \(1, 8, 8\), not \(1, 28, 28\) as the run's own data"
    with pytest.raises(ValueError, match=shapes):
        evaluate([place / "seed0"], place / "data", ood="digits")


def pressed_at(count: int) -> Callable[[str, float], None]:
    calls = iter(range(1, count + 1))

    def progress(label: str, share: float) -> None:
        if next(calls) == count:
            signal.raise_signal(signal.SIGINT)

    return progress


def test_an_unfinished_run_has_the_samples_it_has(tmp_path: Path) -> None:
    config = Digits(epochs=4, batch=50, samples=4, burn_in=0.5, limit_train=100, limit_test=20, hidden=5)
    for steps, samples in ((3, 0), (6, 2)):
        folder = tmp_path / str(steps)
        with pytest.raises(KeyboardInterrupt):
            run.run_experiment(config, folder, None, pressed_at(1 + steps))
        if samples:
            assert evaluate([folder])["samples"] == samples
        else:
            with pytest.raises(ValueError, match=f"the run in {folder} has no samples yet"):
                evaluate([folder])


# ---- the command


def test_the_command_prints_a_line_for_each_run_or_one_for_all(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(place / f"seed{seed}") for seed in range(2)]
    where = ["--data-dir", str(place / "data")]
    assert main(["evaluate", *runs, *where, "--ood", "fashion-mnist"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("VC SGLDLP-L") == 2
    assert "AUROC" in captured.out
    assert main(["evaluate", *runs, *where, "--together", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    (one,) = json.loads(captured.out)["runs"]
    assert one["runs"] == runs
    assert one["samples"] == 16


def test_the_command_takes_a_folder_of_runs(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for seed in range(2):
        shutil.copytree(place / f"seed{seed}", tmp_path / f"runs/seed{seed}")
    change_config(tmp_path / "runs/seed0", workers=1)
    assert main(["evaluate", str(tmp_path / "runs"), "--data-dir", str(place / "data"), "--together", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["runs"]
    assert one["runs"] == [str(tmp_path / f"runs/seed{seed}") for seed in range(2)]
    assert main(["evaluate", str(tmp_path / "runs"), "--data-dir", str(place / "data"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give at least one folder of a run"),
        (["nowhere"], "there is no run in nowhere: it has no config.json"),
        (["seed0", "slow", "--together"], "slow and seed0 cannot be averaged: lr is 0.1 in seed0 and 0.05 in slow"),
        (["seed0", "--limit-test", "0"], "limit_test must be an integer, at least 1, got 0"),
        (["seed0", "--limit-test", "31"], "limit_test must be at most 30, got 31"),
        (["seed0", "--ood", "digits"], "--ood=digits has inputs of shape (1, 8, 8), not (1, 28, 28)"),
        (["seed0", "--ood", "cifar10"], "there is no CIFAR-10 in data"),
        (["seed0", "--data-dir", "elsewhere"], "the data folder elsewhere does not exist; give one that does, or none"),
    ],
)
def test_bad_input_is_named_in_one_sentence(
    arguments: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    where = [] if "--data-dir" in arguments else ["--data-dir", "data"]
    assert refused(["evaluate", *arguments, *where], capsys).startswith(message)
