"""The pages of the tutorials show the code of their scripts, and are made as `tools.tutorials` says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.tutorials import FOLDER, Cell, read_cells, run_cells, write_page

SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_page_shows_its_script(script: Path) -> None:
    page = script.with_suffix(".md").read_text("utf-8")
    shown = re.findall(r"^```python[^\n]*\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    cells = read_cells(script.read_text("utf-8"))
    assert shown == [cell.body for cell in cells if not cell.is_text], f"run python -m tools.tutorials {script.stem}"
    assert [cell.body for cell in cells if cell.is_text and cell.body not in page] == []
    seconds = re.findall(r"which took (\d+) seconds on one core", page)
    assert [int(s) <= 120 for s in seconds] == [True]


def test_there_are_four() -> None:
    assert len(SCRIPTS) == 4


def test_a_script_becomes_a_page() -> None:
    script = "# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nx = 2\nprint(x)\n\n# %%\ny = x\n"
    cells = read_cells(script)
    assert cells == [Cell(True, "# Title\n\nText."), Cell(False, "x = 2\nprint(x)"), Cell(False, "y = x")]
    printed = run_cells(cells)
    assert printed == ["", "2", ""]
    page = write_page("some", cells, printed, 1.2)
    assert page.startswith(
        "# Title\n\nText.\n\n```python\nx = 2\nprint(x)\n```\n\n```text\n2\n```\n\n```python continued\n"
    )
