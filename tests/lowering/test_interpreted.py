"""Lowered models on the kernels of GPUs, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qlangevin import gpu


@pytest.mark.slow
@pytest.mark.skipif(gpu.missing() is not None, reason="there may be no Triton")
def test_the_bits_and_launches_of_a_lowered_network() -> None:
    command = [sys.executable, "-m", "tests.helpers.interpreted_lowering"]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert run.stdout == "the bits are those of the CPU\n", run.stderr
