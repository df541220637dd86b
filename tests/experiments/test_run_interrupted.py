"""Runs that are interrupted or killed, and go on without losing a step."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from qlangevin.experiments import chain, run
from qlangevin.experiments.methods import MethodName
from qlangevin.experiments.run import run_experiment
from tests.helpers.experiments import SMALL, STEPS, Watch, kept, lasting, of, press
from tests.helpers.processes import fork


def throw() -> None:
    raise KeyboardInterrupt


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
