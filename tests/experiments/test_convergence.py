"""Chains that have not mixed are said not to have, wherever their R-hat is printed, with what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qlangevin.cli.main import main
from qlangevin.experiments.convergence import MAX_R_HAT, convergence, describe_non_convergence, warn_of_non_convergence
from qlangevin.experiments.presets import Digits
from qlangevin.experiments.report import sections, write_report
from qlangevin.experiments.report.looks import Image
from qlangevin.experiments.results import read_result
from tests.helpers.runs import run as made_up

ONE = (
    "R-hat 2.10 of the log-likelihood: the halves of the chain differ, it has not converged, and averages depend on where it "
    "began. Run longer (--epochs), discard more of the beginning (--burn-in) or take larger steps (--lr)."
)


def unmixed(method: str = "vc-sgldlp-l", seed: int = 0, r_hat: float = 2.1, **changes: Any) -> dict[str, Any]:
    return made_up(method=method, seed=seed, r_hat=r_hat, **changes)


def of_chains(lengths: list[int], values: list[float] | None = None, **changes: Any) -> dict[str, Any]:
    result = unmixed(**changes)
    steps = [step for length in lengths for step in range(length)]
    result["trace"] = {"steps": steps, "log_likelihood": values or [-1.0 - 0.1 * s for s in steps], "chains": lengths}
    return result


def test_an_r_hat_that_is_too_large_is_explained() -> None:
    assert describe_non_convergence(unmixed()) == ONE
    assert describe_non_convergence(unmixed(r_hat=MAX_R_HAT)) is None
    assert describe_non_convergence(unmixed(r_hat=1.11)) is not None
    several = describe_non_convergence(of_chains([10, 10]))
    assert several is not None
    assert several.startswith(
        "R-hat 2.10 of the log-likelihood: the chains have not mixed, and averages depend on where"
    )
    assert "each chain stays in a mode of its own" in several
    cyclical = describe_non_convergence(unmixed("vc-csgldlp-l"))
    assert cyclical is not None
    assert "with more cycles (--cycles)" in cyclical
    assert "--burn-in" not in cyclical
    assert describe_non_convergence(unmixed("mine")) == ONE  # a method of another version
    for result in (unmixed(), of_chains([3, 3]), unmixed("vc-csgldlp-l")):
        assert "\n" not in str(describe_non_convergence(result))


def test_chains_that_stand_still_have_no_r_hat_and_are_named_all_the_same() -> None:
    apart = [-1.0] * 5 + [-2.0] * 5
    assert convergence(torch.tensor(apart, dtype=torch.float64).view(2, 5)) == {"r_hat": None, "ess": None}
    for lengths, values in (([5, 5], apart), ([8], [-1.0] * 8)):
        text = describe_non_convergence(of_chains(lengths, values, r_hat=None))
        assert text is not None
        assert text.startswith("All samples of a chain have the same log-likelihood: it stands still")
    assert describe_non_convergence(of_chains([7], [-1.0] * 7, r_hat=None)) is None  # too short to say
    assert describe_non_convergence(made_up(method="sgdlp-l")) is None  # a single sample


def test_of_several_runs_the_worst_is_named() -> None:
    good = made_up(seed=1)
    assert warn_of_non_convergence([]) is None
    assert warn_of_non_convergence([good]) is None
    assert warn_of_non_convergence([unmixed()]) == ONE
    text = warn_of_non_convergence([good, unmixed(seed=2, r_hat=1.5), unmixed(seed=3), made_up(method="sgdlp-l")])
    head = "2 of 3 sampled runs have not converged (R-hat above 1.1); the worst, VC SGLDLP-L in bfp8 with seed 3: "
    assert text == head + ONE


def save_run(folder: Path, result: dict[str, Any]) -> None:
    config = Digits()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    (folder / "result.json").write_text(json.dumps(result | {"settings": config.to_json()}))


def test_run_says_so_below_its_table_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / "run", unmixed())
    assert main(["run", "digits", "--out", str(tmp_path / "run")]) == 0
    assert ONE in capsys.readouterr().out.splitlines()
    assert main(["run", "digits", "--out", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_converged"] == ONE
    save_run(tmp_path / "good", made_up())
    assert main(["run", "digits", "--out", str(tmp_path / "good")]) == 0
    assert "R-hat " in (out := capsys.readouterr().out)
    assert "converged" not in out
    assert read_result(tmp_path / "good")["not_converged"] is None


def test_a_sweep_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_run(tmp_path / Digits().run_name, unmixed())
    arguments = ["sweep", "digits", "--methods", "vc-sgldlp-l", "--seeds", "0", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert ONE in capsys.readouterr().out.splitlines()
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["not_converged"] == ONE


def test_evaluations_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qlangevin.experiments.score.convergence", lambda draws: {"r_hat": 2.1, "ess": 3.0})
    tiny = ["--epochs", "2", "--batch", "50", "--samples", "2", "--limit-train", "100", "--limit-test", "40"]
    assert main(["run", "digits", *tiny, "--hidden", "8", "--out", str(tmp_path)]) == 0
    assert ONE in capsys.readouterr().out.splitlines()
    assert main(["evaluate", str(tmp_path)]) == 0
    assert ONE in capsys.readouterr().out.splitlines()
    assert main(["evaluate", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["not_converged"] == ONE


def test_a_report_says_so_as_page_and_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "render", lambda figure: Image("<svg/>", b"PNG"))
    for experiment in ("digits", "cifar10"):  # a table of scores, and the tables of the paper
        out = tmp_path / experiment
        page = write_report([unmixed(experiment=experiment)], out)
        for text in (page.read_text(encoding="utf-8"), (out / "report.md").read_text(encoding="utf-8")):
            assert "the halves of the chain differ, it has not converged" in text
    assert main(["report", str(tmp_path / "digits/runs.json"), "--out", str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_converged"] == ONE
    write_report([made_up()], tmp_path / "good")
    assert "has not converged" not in (tmp_path / "good/report.md").read_text(encoding="utf-8")
