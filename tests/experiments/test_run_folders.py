"""Folders of runs: finished, of something else, damaged, or in use."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlangevin.experiments import run
from qlangevin.experiments.diagnose import diagnose_run
from qlangevin.experiments.presets import Digits, read_config
from qlangevin.experiments.run import run_experiment
from qlangevin.experiments.score import evaluate
from qlangevin.storage.errors import DamagedError
from qlangevin.storage.leftovers import temporary_name
from tests.helpers.experiments import SMALL, TINY, Watch, press
from tests.helpers.runs import read_files


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


def test_a_run_killed_while_it_wrote_its_first_file_begins_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / temporary_name("config.json")).write_text("{")
    run_experiment(SMALL, folder)
    assert (folder / "result.json").exists()


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
        ("[]", "config.json is not the configuration of an experiment"),
        ('{"experiment": "digits"}', "config.json is of another version of digits"),
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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epochs", "four", "epochs must be an integer, at least 1, got 'four'"),
        ("method", [], "unhashable"),
        ("lr", -1, "lr"),
    ],
)
def test_a_setting_that_is_damaged_is_named_with_its_file(
    name: str, value: object, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL.to_json(), name: value}))
    readers: list[Callable[[], object]] = [
        lambda: read_config(tmp_path), lambda: evaluate([tmp_path]), lambda: diagnose_run(tmp_path)
    ]  # fmt: skip
    for read in readers:
        with pytest.raises(DamagedError, match=f"^{tmp_path}/config.json is damaged: .*{message}"):
            read()


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
