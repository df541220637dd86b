"""The demo: one page with the lead picture first, from runs that are done once."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from qlangevin.cli.main import main
from qlangevin.experiments import demo, gaussian, report, run, sweep
from qlangevin.experiments.methods import METHODS, MethodName
from qlangevin.experiments.presets import Digits, Experiment


def small(
    base: Experiment, methods: Sequence[MethodName], formats: Sequence[str], seeds: Sequence[int]
) -> list[Experiment]:
    short = {"epochs": 2, "batch": 50, "samples": 2, "limit_train": 100, "limit_test": 60, "hidden": 8}
    return [replace(config, **short) for config in sweep.plan_runs(base, methods, formats, seeds)]  # type: ignore[arg-type]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few chains, few epochs."""
    figure = property(lambda self: gaussian.GaussianSettings(stepsizes=(0.1, 0.05), chains=50, steps=60))
    monkeypatch.setattr(demo.DemoSettings, "gaussian", figure)
    monkeypatch.setattr(demo, "plan_runs", small)


def prepared(folder: Path, but: int = 0) -> list[Experiment]:
    """The runs of the demo, done beforehand in this process but for the last ones."""
    configs = small(Digits(), (), (), (0,))
    for config in configs[: len(configs) - but]:
        run.run_experiment(config, folder / "runs" / config.run_name)
    return configs


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_demo_does_what_is_missing_and_writes_a_page_with_the_lead_picture_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs, shares = prepared(tmp_path, but=1), []
    settings = demo.DemoSettings(tmp_path, seeds=1, jobs=1)
    made = demo.run_demo(settings, lambda label, share: shares.append(share))
    assert made.page == tmp_path / "index.html"
    assert sum(shares) == pytest.approx(settings.work, abs=1)
    assert [result["settings"] for result in made.results] == [config.to_json() for config in configs]
    page = made.page.read_text(encoding="utf-8")
    pictures = re.findall(r"<img|<svg", page)
    assert len(pictures) > 1
    assert pictures[0] == "<img"
    assert page.index(demo.CAPTION[:40]) < page.index("<svg")
    assert (tmp_path / "gaussian.png").read_bytes() == (tmp_path / "figures/lead.png").read_bytes()
    for method, _ in Digits.rows:
        assert METHODS[method].name in page
    saved = {config.run_name: (tmp_path / "runs" / config.run_name / "result.json").stat() for config in configs}
    monkeypatch.setattr(report, "write_report", lambda results, out, title, lead: out / "index.html")
    assert main(["demo", "--out", str(tmp_path), "--seeds", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for expected in ("naive SGLDLP-L", "VC SGLDLP-L", "SGDFP", "bytes/weight", f"report: {tmp_path}/index.html"):
        assert expected in captured.out
    for name, before in saved.items():
        assert (tmp_path / "runs" / name / "result.json").stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_json_is_one_object_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared(tmp_path)
    monkeypatch.setattr(report, "write_report", lambda results, out, title, lead: out / "index.html")
    assert main(["demo", "--out", str(tmp_path), "--seeds", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(json.loads(captured.out)["runs"]) == len(Digits.rows)


@pytest.mark.usefixtures("quick")
def test_a_run_that_fails_is_reported_and_no_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(configs: Sequence[Experiment], folder: Path, *_: object) -> list[sweep.RunOutcome]:
        return [sweep.RunOutcome(folder / config.run_name, "OSError: the disk is on fire") for config in configs[:1]]

    monkeypatch.setattr(demo, "sweep", failing)
    assert main(["demo", "--out", str(tmp_path), "--seeds", "1"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"qlangevin: error: {tmp_path}/runs/sgldfp-fp32-seed0: OSError: the disk is on fire\n"
    assert not (tmp_path / "index.html").exists()


@pytest.mark.usefixtures("quick")
def test_the_runs_of_something_else_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run.run_experiment(replace(small(Digits(), (), (), (0,))[0], lr=0.7), tmp_path / "runs/sgldfp-fp32-seed0")
    assert main(["demo", "--out", str(tmp_path), "--seeds", "1"]) == 2
    assert "sgldfp-fp32-seed0 holds another run: lr is 0.7 there" in capsys.readouterr().err


def test_mistakes_are_noticed_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the demo must not start")

    monkeypatch.setattr(gaussian, "run_gaussian", never)
    (tmp_path / "file").write_text("kept")
    for arguments, message in (
        (["--seeds", "0"], "seeds must be an integer, at least 1, got 0"),
        (["--jobs", "0"], "jobs must be an integer, at least 1, got 0"),
        (["--out", str(tmp_path / "file")], f"{tmp_path}/file: File exists"),
    ):
        assert main(["demo", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in " ".join(err.replace("│", " ").split())
    assert (tmp_path / "file").read_text() == "kept"

    def missing(*_: object) -> None:
        raise ValueError("the data set digits comes with scikit-learn, which is not installed")

    monkeypatch.setattr(Digits, "load_data", missing)
    assert main(["demo", "--out", str(tmp_path / "new")]) == 2
    assert "scikit-learn, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
