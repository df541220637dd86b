"""The examples run, and show what their texts say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_loop_changed_by_two_lines() -> None:
    one, average = load("own_loop").main(epochs=12)
    assert average < one < 0.45  # chance is 0.69
    changed = [line for line in (EXAMPLES / "own_loop.py").read_text().splitlines() if "# <--" in line]
    assert len(changed) == 2


@pytest.mark.slow
def test_digits_are_averaged_and_a_second_start_finds_them_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example: Any = load("digits")
    example.SGD_SETTINGS, example.SGLD_SETTINGS = example.SGD_SETTINGS[:2], example.SGLD_SETTINGS[:2]
    sgd, _, one, average = example.main(tmp_path, epochs=96, samples=40).values()
    assert sgd["count"] == one["count"] == average["count"] == 1197
    assert average["nll"] < sgd["nll"]  # which takes longer to get there
    assert average["error"] < 0.12  # chance is 0.9
    assert "R-hat" in capsys.readouterr().out
    stores = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    assert len(stores) == 2 * 41  # samples, and a checkpoint each
    example.main(tmp_path, epochs=96, samples=40)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == stores


@pytest.mark.slow
def test_learning_coefficients_agree_in_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    for full, low in load("llc").main(moments=(100, 400)):
        assert abs(full.mean - low.mean) < 4 * (full.stderr**2 + low.stderr**2) ** 0.5
    assert "refined: first layer" in capsys.readouterr().out
