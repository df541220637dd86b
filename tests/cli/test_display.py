"""The output of commands: tables, and a progress bar on a terminal."""

import sys
import time

import pytest
from rich.console import Console

from qlangevin._progress import progress_bar
from qlangevin.cli import display
from tests.helpers.runs import run as made_up


@pytest.mark.parametrize("width", [40, 80, 96, 110, 120, 200])
def test_numbers_are_never_cut_short(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "console", lambda: Console(width=width))
    result = made_up("imdb", "naive-sgldlp-l", "bfp8/tensor", seconds={"train": 12345.6, "evaluate": 1.0})
    display.print_tables(display.scores_table("imdb", [result]))
    display.print_tables(
        display.evaluation_table([{**result, "runs": ["a"], "ood": {"entropy": 0.5, "mutual_information": 0.25}}])
    )
    out = capsys.readouterr().out
    assert "…" not in out
    for expected in ("Naïve SGLDLP-L", "bfp8/tensor", f"{result['scores']['nll']:.4f}", "12345.6 s", "0.250"):
        assert expected in out


def test_progress_is_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(10, shown=True) as advance:
        advance("half way", 5)
    assert "half way" in capsys.readouterr().err
    with progress_bar(10, shown=False, lines=0.01) as advance:
        advance("half way", 5)
    assert capsys.readouterr().err == ""


def test_progress_is_lines_elsewhere_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(10) as advance:
        advance("half way", 5)
    assert capsys.readouterr().err == ""
    written = ""
    with progress_bar(10, lines=0.01) as advance:
        advance("half way", 5)
        deadline = time.monotonic() + 60
        while written.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            written += capsys.readouterr().err
    assert written.splitlines()[1].split(maxsplit=2) == ["0", "s", "50%  half way"]
