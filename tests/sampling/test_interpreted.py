"""Chains with the Triton kernels, interpreted: they have the bits of the CPU's kernels, and move between the two."""

import subprocess
import sys
from pathlib import Path

import pytest

from qlangevin import gpu

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(gpu.missing() is not None, reason="no Triton")
def test_chains_with_triton_kernels() -> None:
    command = [sys.executable, "-m", "tests.helpers.interpreted_chains"]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    kinds = ["fixed point", "accumulator", "bfloat16", "packed", "two codes in a byte"]
    assert child.stdout.split("\n")[:-1] == [*kinds, "check_failed_step", "check_overwritten", "check_compiled"]
