"""Run tutorials and write their pages: ``python -m tools.tutorials [NAME ...]``.

A tutorial is a script, ``docs/tutorials/NAME.py``, of cells that begin with ``# %%``, or ``# %% [markdown]`` for text in
comments. Its page, ``NAME.md`` beside it, has text, code and what the code printed. Pictures that it saves into the current
folder are put there, too.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "tutorials"


class Cell(NamedTuple):
    """A part of a script: text as Markdown, or code."""

    is_text: bool
    body: str


def read_cells(script: str) -> list[Cell]:
    """Split a script into its cells."""
    cells = []
    for part in ("\n" + script).split("\n# %%")[1:]:
        kind, _, body = part.partition("\n")
        if kind.strip() == "[markdown]":
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
        cells.append(Cell(kind.strip() == "[markdown]", body.strip()))
    return cells


def run_cells(cells: list[Cell]) -> list[str]:
    """Execute the code of the cells one after another; return what each printed."""
    module = types.ModuleType("__main__")  # classes that the code defines look their module up
    printed = []
    for cell in cells:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            if not cell.is_text:
                exec(compile(cell.body, "tutorial", "exec"), module.__dict__)
        printed.append(output.getvalue().rstrip())
    return printed


def write_page(name: str, cells: list[Cell], printed: list[str], seconds: float) -> str:
    """Return the page: text, code and output; code after the first is marked as its continuation, for the tests."""
    parts, fence = [], "```python"
    for cell, output in zip(cells, printed, strict=True):
        parts.append(cell.body if cell.is_text else f"{fence}\n{cell.body}\n```")
        if not cell.is_text:
            fence = "```python continued"
        if output:
            parts.append(f"```text\n{output}\n```")
    parts.append(f"*Made from [{name}.py]({name}.py), which took {seconds:.0f} seconds on one core.*")
    return "\n\n".join(parts) + "\n"


def make(name: str) -> None:
    """Run a tutorial in a temporary folder, and write its page and pictures."""
    cells = read_cells((FOLDER / f"{name}.py").read_text("utf-8"))
    here, begin = Path.cwd(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            printed = run_cells(cells)
        finally:
            os.chdir(here)
        for picture in Path(folder).glob("*.png"):
            shutil.copy(picture, FOLDER)
    seconds = time.perf_counter() - begin
    (FOLDER / f"{name}.md").write_text(write_page(name, cells, printed, seconds), "utf-8")
    print(f"{name}: {seconds:.0f} s")


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    for chosen in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.py")):
        make(chosen)
