"""Many runs: which ones, what becomes of those that fail, are interrupted or killed, and what is not done twice."""

import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qlangevin.cli import commands
from qlangevin.cli.main import main
from qlangevin.experiments import run
from qlangevin.experiments.presets import EXPERIMENTS, Digits, MnistMLP
from qlangevin.experiments.sweep import plan_runs, sweep
from tests.helpers.runs import read_files

OPTIONS = {
    "epochs": 2,
    "batch": 50,
    "lr": 0.1,
    "samples": 2,
    "burn_in": 0.5,
    "limit_train": 100,
    "limit_test": 50,
    "hidden": 8,
}
SMALL = Digits(**OPTIONS)  # type: ignore[arg-type]
COMMAND = [
    "sweep",
    "digits",
    *(word for name, n in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(n))),
]


# ---- which runs


@pytest.mark.parametrize(
    ("name", "full", "low"),
    [
        ("digits", 2, 5),
        ("mnist-logistic", 2, 5 * 7),
        ("mnist-mlp", 2, 5 * 7),
        ("cifar10", 3, 12),
        ("cifar100", 3, 12),
        ("imdb", 3, 12),
        ("imagenet", 2, 2),
    ],
)
def test_a_plan_is_the_rows_of_the_paper(name: str, full: int, low: int) -> None:
    base = EXPERIMENTS[name](epochs=3)
    one, three = plan_runs(base, (), (), (7,)), plan_runs(base, (), (), (0, 1, 2))
    assert (len(one), len(three)) == (full + low, 3 * (full + low))
    assert len({config.run_name for config in three}) == len(three)
    assert sum(config.weight_format is None for config in one) == full
    assert Counter(config.seed for config in three) == dict.fromkeys(range(3), full + low)
    assert {config.epochs for config in three} == {3}


def test_the_mnist_rows_are_a_sweep_over_fractional_bits() -> None:
    formats = [f"fixed{2 + bits}.{bits}" for bits in (2, 4, 6, 8, 10, 12, 14)]
    methods = {"naive-sgldlp-l", "vc-sgldlp-l", "sgdlp-l", "sgldlp-f", "sgdlp-f"}
    found = plan_runs(MnistMLP(), (), (), (0,))
    assert {(c.method, c.format) for c in found if c.weight_format} == {(m, f) for m in methods for f in formats}
    assert {c.method for c in found if not c.weight_format} == {"sgldfp", "sgdfp"}


def test_methods_and_formats_make_a_grid_with_full_precision_once_a_seed() -> None:
    found = plan_runs(SMALL, ("sgdfp", "vc-sgldlp-l"), ("bfp8", "fixed8.6"), (3, 4))
    rows = [("sgdfp", "fp32"), ("vc-sgldlp-l", "bfp8"), ("vc-sgldlp-l", "fixed8.6")]
    assert [(c.method, c.format, c.seed) for c in found] == [(*row, seed) for seed in (3, 4) for row in rows]
    assert len(plan_runs(MnistMLP(), ("sgdfp", "vc-sgldlp-l"), (), (0,))) == 1 + 7  # in all the paper's formats
    assert {c.format for c in plan_runs(SMALL, (), ("bfp4",), (0,))} == {"bfp4", "fp32"}
    assert len(plan_runs(SMALL, (), ("bfp4",), (0,))) == 7


def test_nothing_is_planned_twice() -> None:
    assert len(plan_runs(SMALL, ("sgdfp", "sgdfp"), (), (0, 0))) == 1
    assert len(plan_runs(SMALL, ("vc-sgldlp-l",), ("bfp8", "bfp8e8"), (0,))) == 1  # two names of one format


def test_a_plan_needs_a_seed() -> None:
    with pytest.raises(ValueError, match=r"^a sweep needs at least one seed$"):
        plan_runs(SMALL, (), (), ())


# ---- what is noticed before any of them


