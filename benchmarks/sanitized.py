"""The kernels compiled with AddressSanitizer and UndefinedBehaviorSanitizer, and processes that run with them.

A report of either ends the process. The copy is compiled by itself: the installed kernels stay as they are.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind

NAME = "qlangevin.native._kernels"
VARIABLE = "QLANGEVIN_SANITIZED_KERNELS"  # the compiled module, for the child process
SOURCES = Path(__file__).parent.parent / "src" / "qlangevin" / "native"
SANITIZERS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]
# As CMakeLists.txt has them, with less optimization.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
LEVELS = {
    "baseline": [],
    "avx2": ["-mavx2"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"],
}


def compile_kernels(folder: Path, compiler: str = "g++") -> Path:
    """Compile the sanitized kernels into a folder; return the path of the module."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    root = Path(nanobind.include_dir())
    include = [f"-I{root}", f"-I{root.parent / 'ext' / 'robin_map' / 'include'}", f"-I{sysconfig.get_paths()['include']}"]
    module = [*SANITIZERS, *(["-DQL_X86=1"] if x86 else [])]
    parts = {
        "nanobind": (Path(nanobind.source_dir()) / "nb_combined.cpp", ["-fno-strict-aliasing", "-DNDEBUG"]),
        "module": (SOURCES / "module.cpp", module),
    }
    for level, flags in LEVELS.items() if x86 else [("baseline", LEVELS["baseline"])]:
        parts[level] = (SOURCES / "kernels.cpp", [*SANITIZERS, f"-DQL_LEVEL={level}", *flags])

    def build(part: str) -> str:
        source, flags = parts[part]
        made = str(folder / f"{part}.o")
        subprocess.run([compiler, *FLAGS, *flags, *include, "-c", str(source), "-o", made], check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(build, parts))
    path = folder / "_kernels.so"
    subprocess.run([compiler, "-shared", SANITIZERS[0], *objects, "-pthread", "-ldl", "-o", str(path)], check=True)
    return path


def environment(module: Path, compiler: str = "g++") -> dict[str, str]:
    """Return the environment of a process that is to load the sanitized kernels."""
    library = subprocess.run([compiler, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    return os.environ | {
        VARIABLE: str(module),
        "LD_PRELOAD": str(Path(library.stdout.strip()).resolve()),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:handle_segv=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def load() -> None:
    """Load the sanitized kernels in place of the installed ones, if this process is to have them; before qlangevin's import."""
    if path := os.environ.get(VARIABLE):
        assert NAME not in sys.modules
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
