"""The commands: what they print where, what they leave on disk, and how they are resumed."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qlangevin.cli import commands
from qlangevin.cli.main import main
from qlangevin.experiments import gaussian, run
from qlangevin.experiments.presets import Experiment
from qlangevin.experiments.results import check_result
from tests.helpers.official import REVIEWS, cifar10, cifar_records, imagenet, mnist, write
from tests.helpers.runs import TINY, refused

QUICK = ["run", "gaussian", "--stepsizes", "0.1", "0.05", "--chains", "50", "--steps", "90"]


# ---- Figure 1


def test_table_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "new" / "figure.png"
    assert main([*QUICK, "--seed", "3", "--out", str(picture)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for expected in ("naive SGLDLP-L", "exact", "seed 3", "threads", str(picture)):
        assert expected in captured.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(picture.parent.iterdir()) == [picture]


def test_short_burn_in_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["run", "gaussian", "--stepsizes", "0.01", "--chains", "9", "--out", str(tmp_path / "a.png")]
    assert main([*arguments, "--steps", "30"]) == 0
    assert "may not have converged" in capsys.readouterr().out


@pytest.mark.slow
def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*QUICK, "--json", "--out", str(tmp_path / "figure.pdf")]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert captured.err == ""
    assert answer["experiment"] == "gaussian"
    assert answer["settings"]["stepsizes"] == [0.1, 0.05]
    assert [row["method"] for row in answer["rows"]] == [*gaussian.METHODS] * 2
    assert all(row["chain_steps"] == 50 * 90 for row in answer["rows"])
    assert answer["rows"][0]["exact_w2"] is None
    assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")


def never(*_: object) -> None:
    raise AssertionError("the run must not start")


def test_unwritable_picture_is_noticed_before_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaussian, "run_gaussian", never)
    (tmp_path / "file").write_text("kept")
    assert main([*QUICK, "--out", str(tmp_path / "file" / "figure.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    (tmp_path / "folder.png").mkdir()
    assert main([*QUICK, "--out", str(tmp_path / "folder.png")]) == 2
    assert "is a directory" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"


def test_failing_to_draw_keeps_the_table_and_the_old_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(result: gaussian.GaussianResult, path: Path) -> None:
        path.write_text("half")
        raise OSError("No space left on device")

    monkeypatch.setattr(gaussian, "draw", draw)
    picture = tmp_path / "figure.png"
    picture.write_text("old")
    assert main([*QUICK, "--out", str(picture)]) == 1
    captured = capsys.readouterr()
    assert "VC SGLDLP-L" in captured.out
    assert "No space left" in captured.err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_interrupt(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gaussian, "run_gaussian", interrupted)
    assert main([*QUICK, "--out", str(tmp_path / "figure.png")]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "interrupted" in captured.err
    assert list(tmp_path.iterdir()) == []


# ---- runs


def test_a_run_prints_a_table_and_where_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "--seed", "2", "--format", "bfp8"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    folder = "results/digits/vc-sgldlp-l-bfp8-seed2"
    for expected in ("VC SGLDLP-L", "bfp8", "bytes/weight", "the last sample alone: error", f"run: {folder}\n"):
        assert expected in captured.out
    assert (
        "scaled down or changed: 100 of 1197 training images, 40 of 600 test images; epochs 2 instead" in captured.out
    )
    assert sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith(".")) == [
        *("checkpoint.safetensors", "config.json", "manifest.json", "result.json", "samples")
    ]
    for again in (["run", "digits", "--resume", folder], [*TINY, "--seed", "2", "--format", "bfp8"]):
        assert main(again) == 0
        assert capsys.readouterr().out == captured.out  # it is done


def test_a_finished_run_tells_of_the_machine_that_did_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*TINY, "--out", str(tmp_path / "run")]
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result = json.loads(captured.out)
    assert result == json.loads((tmp_path / "run/result.json").read_text())
    result["environment"]["machine"] = "Analytical Engine"
    (tmp_path / "run/result.json").write_text(json.dumps(result))
    assert main(arguments) == 0
    assert "machine Analytical Engine" in capsys.readouterr().out


def test_resuming_takes_the_settings_of_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert main([*TINY, "--out", folder]) == 0
    capsys.readouterr()
    others = "--resume takes the settings of the run; leave all others out"
    assert refused(["run", "digits", "--resume", folder, "--epochs", "3"], capsys) == others
    assert refused(["run", "digits", "--resume", folder, "--seed", "1"], capsys) == others
    assert refused(["run", "digits", "--resume", folder, "--out", folder], capsys) == others
    assert refused(["run", "mnist-mlp", "--resume", folder], capsys) == f"{folder} is a run of digits, not of mnist-mlp"
    wrong = f"{folder} holds another run: seed is 0 there and 1 here; choose another folder with --out"
    assert refused([*TINY, "--seed", "1", "--out", folder], capsys) == wrong


def test_an_interrupted_run_says_how_to_resume(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(config: Experiment, folder: Path, *_: object) -> None:
        if folder.name == "a run":
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config.to_json()))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_experiment", interrupted)
    assert main([*TINY, "--out", str(tmp_path / "none")]) == 130
    assert capsys.readouterr() == ("", "qlangevin: interrupted; nothing was done yet\n")
    assert main([*TINY, "--out", str(tmp_path / "a run"), "--data-dir", "my data"]) == 130
    out, err = capsys.readouterr()
    message, _, command = err.partition(" to resume: ")
    assert (out, message) == ("", "qlangevin: interrupted;")
    assert shlex.split(command) == [
        *("qlangevin", "run", "digits", "--resume", str(tmp_path / "a run"), "--data-dir", "my data")
    ]


@pytest.mark.slow
def test_ctrl_c_at_any_moment_loses_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, "--epochs", "250", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from qlangevin.cli.main import main; sys.exit(main())", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while not (tmp_path / "run/checkpoint.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(random.Random(0).uniform(0, 0.1))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (130, "")
    message, _, command = err.partition(" to resume: qlangevin ")
    assert message == "qlangevin: interrupted;"
    assert not (tmp_path / "run/result.json").exists()
    assert main([*shlex.split(command), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--out", str(tmp_path / "whole"), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (result["scores"], result["trace"]) == (whole["scores"], whole["trace"])
    for path in (tmp_path / "whole/samples").iterdir():
        assert path.read_bytes() == (tmp_path / "run/samples" / path.name).read_bytes()


# ---- the paper's data sets, small ones in the official forms


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("official")
    mnist(folder / "mnist", 20, 10)
    cifar10(folder / "cifar10")
    records = {"train.bin": cifar_records(20, fine=True), "test.bin": cifar_records(6, 20, fine=True)}
    write(folder / "cifar100/cifar-100-binary", records)
    write(folder / "imdb/aclImdb", {name: text.encode() for name, text in REVIEWS.items()})
    imagenet(folder / "imagenet")
    return folder


# A network of width 2 begins with weights beyond the range of fixed8.8; the warning is true.
@pytest.mark.filterwarnings("ignore:.* weights of parameter .* are at an end of the range of fixed8.8")
@pytest.mark.parametrize(
    ("command", "notes", "model", "steps"),
    [
        ("mnist-logistic --epochs 2 --batch 10 --samples 2", "20 of 60000 training images, 10 of", "Logistic", 4),
        ("mnist-mlp --epochs 2 --batch 10 --samples 2 --hidden 5", "hidden 5 instead of 100", "MLP", 4),
        ("cifar10 --epochs 1 --batch 10 --samples 1 --burn-in 0 --width 2", "20 of 50000 training images, 4 of", "ResNet18", 2),
        ("cifar10 --epochs 2 --method vc-csgldlp-l --batch 5 --width 2 --cycles 2 --cycle-samples 2 --exploration 0.5",
         "cycles 2 instead of 7", "ResNet18", 8),
        ("cifar10 --epochs 1 --method sgldlp-f --format fixed8.8 --batch 8 --samples 1 --burn-in 0 --width 2 --limit-train 8",
         "8 of 50000 training images", "ResNet18", 1),
        ("cifar100 --epochs 1 --batch 10 --samples 1 --burn-in 0 --width 2", "epochs 1 instead of 245", "ResNet18", 2),
        ("imdb --epochs 5 --batch 5 --samples 2 --hidden 3 --embedding 2 --length 6", "5 of 25000 training texts", "LSTM", 5),
        ("imdb --epochs 1 --batch 2 --method sgdfp --hidden 3 --embedding 2 --length 6", "length 6 instead", "LSTM", 3),
        ("imagenet --epochs 1 --sampling-epochs 1 --batch 3 --samples 2 --width 2 --size 32", "3 of 1000 classes", "ResNet18", 3),
    ],
)  # fmt: skip
def test_each_experiment_runs_on_the_official_files(
    command: str, notes: str, model: str, steps: int, official: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["run", *command.split(), "--data-dir", str(official), "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    said = next(line for line in captured.out.splitlines() if line.startswith("scaled down or changed: "))
    assert notes in said
    assert main([*arguments, "--json"]) == 0
    result = check_result(json.loads(capsys.readouterr().out), "what was printed")
    assert result["steps"] == steps
    assert result["model"]["name"].startswith(model)
    assert result["scaled"]
    if command.startswith("imagenet"):
        first = json.loads((tmp_path / "run/begin/result.json").read_text())
        assert (first["settings"]["method"], first["samples"]) == ("sgdlp-l", 1)


# ---- reports, benchmarks


def test_a_report_is_made_of_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*TINY, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report"), "--title", "A title"]) == 0
    assert capsys.readouterr() == (f"1 runs: {tmp_path}/report/index.html\n", "")
    assert "A title" in (tmp_path / "report/index.html").read_text()


def test_the_bound_is_a_picture_and_a_table_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = shlex.split(f"bound --stepsizes 0.1 0.2 --frac 3 --chains 0 --out {tmp_path}/bound.svg")
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    answer = json.loads(captured.out)
    assert answer["experiment"] == "bound"
    assert {"format", "stepsize", "method", "bound", "sharp", "exact", "sampled"} <= answer["rows"][0].keys()
    assert "<svg" in (tmp_path / "bound.svg").read_text()


def test_benchmarks_need_the_repository(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "site-packages/qlangevin/cli/commands.py"))
    message = "the benchmarks are in the source repository, which is not here; clone it, and `make bench`"
    assert refused(["bench"], capsys) == message
    asked: list[Any] = []

    def run(command: list[str], cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
        asked.append((command[1:], cwd))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", run)
    write(tmp_path / "benchmarks", {"run.py": b""})
    assert main(["bench", "steps", "memory"]) == 3
    assert asked == [(["-m", "benchmarks.run", "steps", "memory"], tmp_path)]
