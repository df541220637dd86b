"""The kernels that ship, compiled for an H100: what would change their bits, registers, bytes, and the budget of instructions.

A quick selection; ``python -m benchmarks.gpu_code``, a stage of `make matrix`, has all of them on four GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.gpu_code import BUDGETS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the findings of `benchmarks.gpu_code`, in a process without the interpreter."""
    file = tmp_path_factory.mktemp("findings") / "findings.json"
    command = [sys.executable, "-m", "benchmarks.gpu_code", "--quick", "--targets", "sm_90", "--json", str(file)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert file.exists(), ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_code_computes_what_the_source_says_in_registers(found: dict[str, Any]) -> None:
    assert found["findings"]
    assert {f["name"]: f["problems"] for f in found["findings"] if f["problems"]} == {}


@pytest.mark.parametrize("operation", BUDGETS)
def test_instructions_stay_within_the_budget(found: dict[str, Any], operation: str) -> None:
    assert 0 < found["instructions"][operation] <= BUDGETS[operation]


def test_bytes_stay_near_the_least(found: dict[str, Any]) -> None:
    assert found["moved"].keys() >= BUDGETS.keys()
    for moved, least, scratch in found["moved"].values():
        assert 0.99 * least < moved < 1.1 * least  # more: exponents and the table of tensors
        assert scratch == 0
    assert found["beyond"] == []
