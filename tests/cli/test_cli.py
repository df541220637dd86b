"""The command line: what is printed where, and the exit codes."""

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
from rich.console import Console

import qlangevin
from qlangevin._progress import progress_bar
from qlangevin.cli import commands, display
from qlangevin.cli.main import main
from qlangevin.experiments import gaussian, run
from qlangevin.experiments.presets import Experiment
from qlangevin.experiments.report.results import checked
from tests.helpers.official import REVIEWS, cifar10, cifar_records, imagenet, mnist, write
from tests.helpers.runs import run as made_up

QUICK = ["run", "gaussian", "--stepsizes", "0.1", "0.05", "--chains", "50", "--steps", "90"]
TINY = ["run", "digits", "--epochs", "2", "--batch", "50", "--samples", "2"]
TINY += ["--limit-train", "100", "--limit-test", "40", "--hidden", "8"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"qlangevin {qlangevin.__version__}\n"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("", "demo run sweep evaluate report bound bench --version"),
        ("demo", "--out --seeds --jobs --json"),
        ("run", "gaussian digits mnist-logistic mnist-mlp cifar10 cifar100 imdb imagenet"),
        ("run gaussian", "--stepsizes --format --chains --steps --full --seed --out --json"),
        (
            "run digits",
            "--method --format --activations --seed --epochs --lr --hidden --resume --out --data-dir --json",
        ),
        ("run cifar10", "--width --limit-train --limit-test --workers --burn-in --cycles --cycle-samples"),
        ("run imdb", "--length --embedding --hidden"),
        ("run imagenet", "--sampling-epochs --size --width"),
        ("sweep", "digits mnist-logistic mnist-mlp cifar10 cifar100 imdb imagenet"),
        ("sweep mnist-mlp", "--methods --formats --seeds --jobs --out --data-dir --json --epochs"),
        ("evaluate", "--together --ood --limit-test --data-dir --json"),
        ("report", "--out --title"),
        ("bound", "--out --json --format"),
        ("bench", "benchmarks.run"),
    ],
)
def test_help_names_all_there_is(command: str, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert [option for option in options.split() if option not in captured.out] == []


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


# ---- mistakes


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The sentence on standard error, which is all that is printed."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("qlangevin: error: ")
    assert "Traceback" not in lines[0]
    assert "tyro" not in lines[0]
    return lines[0].removeprefix("qlangevin: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "expected one of {demo, run, sweep, evaluate, report, bound, bench}"),
        ("walk", "unrecognized options: walk; available subcommands: demo, run, sweep, evaluate, report, bound, bench"),
        ("--json", "unrecognized or misplaced options: --json"),
        ("run", "expected one of {gaussian, digits, mnist-logistic, mnist-mlp, cifar10, cifar100, imdb, imagenet}"),
        ("run svhn", "unrecognized options: svhn; available subcommands: gaussian, digits"),
        ("run gaussian --stesp 3", "unrecognized options: --stesp, 3; perhaps you meant --steps"),
        ("run gaussian --stepsizes 0", "stepsizes must be above 0"),
        ("run gaussian --stepsizes fast", "--stepsizes: Could not find valid parse for arguments: ['fast']"),
        ("run gaussian --steps 0", "steps must be at least 1"),
        ("run gaussian --chains 1", "chains must be at least 2"),
        ("run gaussian --format fixed8", "unknown format 'fixed8'; a format is written like fixed8.3 (8 bits, 3 of them"),
        ("run gaussian --format fp32", "fp32 has about"),
        ("run gaussian --format bfp8", "fixed or floating point"),
        ("run gaussian --out figure.doc", "--out must end in"),
        ("run digits --method sgd", "invalid choice 'sgd' for argument '--method'. Expected one of ('sgdfp', 'sgldfp'"),
        ("run digits --format fixed8", "unknown format 'fixed8'"),
        ("run digits --method sgdfp --format bfp8", "SGDFP is in full precision; leave --format=bfp8 out"),
        ("run digits --activations half", "unknown format 'half'"),
        ("run digits --lr -1", "lr must be a finite number that is not negative, got -1.0"),
        ("run digits --lr nan", "lr must be a finite number that is not negative, got nan"),
        ("run digits --lr inf", "lr must be a finite number that is not negative, got inf"),
        ("run digits --lr fast", "--lr: could not convert string to float: 'fast'"),
        ("run digits --lr", "missing value for argument '--lr'"),
        ("run digits --epochs 0", "epochs must be an integer, at least 1, got 0"),
        ("run digits --epochs 1.5", "--epochs: invalid literal for int() with base 10: '1.5'"),
        ("run digits --batch -3", "batch must be an integer, at least 1, got -3"),
        ("run digits --hidden 0", "hidden must be an integer, at least 1, got 0"),
        ("run digits --seed -1", "seed must be an integer between 0 and 2^64 - 1, got -1"),
        ("run digits --temperature -1", "temperature must be a finite number that is not negative, got -1.0"),
        ("run digits --burn-in 2", "burn_in must be a fraction, between 0 and 1, got 2.0"),
        ("run digits --samples 100000", "samples must be at most"),
        ("run digits --limit-train 0", "limit_train must be an integer, at least 1, got 0"),
        ("run digits --limit-test 0", "limit_test must be an integer, at least 1, got 0"),
        ("run digits --limit-train 1198", "limit_train must be at most 1197, got 1198"),
        ("run digits --workers -1", "workers must be an integer, at least 0, got -1"),
        ("run digits --resume nowhere", "there is no run in nowhere: it has no config.json"),
        ("run digits --out file", "file is there and holds something else; choose another folder with --out"),
        ("run digits --out file/run", "file/run: Not a directory"),
        ("run digits --out folder", "folder is there and holds something else; choose another folder with --out"),
        ("run digits elsewhere", "unrecognized options: elsewhere"),
        ("run digits --smaples 5", "unrecognized options: --smaples, 5; perhaps you meant --samples"),
        ("run mnist-mlp --data-dir nowhere", "the data folder nowhere does not exist; give one that does, or none"),
        ("run mnist-mlp --data-dir folder", "there is no MNIST in folder: it was to be train-images-idx3-ubyte.gz or"),
        ("run cifar10 --data-dir folder", "there is no CIFAR-10 in folder"),
        ("run imdb --data-dir folder", "there is no IMDB in folder"),
        ("run imagenet --data-dir folder", "there is no ImageNet in folder"),
        ("run cifar10 --width 0", "width must be an integer, at least 1, got 0"),
        ("sweep", "expected one of {digits, mnist-logistic, mnist-mlp, cifar10, cifar100, imdb, imagenet}"),
        ("sweep gaussian", "unrecognized options: gaussian; available subcommands: digits"),
        ("sweep digits --method sgdfp", "a sweep takes several: --methods, --formats, --seeds instead of --method"),
        ("sweep digits --method=vc-sgldlp-l", "a sweep takes several: --methods"),
        ("sweep digits --format bfp8", "a sweep takes several: --methods"),
        ("sweep digits --seed 0", "a sweep takes several: --methods"),
        ("sweep digits --methods sgd", "invalid choice 'sgd' for argument '--methods'"),
        ("sweep digits --formats fixed8", "unknown format 'fixed8'"),
        ("sweep digits --seeds", "a sweep needs at least one seed"),
        ("sweep digits --seeds 1 x", "--seeds: Could not find valid parse for arguments: ['1', 'x']"),
        ("sweep digits --seeds -1", "seed must be an integer between 0 and 2^64 - 1, got -1"),
        ("sweep digits --jobs 0", "jobs must be an integer, at least 1, got 0"),
        ("sweep mnist-mlp --data-dir nowhere", "the data folder nowhere does not exist; give one that does, or none"),
        ("report", "there is nothing to report; give folders of finished runs, or collections of results"),
        ("report nowhere", "there is no nowhere; give folders of finished runs, or collections of results"),
        ("report folder", "there is no result.json in or below folder; a run writes it when it is finished"),
        ("report file", "file is damaged: "),
        ("bound --format fixed8", "unknown format 'fixed8'"),
        ("bound --chains 1", "chains must be an integer, at least 2, got 1"),
        ("bound --out figure.doc", "--out must end in"),
        ("bench --rounds 3", "unrecognized options: --rounds"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_in_one_sentence_and_nothing_is_done(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    Path("folder").mkdir()
    Path("folder/file").write_text("kept, too")
    assert message in refused(arguments.split(), capsys)
    assert {str(path) for path in Path().rglob("*")} <= {"file", "folder", "folder/file"}
    assert (Path("file").read_text(), Path("folder/file").read_text()) == ("kept", "kept, too")


def test_complaints_of_a_terminal_are_sentences_too() -> None:
    box = """╭─ Unrecognized options ─────────────────────╮
│ \x1b[1mUnrecognized options: --epoch, 3, --smaples │
│ , 3                                         │
│ ─────────────────────────────────────────── │
│ Arguments similar to --smaples:             │
│     --samples INT                           │
│         Samples to store. (default: 50)     │
│         in qlangevin run digits --help      │
│ ─────────────────────────────────────────── │
│ Arguments similar to --epoch:               │
│     --epochs INT                            │
│ ─────────────────────────────────────────── │
│ For full helptext, run qlangevin --help     │
╰─────────────────────────────────────────────╯
"""
    expected = "unrecognized options: --epoch, 3, --smaples , 3; perhaps you meant --samples or --epochs"
    assert display.complaint(box) == expected
    assert display.complaint("something else\n") == "something else"
    assert display.complaint("") == ""


def test_what_cannot_be_done_is_said_without_a_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ["--out", str(tmp_path / "run")]
    assert "can't allocate memory" in refused([*TINY, "--hidden", str(10**14), *out], capsys, code=1)
    assert "holds an infinity or a NaN" in refused([*TINY, "--method", "sgldfp", "--lr", "1e30", *out], capsys, code=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "results/samples")

    monkeypatch.setattr(run, "run_experiment", full)
    assert refused(TINY, capsys, code=1) == "results/samples: No space left on device"


def never(*_: object) -> None:
    raise AssertionError("the run must not start")


def test_unwritable_picture_is_noticed_before_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gaussian, "run", never)
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
    def draw(result: gaussian.Result, path: Path) -> None:
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

    monkeypatch.setattr(gaussian, "run", interrupted)
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
    others = "--resume goes on with the settings the run has; leave the others out"
    assert refused(["run", "digits", "--resume", folder, "--epochs", "3"], capsys) == others
    assert refused(["run", "digits", "--resume", folder, "--seed", "1"], capsys) == others
    assert refused(["run", "digits", "--resume", folder, "--out", folder], capsys) == others
    assert refused(["run", "mnist-mlp", "--resume", folder], capsys) == f"{folder} is a run of digits, not of mnist-mlp"
    wrong = f"{folder} holds another run: seed is 0 there and 1 here; choose another folder with --out"
    assert refused([*TINY, "--seed", "1", "--out", folder], capsys) == wrong


def test_an_interrupted_run_says_how_to_go_on(
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
    message, _, command = err.partition(" to go on: ")
    assert (out, message) == ("", "qlangevin: interrupted;")
    assert shlex.split(command) == [
        *("qlangevin", "run", "digits", "--resume", str(tmp_path / "a run"), "--data-dir", "my data")
    ]


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
    message, _, command = err.partition(" to go on: qlangevin ")
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
    result = checked(json.loads(capsys.readouterr().out), "what was printed")
    assert result["steps"] == steps
    assert result["model"]["name"].startswith(model)
    assert result["scaled"]
    if command.startswith("imagenet"):
        first = json.loads((tmp_path / "run/begin/result.json").read_text())
        assert (first["settings"]["method"], first["samples"]) == ("sgdlp-l", 1)


# ---- reports, benchmarks, what is shown


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
    assert {"format", "stepsize", "method", "bound", "exact", "sampled"} <= answer["rows"][0].keys()
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


@pytest.mark.parametrize("width", [40, 80, 96, 110, 120, 200])
def test_numbers_are_never_cut_short(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "console", lambda: Console(width=width))
    result = made_up("imdb", "naive-sgldlp-l", "bfp8/tensor", seconds={"train": 12345.6, "evaluate": 1.0})
    display.tables(display.scores_table("imdb", [result]), display.means_table("imdb", [result]))
    display.tables(
        display.evaluation_table([{**result, "runs": ["a"], "ood": {"entropy": 0.5, "mutual_information": 0.25}}])
    )
    out = capsys.readouterr().out
    assert "…" not in out
    for expected in ("Naïve SGLDLP-L", "bfp8/tensor", f"{result['scores']['nll']:.4f}", "12345.6 s", "0.250"):
        assert expected in out


def test_progress_is_shown_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(10, shown=True) as advance:
        advance("half way", 5)
    assert "half way" in capsys.readouterr().err
    with progress_bar(10, shown=False) as advance:
        advance("half way", 5)
    assert capsys.readouterr().err == ""


def test_the_library_needs_no_command_line_packages() -> None:
    code = "import sys, qlangevin; print([m for m in ('tyro', 'rich', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