def never(*_: object) -> None:
    raise AssertionError("no process is needed")


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = plan_runs(SMALL, ("sgdfp", "sgldfp"), (), (0,))
    for config in configs:
        run.run_experiment(config, tmp_path / config.run_name)
    before, shares = read_files(tmp_path), []
    monkeypatch.setattr(Digits, "load_data", never)
    outcomes = sweep(configs, tmp_path, None, 2, 1, lambda label, share: shares.append(share))
    assert [(outcome.folder.name, outcome.error) for outcome in outcomes] == [(c.run_name, None) for c in configs]
    assert sum(shares) == 2
    assert read_files(tmp_path) == before


@pytest.mark.parametrize("jobs", [1, 3])
def test_folders_of_other_runs_are_refused_before_any_run(jobs: int, tmp_path: Path) -> None:
    configs = plan_runs(SMALL, ("sgdfp", "sgldfp"), (), (0,))
    run.run_experiment(replace(configs[1], lr=0.5), tmp_path / configs[1].run_name)
    before = read_files(tmp_path)
    with pytest.raises(ValueError, match=r"sgldfp-fp32-seed0 holds another run: lr is 0.5 there and 0.1 here; choose"):
        sweep(configs, tmp_path, None, jobs, 1)
    assert read_files(tmp_path) == before


def test_data_that_are_not_there_are_missed_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no MNIST in"):
        sweep(plan_runs(MnistMLP(), (), (), (0, 1)), tmp_path / "runs", tmp_path, 2, 1)
    assert list(tmp_path.iterdir()) == []


# ---- in processes; each takes seconds to begin


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run.run_experiment(
        replace(SMALL, method="sgldfp", format=None, cycles=5, workers=1), tmp_path / "sgldfp-fp32-seed0"
    )
    before = read_files(tmp_path / "sgldfp-fp32-seed0")
    methods = ["--methods", "csgldfp", "sgldfp", "sgdfp", "--seeds", "0", "--jobs", "1", "--workers", "1", "--json"]
    assert main([*COMMAND, *methods, "--out", str(tmp_path)]) == 1
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert [result["settings"]["method"] for result in answer["runs"]] == ["sgldfp", "sgdfp"]
    (failed,) = answer["failed"]
    assert failed.startswith(f"{tmp_path}/csgldfp-fp32-seed0: ValueError: cycles must be at most 4, got 5")
    assert captured.err == f"qlangevin: failed: {failed}\n"
    assert not (tmp_path / "csgldfp-fp32-seed0").exists()
    assert read_files(tmp_path / "sgldfp-fp32-seed0") == before
    assert multiprocessing.active_children() == []


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_which_then_resumes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = replace(SMALL, method="sgldfp", format=None, epochs=150), tmp_path / "sgldfp-fp32-seed0"
    options = f"--epochs 150 --methods sgldfp --seeds 0 --jobs 1 --out {tmp_path}"
    arguments = [*COMMAND, *shlex.split(options)]
    one = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"  # small networks want one thread
    process = subprocess.Popen(
        [sys.executable, "-c", f"{one}; from qlangevin.cli.main import main; sys.exit(main())", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until((folder / "checkpoint.safetensors").exists)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out, err) == (130, "", "qlangevin: interrupted; the same command resumes\n")
    assert not (folder / "result.json").exists()
    monkeypatch.setattr(commands, "cores", lambda: 1)
    assert main(arguments) == 0
    captured = capfd.readouterr()
    assert "SGLDFP" in captured.out
    assert f"1 of 1 runs done: {tmp_path}" in captured.out
    assert captured.err == ""
    expected = run.run_experiment(config, tmp_path / "whole")
    result = run.read_result(folder)
    assert (result["scores"], result["trace"]) == (expected["scores"], expected["trace"])


@pytest.mark.slow
def test_a_worker_that_is_killed_is_reported(tmp_path: Path) -> None:
    configs = plan_runs(replace(SMALL, epochs=100_000), ("sgdfp", "sgldfp"), (), (0,))

    def kill(label: str, share: float) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    outcomes = sweep(configs, tmp_path, None, 1, 1, kill)
    assert {outcome.error for outcome in outcomes} == {"its process died; run the same command again"}
    assert multiprocessing.active_children() == []
