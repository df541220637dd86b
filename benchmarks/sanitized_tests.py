"""``python -m benchmarks.sanitized_tests tests/native``: pytest with the kernels that `benchmarks.sanitized` compiles."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    sanitized: Any = importlib.import_module("benchmarks.sanitized")
    if sanitized.VARIABLE in os.environ:
        sanitized.load()  # before conftest.py imports qlangevin
        return int(importlib.import_module("pytest").main(arguments))
    with tempfile.TemporaryDirectory() as folder:
        variables = sanitized.environment(sanitized.compile_kernels(Path(folder)))
        command = [sys.executable, "-m", "benchmarks.sanitized_tests", *arguments]
        return subprocess.run(command, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
