"""The command line: help, start-up, and what bad input leads to."""

import subprocess
import sys
from pathlib import Path

import pytest

import qlangevin
from qlangevin.cli.main import main
from qlangevin.experiments import run
from tests.helpers.runs import TINY, refused


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"qlangevin {qlangevin.__version__}\n"


HEAVY = {"arviz", "matplotlib", "pandas", "rich", "scipy", "sklearn", "torchmetrics", "xarray"}  # seconds to import


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "heavy"),
    [("--version", HEAVY | {"tyro"}), ("--help", HEAVY), ("run --help", HEAVY), ("run digits --help", HEAVY)],
)
def test_version_and_help_import_no_heavy_libraries(command: str, heavy: set[str]) -> None:
    program = (
        "import sys; from qlangevin.cli.main import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    )
    arguments = [sys.executable, "-W", "ignore", "-c", program, *command.split()]
    loaded = subprocess.run(arguments, capture_output=True, text=True, check=True).stderr.split()
    assert "qlangevin" in loaded
    assert heavy & set(loaded) == set()


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("", "demo run sweep evaluate report bound bench --version"),
        ("demo", "--out --jobs --json"),
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


# ---- bad input


@pytest.fixture
def kept_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a file and a folder."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("kept")
    Path("folder/file").write_text("kept, too")


def assert_nothing_was_done() -> None:
    assert {str(path) for path in Path().rglob("*")} <= {"file", "folder", "folder/file"}
    assert (Path("file").read_text(), Path("folder/file").read_text()) == ("kept", "kept, too")


@pytest.mark.usefixtures("kept_files")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Expected one of {demo, run, sweep, evaluate, diagnose, report, llc, bound, bench}"),
        ("walk", "Unrecognized options: walk"),
        ("--json", "Unrecognized or misplaced options: --json"),
        ("run", "Expected one of {gaussian, digits, mnist-logistic, mnist-mlp, cifar10, cifar100, imdb, imagenet}"),
        ("run svhn", "Unrecognized options: svhn"),
        ("run gaussian --stesp 3", "Perhaps you meant: --steps INT"),
        ("run gaussian --stepsizes 0", "stepsizes must be above 0"),
        ("run gaussian --stepsizes fast", "--stepsizes: Could not find valid parse for arguments: ['fast']"),
        ("run gaussian --steps 0", "steps must be at least 1"),
        ("run gaussian --chains 1", "chains must be at least 2"),
        ("run gaussian --format fixed8", "unknown format 'fixed8'; a format is written like fixed8.3 (8 bits, 3 of them"),
        ("run gaussian --format fp32", "fp32 has about"),
        ("run gaussian --format bfp8", "fixed or floating point"),
        ("run digits --method sgd", "invalid choice 'sgd' for argument '--method'. Expected one of ('sgdfp', 'sgldfp'"),
        ("run digits --format fixed8", "unknown format 'fixed8'"),
        ("run digits --method sgdfp --format bfp8", "SGDFP is in full precision; leave --format=bfp8 out"),
        ("run digits --activations half", "unknown format 'half'"),
        ("run digits --lr -1", "lr must be a finite number that is not negative, got -1.0"),
        ("run digits --lr nan", "lr must be a finite number that is not negative, got nan"),
        ("run digits --lr inf", "lr must be a finite number that is not negative, got inf"),
        ("run digits --lr fast", "--lr: could not convert string to float: 'fast'"),
        ("run digits --lr", "Missing value for argument '--lr'"),
        ("run digits --epochs 0", "epochs must be an integer, at least 1, got 0"),
        ("run digits --epochs 1.5", "--epochs: invalid literal for int() with base 10: '1.5'"),
        ("run digits --batch -3", "batch must be an integer, at least 1, got -3"),
        ("run digits --hidden 0", "hidden must be an integer, at least 1, got 0"),
        ("run digits --seed -1", "seed must be an integer between 0 and 2^64 - 1, got -1"),
        ("run digits --temperature -1", "temperature must be a finite number that is not negative, got -1.0"),
        ("run digits --burn-in 2", "burn_in must be a fraction, between 0 and 1, got 2.0"),
        ("run digits --limit-train 0", "limit_train must be an integer, at least 1, got 0"),
        ("run digits --limit-test 0", "limit_test must be an integer, at least 1, got 0"),
        ("run digits --workers -1", "workers must be an integer, at least 0, got -1"),
        ("run digits elsewhere", "Unrecognized options: elsewhere"),
        ("run digits --smaples 5", "Perhaps you meant: --samples INT"),
        ("run cifar10 --width 0", "width must be an integer, at least 1, got 0"),
        ("sweep", "Expected one of {digits, mnist-logistic, mnist-mlp, cifar10, cifar100, imdb, imagenet}"),
        ("sweep gaussian", "Unrecognized options: gaussian"),
        ("sweep digits --methods sgd", "invalid choice 'sgd' for argument '--methods'"),
        ("sweep digits --seeds 1 x", "--seeds: Could not find valid parse for arguments: ['1', 'x']"),
        ("bound --format fixed8", "unknown format 'fixed8'"),
        ("bound --chains 1", "chains must be an integer, at least 2, got 1"),
        ("evaluate seed0 --ood svhn", "invalid choice 'svhn' for argument '--ood'"),
        ("bench --rounds 3", "Unrecognized options: --rounds, 3"),
    ],
)  # fmt: skip
def test_tyro_names_a_wrong_argument_and_nothing_is_done(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err
    assert "dummy" not in captured.err  # names that tyro makes up
    assert_nothing_was_done()


@pytest.mark.usefixtures("kept_files")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run gaussian --out figure.doc", "--out must end in"),
        ("run digits --samples 100000", "samples must be at most"),
        ("run digits --epochs 1", "got 50; ask for 12 or fewer (--samples 12), or for more steps (--epochs)"),
        ("run digits --limit-train 1198", "limit_train must be at most 1197, got 1198"),
        ("run digits --resume nowhere", "there is no run in nowhere: it has no config.json"),
        ("run digits --out file", "file is there and holds something else; choose another folder with --out"),
        ("run digits --out file/run", "file/run: Not a directory"),
        ("run digits --out folder", "folder is there and holds something else; choose another folder with --out"),
        ("run mnist-mlp --data-dir nowhere", "the data folder nowhere does not exist; give one that does, or none"),
        ("run mnist-mlp --data-dir folder", "there is no MNIST in folder: it was to be train-images-idx3-ubyte.gz or"),
        ("run cifar10 --data-dir folder", "there is no CIFAR-10 in folder"),
        ("run imdb --data-dir folder", "there is no IMDB in folder"),
        ("run imagenet --data-dir folder", "there is no ImageNet in folder"),
        ("sweep digits --method sgdfp", "a sweep takes several: --methods, --formats, --seeds instead of --method"),
        ("sweep digits --method=vc-sgldlp-l", "a sweep takes several: --methods"),
        ("sweep digits --format bfp8", "a sweep takes several: --methods"),
        ("sweep digits --seed 0", "a sweep takes several: --methods"),
        ("sweep digits --formats fixed8", "unknown format 'fixed8'"),
        ("sweep digits --seeds", "a sweep needs at least one seed"),
        ("sweep digits --seeds -1", "seed must be an integer between 0 and 2^64 - 1, got -1"),
        ("sweep digits --jobs 0", "jobs must be an integer, at least 1, got 0"),
        ("sweep mnist-mlp --data-dir nowhere", "the data folder nowhere does not exist; give one that does, or none"),
        ("report", "there is nothing to report; give folders of finished runs, or collections of results"),
        ("report nowhere", "there is no nowhere; give folders of finished runs, or collections of results"),
        ("report folder", "there is no result.json in or below folder; a run writes it when it is finished"),
        ("report file", "file is damaged: "),
        ("bound --out figure.doc", "--out must end in"),
    ],
)  # fmt: skip
def test_bad_input_is_named_in_one_sentence_and_nothing_is_done(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(arguments.split(), capsys)
    assert_nothing_was_done()


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
