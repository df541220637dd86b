"""``python -m benchmarks.arm64``: compiles the kernels for arm64, and compares what they compute there with this machine.

It needs Debian's g++-aarch64-linux-gnu, and qemu-user to run what was compiled; without the latter it only compiles. Every
format, rounding and step is computed by the baseline kernels on both processors, and has to agree to the bit.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import nanobind
import torch

import qlangevin as ql

SOURCES = Path(__file__).parent.parent / "src" / "qlangevin" / "native"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
]  # of CMakeLists.txt
FORMATS = (
    "fp32",
    "fixed8.3",
    "fixed4.1",
    "bfp8",
    "bfp4",
    "bfp8/32",
    "bfp8/tensor",
    "bfp12",
    "bfp8@bf16",
    "bfp8@fp16",
    "e4m3",
    "fp8_e5m2",
    "bf16",
)
SHAPE = torch.Size((12, 67))


def grids() -> str:
    """Return the grids as kernel_digests.cpp reads them."""
    lines = []
    for name in FORMATS:
        format = ql.parse(name)
        packed = ql.encode(torch.zeros(SHAPE), format)
        code_bytes = 0 if name == "fp32" else packed.unpacked().itemsize
        exponents = 0 if packed.exponents is None else packed.exponents.numel()
        grid = format.kernel_grid(SHAPE)
        fields = [int(grid.kind), *map(repr, grid[1:]), SHAPE.numel(), code_bytes, exponents]
        lines.append(" ".join(map(str, [name, *fields])))
    return "\n".join(lines) + "\n"


def compile_module(folder: Path) -> None:
    """Compile the Python module for arm64, without linking it: there is no Python for arm64 to link with."""
    root = Path(nanobind.include_dir())
    include = [root, root.parent / "ext" / "robin_map" / "include", sysconfig.get_paths()["include"]]
    options = [*FLAGS, *(f"-I{path}" for path in include)]
    run(COMPILER, *options, "-c", SOURCES / "module.cpp", "-o", folder / "module.o")


def digests(compiler: str, folder: Path, launcher: list[str]) -> list[str]:
    """Return the digests that the kernels print on one processor; none if there is nothing to launch them with."""
    program = folder / f"digests-{compiler}"
    sources = [SOURCES / "kernels.cpp", Path(__file__).parent / "kernel_digests.cpp"]
    run(compiler, *FLAGS, "-static", "-DQL_LEVEL=baseline", f"-I{SOURCES}", *sources, "-o", program)
    if launcher and not shutil.which(launcher[0]):
        return []
    return run(*launcher, program, input=grids()).splitlines()


def run(*command: str | Path, input: str | None = None) -> str:
    return subprocess.run(list(map(str, command)), input=input, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compile_module(folder)
        there = digests(COMPILER, folder, [EMULATOR])
        if not there:
            print(f"the kernels compile for arm64; they were not run, which needs {EMULATOR} (Debian: qemu-user)")
            return 0
        here = digests("g++", folder, [])
    different = [f"{a} here, {b} on arm64" for a, b in zip(here, there, strict=True) if a != b]
    print(*different, sep="\n")
    print(f"{len(here) - len(different)} of {len(here)} digests agree between {platform.machine()} and arm64")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
