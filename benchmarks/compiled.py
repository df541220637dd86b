"""The kernels compiled by hand, apart from the installed ones: with sanitizers, or from another source tree.

A report of AddressSanitizer or UndefinedBehaviorSanitizer ends the process. ``python -m benchmarks.compiled module ...`` runs
another module with the kernels that the environment names.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind

NAME = "qlangevin.native._kernels"
VARIABLE = "QLANGEVIN_COMPILED_KERNELS"  # the compiled module, for the child process
SOURCES = Path(__file__).parent.parent / "src" / "qlangevin" / "native"
SANITIZERS = (
    "-O1", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1",
)  # fmt: skip
# As CMakeLists.txt has them.
FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
LEVELS = {
    "baseline": [],
    "avx2": ["-mavx2"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"],
}


def compile_kernels(
    folder: Path, sources: Path = SOURCES, options: Sequence[str] = SANITIZERS, compiler: str = "g++"
) -> Path:
    """Compile the kernels into a folder, with sanitizers unless there are other options; return the path of the module."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    nano = Path(nanobind.include_dir())
    include = [f"-I{path}" for path in (nano, nano.parent / "ext/robin_map/include", sysconfig.get_paths()["include"])]
    parts: dict[str, tuple[Path, list[str]]] = {
        "nanobind": (Path(nanobind.source_dir()) / "nb_combined.cpp", ["-O2", "-fno-strict-aliasing", "-DNDEBUG"]),
        "module": (sources / "module.cpp", [*options, *(["-DQL_X86=1"] if x86 else [])]),
    }
    for level, flags in LEVELS.items():
        if x86 or level == "baseline":
            parts[level] = (sources / "kernels.cpp", [*options, f"-DQL_LEVEL={level}", *flags])

    def build(part: str) -> str:
        source, flags = parts[part]
        made = str(folder / f"{part}.o")
        subprocess.run([compiler, *FLAGS, *flags, *include, "-c", str(source), "-o", made], check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(build, parts))
    path = folder / "_kernels.so"
    subprocess.run([compiler, "-shared", *options, *objects, "-pthread", "-ldl", "-o", str(path)], check=True)
    return path


def sanitized_environment(module: Path, compiler: str = "g++") -> dict[str, str]:
    """Return the environment of a process that is to load sanitized kernels."""

    def library(name: str) -> str:
        found = subprocess.run([compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True)
        return str(Path(found.stdout.strip()).resolve())

    return os.environ | {
        VARIABLE: str(module),
        # Python does not load the second, and without it the first finds no function that throws exceptions.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:handle_segv=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def load() -> None:
    """Load these kernels in place of the installed ones, if this process is to have them; before qlangevin's import."""
    if path := os.environ.get(VARIABLE):
        assert NAME not in sys.modules
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "__main__":
    load()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
