"""The Triton kernels in the interpreter, in a process of its own: bit for bit the PyTorch path. A quick selection.

``TRITON_INTERPRET=1 pytest tests/gpu/interpreted``, a stage of `make matrix`, has all of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.slow
def test_kernels_have_the_bits_of_the_pytorch_path() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", str(Path(__file__).parent / "interpreted")]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
