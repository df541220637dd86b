"""Compile Triton kernels for GPUs that are not there, as a launch would on them.

A launch specialises a kernel: pointers that are multiples of 16 are marked, constants are inlined. `compile_for` does the same
from a `Specialisation`, so what it returns is the code that a launch would run. FP fusion is off: a product and a sum must be
rounded one after the other, or the bits differ from those of the PyTorch path.

The interpreter and the compiler exclude each other: ``TRITON_INTERPRET`` must not be set when triton is imported.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["TARGETS", "Code", "Resources", "Specialisation", "compile_for"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_90": GPUTarget("cuda", 90, 32),  # H100
    "sm_100": GPUTarget("cuda", 100, 32),  # B200
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300X
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Specialisation(Protocol):
    """A kernel with the types of its arguments and the values of its constants.

    It may also have ``attrs``, what is known of arguments by their place, as Triton takes it, and ``most_registers`` of a thread
    on NVIDIA's GPUs.
    """

    @property
    def name(self) -> str: ...
    @property
    def kernel(self) -> Any:
        """The function that `triton.jit` returned."""

    @property
    def signature(self) -> Mapping[str, Any]:
        """Type of each argument by name: ``"*fp32"``, ``"i32"``, ``"constexpr"``, or a tuple of such."""

    @property
    def constexprs(self) -> Mapping[str, Any]: ...
    @property
    def num_warps(self) -> int: ...
    @property
    def elements_per_program(self) -> int:
        """Elements that a program handles."""

    @property
    def passes(self) -> int:
        """The number of times that each of its loops runs for them."""

    @property
    def bytes_per_element(self) -> float:
        """Bytes read and written for each element."""


@dataclass(frozen=True)
class Resources:
    """Resources of a multiprocessor that a thread needs."""

    registers: int
    stack: int
    spills: int  # bytes of local memory; on AMD, registers


@dataclass(frozen=True)
class Code:
    """Machine code of one kernel: assembly (PTX or AMD's), and for NVIDIA the binary."""

    target: str
    threads: int  # of a program
    assembly: str
    binary: bytes

    @cached_property
    def disassembly(self) -> str:
        """SASS with source lines, functions inlined; of NVIDIA's only."""
        return _run_tool("nvdisasm", self.binary, "-c", "-gi")

    @cached_property
    def resources(self) -> Resources:
        if self.target.startswith("gfx"):
            return _amd_resources(self.assembly)
        report = _run_tool("cuobjdump", self.binary, "-res-usage")
        used = dict(item.split(":") for line in report.splitlines() if " REG:" in line for item in line.split())
        return Resources(int(used["REG"]), int(used["STACK"]), int(used["LOCAL"]))


def compile_for(specialisation: Specialisation, target: str) -> Code:
    """Compile a kernel for one of `TARGETS`."""
    gpu = TARGETS[target]
    types, known = dict(specialisation.signature), getattr(specialisation, "attrs", None)
    if known is None:  # a launch finds torch's memory aligned; of integers it knows nothing in advance
        known = {place: [["tt.divisibility", 16]] for place in _pointers(tuple(types.values()))}
    source = ASTSource(specialisation.kernel, types, dict(specialisation.constexprs), attrs=known)
    options = {"enable_fp_fusion": False, "num_warps": specialisation.num_warps}
    most = getattr(specialisation, "most_registers", None)
    if most is not None and gpu.backend == "cuda":
        options["maxnreg"] = most
    compiled = triton.compile(source, target=gpu, options=options)
    assembly, binary = ("amdgcn", "hsaco") if gpu.backend == "hip" else ("ptx", "cubin")
    threads = specialisation.num_warps * gpu.warp_size
    return Code(target, threads, compiled.asm[assembly], compiled.asm[binary])


def _pointers(types: tuple[Any, ...], *outside: int) -> Iterator[tuple[int, ...]]:
    """Yield the places of pointers among types of arguments, which may be tuples of types."""
    for place, type_ in enumerate(types):
        if isinstance(type_, tuple):
            yield from _pointers(type_, *outside, place)
        elif type_.startswith("*"):
            yield (*outside, place)


def _run_tool(name: str, binary: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(TOOLS / name), *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _amd_resources(assembly: str) -> Resources:
    found = dict(line.split(":") for line in assembly.splitlines() if line.startswith("    .") and line.count(":") == 1)
    values = {name.strip(): value.strip() for name, value in found.items()}
    spills = int(values[".vgpr_spill_count"]) + int(values[".sgpr_spill_count"])
    return Resources(int(values[".vgpr_count"]), int(values[".private_segment_fixed_size"]), spills)
