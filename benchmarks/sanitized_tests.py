"""``python -m benchmarks.sanitized_tests tests/native``: pytest with kernels compiled under AddressSanitizer and UBSan.

The kernels are compiled into build/sanitized; the installed ones stay as they are. A report of a sanitizer ends the process.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import nanobind

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "sanitized"
NAME = "qlangevin.native._kernels"
VARIABLE = "QLANGEVIN_SANITIZED_TESTS"  # the compiled module, for the child process


def compile_kernels() -> Path:
    """Compile the kernels with the option QL_SANITIZE; return the path of the module."""
    options = {
        "QL_SANITIZE": "ON",
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.cmake_dir(),
    }
    defined = [f"-D{name}={value}" for name, value in options.items()]
    tools = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    }  # cmake and ninja of this environment
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(FOLDER), "-G", "Ninja", *defined],
        ["cmake", "--build", str(FOLDER)],
    ):
        subprocess.run(command, env=os.environ | tools, check=True)
    [module] = FOLDER.glob("_kernels*.so")
    return module


def library(name: str) -> str:
    found = subprocess.run(["c++", f"-print-file-name={name}"], check=True, capture_output=True, text=True)
    return str(Path(found.stdout.strip()).resolve())


def load_kernels(path: str) -> None:
    """Load the sanitized kernels in place of the installed ones, before qlangevin does."""
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def main(arguments: list[str]) -> int:
    if path := os.environ.pop(VARIABLE, ""):
        load_kernels(path)
        import pytest

        return int(pytest.main(arguments))
    variables = {
        VARIABLE: str(compile_kernels()),
        # Python does not load the second, and without it the first finds no function that throws exceptions.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    command = [sys.executable, "-m", "benchmarks.sanitized_tests", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
