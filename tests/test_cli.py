"""The command line: what is printed where, and the exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import qlangevin
from qlangevin.cli import main
from qlangevin.experiments import gaussian
from qlangevin.progress import progress_bar

QUICK = ["run", "gaussian", "--stepsizes", "0.1", "0.05", "--chains", "50", "--steps", "90"]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"qlangevin {qlangevin.__version__}\n"
    for arguments, expected in ((["--help"], "run"), (["run", "--help"], "gaussian"), ([*QUICK, "--help"], "--chains")):
        assert main(arguments) == 0
        assert expected in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run"),
        (["run"], "gaussian"),
        (["walk"], "walk"),
        (["run", "gaussian", "--stesp", "3"], "--steps"),
        (["run", "gaussian", "--stepsizes", "0"], "stepsizes must be above 0"),
        (["run", "gaussian", "--stepsizes", "fast"], "fast"),
        (["run", "gaussian", "--steps", "0"], "steps must be at least 1"),
        (["run", "gaussian", "--chains", "1"], "chains must be at least 2"),
        (["run", "gaussian", "--format", "fixed8"], "unknown format 'fixed8'"),
        (["run", "gaussian", "--format", "fp32"], "at most 5000 numbers"),
        (["run", "gaussian", "--format", "bfp8"], "fixed or floating point"),
        (["run", "gaussian", "--out", "figure.doc"], "--out must end in"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in " ".join(captured.err.replace("│", " ").split())


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
