"""The examples run, and show what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_loop_changed_by_two_lines() -> None:
    one, average = load("own_loop").main(epochs=12)
    assert average < one < 0.45  # chance is 0.69
    changed = [line for line in (EXAMPLES / "own_loop.py").read_text().splitlines() if "# <--" in line]
    assert len(changed) == 2
