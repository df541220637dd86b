"""Tests that touch convolutions and kernels, as on a CPU without AVX-512; `make matrix` has all of them, and more machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = [
    *(f"tests/lowering/test_{name}.py" for name in ("convolution", "plain_tensors", "layers")),
    "tests/native/test_native.py",
]
LONG = "test_every_format_and_rounding"  # runs every level of our own kernels anyway, whatever PyTorch does


@pytest.mark.slow
def test_convolutions_and_kernels_without_avx512() -> None:
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MALLOC_PERTURB_": "7"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-k",
        f"not {LONG}",
        *TESTS,
    ]
    root = Path(__file__).parents[1]
    ended = subprocess.run(command, cwd=root, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
