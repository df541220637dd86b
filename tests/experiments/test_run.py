"""A run: what comes out, that it is the same every time, and that it survives whatever ends it."""

import json
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from qlangevin import QTensor, SampleStore, metrics
from qlangevin.experiments import chain, run
from qlangevin.experiments.data import make_loader
from qlangevin.experiments.methods import METHODS, MethodName
from qlangevin.experiments.presets import Digits, Experiment, ImageNet, read_config
from qlangevin.experiments.report.results import check_result
from qlangevin.experiments.run import run_experiment
from qlangevin.experiments.score import open_posterior
from tests.helpers.official import imagenet
from tests.helpers.processes import fork
from tests.helpers.runs import read_files

SMALL = Digits(
    format="bfp8", epochs=4, batch=25, lr=0.1, temperature=1.0, samples=9, burn_in=0.5, cycles=2, cycle_samples=2,
    exploration=0.5, limit_train=200, limit_test=120, hidden=12,
)  # fmt: skip
STEPS = 32
TINY = ImageNet(method="sgldlp-f", epochs=2, sampling_epochs=1, samples=2, batch=3, width=2, size=32)


def of(method: MethodName) -> Digits:
    return replace(SMALL, method=method, format="bfp8" if METHODS[method].low_precision else None)


def lasting(result: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same each time."""
    return {name: value for name, value in result.items() if name not in ("seconds", "finished")}


def kept(folder: Path) -> dict[str, bytes]:
    """The samples and what describes them, to the byte."""
    files = [*folder.rglob("samples/*"), *folder.rglob("manifest.json"), *folder.rglob("config.json")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


# ---- what comes out


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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was left alone."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_experiment(SMALL, folder)
    return folder


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


# ---- progress and interruption


class Watch:
    """Counts what it is told, and does something after so many calls."""

    def __init__(self, after: int = -1, act: Callable[[], Any] = lambda: None) -> None:
        self.labels: list[str] = []
        self.total, self.after, self.act = 0.0, after, act

    def __call__(self, label: str, share: float) -> None:
        self.labels.append(label)
        self.total += share
        if len(self.labels) == self.after:
            self.act()


def press() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def throw() -> None:
    raise KeyboardInterrupt


def test_progress_adds_up_to_one(tmp_path: Path) -> None:
    watch = Watch()
    run_experiment(SMALL, tmp_path / "run", progress=watch)
    assert watch.total == pytest.approx(1)
    assert [watch.labels.count(label) for label in ("training", "evaluating")] == [1 + STEPS, 1]
    assert len(watch.labels) == STEPS + 2


@pytest.mark.parametrize("step", [1, 17, STEPS])
def test_ctrl_c_loses_not_a_step(step: int, whole: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(SMALL, tmp_path / "run", progress=Watch(1 + step, press))
    assert signal.getsignal(signal.SIGINT) is before
    assert not (tmp_path / "run/result.json").exists()
    watch = Watch()
    result = run_experiment(SMALL, tmp_path / "run", progress=watch)
    assert watch.labels.count("training") == 1 + STEPS - step
    assert watch.total == pytest.approx(1)
    assert lasting(result) == lasting(run.read_result(whole))
    assert kept(tmp_path / "run") == kept(whole)


def test_ctrl_c_while_scoring_loses_not_a_step(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_experiment(SMALL, tmp_path / "run", progress=Watch(STEPS + 2, press))
    with pytest.raises(KeyboardInterrupt):  # no step is left that would notice
        run_experiment(SMALL, tmp_path / "run", progress=Watch(1, press))
    watch = Watch()
    assert lasting(run_experiment(SMALL, tmp_path / "run", progress=watch)) == lasting(run.read_result(whole))
    assert watch.labels == ["training", "evaluating"]


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    def twice() -> None:
        press()
        press()

    watch = Watch(5, twice)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(SMALL, tmp_path / "run", progress=watch)
    assert len(watch.labels) == 5


@pytest.mark.parametrize("seconds", [0.0, 20.0])
@pytest.mark.parametrize("method", ["vc-sgldlp-l", "csgldlp-f", "sgldfp"])
def test_an_interrupted_run_ends_as_if_it_had_not_been(
    method: MethodName, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "SECONDS", seconds)  # after every step, and after none
    config = of(method)
    expected = run_experiment(config, tmp_path / "whole")
    for after in (1, 8, 14):
        with pytest.raises(KeyboardInterrupt):
            run_experiment(config, tmp_path / "run", progress=Watch(after, throw))
    with pytest.raises(KeyboardInterrupt):
        run_experiment(
            config, tmp_path / "run", progress=lambda label, share: throw() if label == "evaluating" else None
        )
    assert lasting(run_experiment(config, tmp_path / "run")) == lasting(expected)
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_ends_as_if_it_had_not_been(
    end: signal.Signals, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "SECONDS", 0.0)
    moments, folder, ended = random.Random(1), tmp_path / "run", 0
    for attempt in range(8):
        child = fork(lambda: run_experiment(SMALL, folder))
        time.sleep(0.02 + moments.uniform(0, 0.03) * attempt)
        os.kill(child, end)
        ended += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    assert ended > 0
    assert lasting(run_experiment(SMALL, folder)) == lasting(run.read_result(whole))
    assert kept(folder) == kept(whole)


# ---- folders


def test_a_finished_run_is_not_run_again(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, result = read_files(whole), run.read_result(whole)

    def load(*_: object) -> None:
        raise AssertionError("there is nothing to load data for")

    monkeypatch.setattr(Digits, "load_data", load)
    assert run_experiment(SMALL, whole) == result
    assert run.is_finished(SMALL, whole)
    assert read_files(whole) == before


def test_the_folder_of_another_run_is_refused_and_stays_as_it_is(whole: Path) -> None:
    before = read_files(whole)
    message = (
        "holds another run: seed is 0 there and 1 here, lr is 0.1 there and 0.2 here; choose another folder with --out"
    )
    with pytest.raises(ValueError, match=message):
        run_experiment(replace(SMALL, seed=1, lr=0.2), whole)
    with pytest.raises(ValueError, match="holds another run: experiment is 'digits' there and 'imagenet' here"):
        run.is_finished(TINY, whole)
    assert read_files(whole) == before


def test_a_folder_or_file_of_something_else_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.txt").write_text("It was a dark and stormy night.")
    for place in ("thesis", "thesis/chapter.txt"):
        with pytest.raises(ValueError, match=f"{place} is there and holds something else; choose another folder with"):
            run_experiment(SMALL, tmp_path / place)
    assert read_files(tmp_path) == {"thesis/chapter.txt": b"It was a dark and stormy night."}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 17}, "samples must be at most 16, the steps that burn_in=0.5 leaves of 32, got 17"),
        ({"limit_train": 1198}, "limit_train must be at most 1197, got 1198"),
        ({"limit_test": 601}, "limit_test must be at most 600, got 601"),
        ({"method": "csgldfp", "format": "fp32", "cycles": 33}, "cycles must be at most 32, got 33"),
        ({"method": "csgldfp", "format": "fp32", "cycle_samples": 9}, "samples_per_cycle must be at most 8"),
    ],
)
def test_a_mistake_leaves_no_folder(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run_experiment(replace(SMALL, **changes), tmp_path / "deep/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the configuration .*config.json is damaged"),
        ('{"experiment": "digits", "epochs"', "the configuration .*config.json is damaged"),
        ("[]", "this is not the configuration of an experiment"),
        ('{"experiment": "digits"}', "the configuration is of another version of digits"),
    ],
)
def test_a_damaged_configuration_is_noticed(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_experiment(SMALL, tmp_path / "run", progress=Watch(20, press))
    (tmp_path / "run/config.json").write_text(content)
    before = read_files(tmp_path)
    with pytest.raises(ValueError, match=message):
        run_experiment(SMALL, tmp_path / "run")
    assert read_files(tmp_path) == before


def test_what_is_missing_or_damaged_in_a_run_is_noticed(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"there is no run in {tmp_path}: it has no config.json"):
        read_config(tmp_path)
    assert read_config(whole) == SMALL
    with pytest.raises(KeyboardInterrupt):
        run_experiment(SMALL, tmp_path / "run", progress=Watch(25, press))
    (tmp_path / "run/checkpoint.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        run_experiment(SMALL, tmp_path / "run")
    (tmp_path / "run/result.json").write_text('{"scores": ')
    with pytest.raises(ValueError, match=r"the result .*result.json is damaged"):
        run_experiment(SMALL, tmp_path / "run")


def test_two_processes_do_not_do_the_same_run(tmp_path: Path) -> None:
    other: list[str] = []

    def meanwhile() -> None:
        with pytest.raises(BlockingIOError, match="another writer has it open"):
            run_experiment(SMALL, tmp_path / "run")
        other.append("was here")

    run_experiment(SMALL, tmp_path / "run", progress=Watch(9, meanwhile))
    assert other == ["was here"]


# ---- a run that begins with another


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    imagenet(folder)
    return folder


def test_imagenets_sgld_begins_where_its_sgd_ends(photos: Path, tmp_path: Path) -> None:
    watch = Watch()
    result = run_experiment(TINY, tmp_path, photos, watch)
    assert watch.total == pytest.approx(1)
    assert (result["steps"], result["samples"]) == (3, 2)
    first = run.read_result(tmp_path / "begin")
    assert first["settings"] == replace(TINY, method="sgdlp-f").to_json()
    assert (first["steps"], first["samples"]) == (6, 1)
    parts = chain.prepare_chain(TINY, TINY.load_data(photos), tmp_path / "begin")
    last = SampleStore.open(tmp_path / "begin")[-1].decode()
    here = {**dict(parts.model.named_parameters()), **dict(parts.model.named_buffers())}
    assert last.keys() <= here.keys()
    for name, value in last.items():
        mine = here[name]
        assert torch.equal(mine.decode() if isinstance(mine, QTensor) else mine, value), name
    fresh = dict(chain.prepare_chain(TINY, TINY.load_data(photos)).model.named_parameters())["conv.weight"]
    assert isinstance(fresh, QTensor)
    assert not torch.equal(fresh.decode(), last["conv.weight"])
    assert parts.sampler.param_groups[0]["lr"] == pytest.approx(TINY.lr / 100)
    check_result(result, "the result")
    check_result(first, "the first result")


def test_imagenet_is_interrupted_in_either_part_and_goes_on(photos: Path, tmp_path: Path) -> None:
    expected = run_experiment(TINY, tmp_path / "whole", photos)
    for after, part in ((3, "begin"), (9, ".")):  # six steps of SGD and their scores come before those of SGLD
        with pytest.raises(KeyboardInterrupt):
            run_experiment(TINY, tmp_path / "run", photos, Watch(after, press))
        assert read_config(tmp_path / "run") == TINY  # so that --resume finds it
        assert (tmp_path / "run" / part / "checkpoint.safetensors").exists()
        assert (tmp_path / "run/begin/result.json").exists() == (part == ".")
    assert lasting(run_experiment(TINY, tmp_path / "run", photos)) == lasting(expected)
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")


def test_a_mistake_in_sgld_is_noticed_before_sgd(photos: Path, tmp_path: Path) -> None:
    config: Experiment = replace(TINY, samples=4)
    with pytest.raises(ValueError, match="samples must be at most 3"):
        run_experiment(config, tmp_path / "run", photos)
    assert list(tmp_path.iterdir()) == []
