"""Compile kernels that are right and kernels that are wrong, for GPUs that are not there: only the wrong ones are objected to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[list[str], float, float]]:
    """Problems, instructions and accessed bytes of each small kernel on each GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.helpers.small_kernels"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return {(name, target): tuple(rest) for name, target, *rest in json.loads(ended.stdout)}


Found = dict[tuple[str, str], tuple[list[str], float, float]]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["two operations", "correctly rounded"])
def test_exact_kernels_are_fine(found: Found, name: str, target: str) -> None:
    assert found[name, target][0] == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_fused_operation_is_found(found: Found, target: str) -> None:
    assert any("fused" in problem for problem in found["one operation", target][0])


@pytest.mark.parametrize("target", TARGETS)
def test_an_approximate_operation_is_found(found: Found, target: str) -> None:
    assert any("approximate" in problem for problem in found["approximate", target][0])


@pytest.mark.parametrize("target", TARGETS[:3])
def test_a_64_bit_division_is_found(found: Found, target: str) -> None:
    assert any("64-bit division" in problem for problem in found["64-bit division", target][0])


@pytest.mark.parametrize("target", TARGETS)
def test_bytes_are_those_that_the_kernel_reads_and_writes(found: Found, target: str) -> None:
    _, instructions, accessed = found["two operations", target]
    assert accessed == 12
    assert 3 < instructions < 30
