"""Estimate the time of a kernel on a GPU from published figures: the larger of what its bytes and its instructions take.

    bytes          N · bytes an element / bandwidth
    instructions   N · the largest of: instructions an element / those issued a second; those of a unit / its lanes a second

Nothing is measured here. Left out: starting the kernel (a few microseconds), caches, waiting for memory that too few warps hide,
clocks below the published ones. So these are bounds from below, which well-made kernels come near for large N.

Published figures, and where:

- NVIDIA A100 80 GB SXM (data sheet, white paper on Ampere): 108 multiprocessors, 1.41 GHz boost, 2039 GB/s.
- NVIDIA H100 SXM (data sheet, white paper on Hopper): 132 multiprocessors, 1.98 GHz boost, 3350 GB/s.
- A multiprocessor of both issues four warp instructions a clock, 128 lanes. Lanes of each unit are from the table of throughputs
  in the CUDA C++ Programming Guide: 32-bit float additions and products 64 (compute capability 8.0) or 128 (9.0), 32-bit
  integers 64, special functions 16; loads and stores 32.
- AMD MI300X (data sheet, white paper on CDNA 3): 304 compute units, 2.1 GHz, 5300 GB/s. Four vector units of 16 lanes are 64
  lanes a clock; the published 163 TFLOP/s need packed or dual instructions, which are not counted on here. Special functions and
  32-bit integer products take four times as long. Scalar instructions and memory are issued beside.
- Caches that all units share (the same papers): 40 MB, 50 MB, 256 MB (AMD's Infinity Cache). Registers of a multiprocessor:
  65536 of four bytes, for at most 64 warps; of AMD's, 512 for each lane of four vector units, for at most 8 waves of 64 lanes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .machine_code import bytes_accessed, read_amd, read_sass
from .paths import common_path

if TYPE_CHECKING:  # needs triton
    from .compiling import Code, Specialisation

__all__ = ["GPUS", "Cost", "Gpu", "cost_of", "estimate_seconds", "fits_in_cache", "limit_of", "together"]


@dataclass(frozen=True)
class Gpu:
    """Published figures of a GPU."""

    target: str
    units: int
    clock: float  # Hz
    bandwidth: float  # bytes a second
    issued: int  # lanes a unit issues a clock
    lanes: Mapping[str, int]  # of each kind of unit; those not named here take a slot to issue and no more
    cache: float  # bytes that all units share

    def programs(self, registers: int, warps: int) -> int:
        """Return how many programs are in work at a time."""
        if self.target.startswith("gfx"):
            return self.units * 4 * min(8, 512 // registers) // warps
        return self.units * min(65536 // (-(-registers // 8) * 8 * 32), 64) // warps


GPUS = {
    "A100": Gpu("sm_80", 108, 1.41e9, 2.039e12, 128, {"float": 64, "integer": 64, "special": 16, "memory": 32}, 40e6),
    "H100": Gpu("sm_90", 132, 1.98e9, 3.35e12, 128, {"float": 128, "integer": 64, "special": 16, "memory": 32}, 50e6),
    "MI300X": Gpu("gfx942", 304, 2.1e9, 5.3e12, 64, {}, 256e6),
}
WRITES = re.compile(r"STG|RED|ATOMG|(global|buffer|flat)_(store|atomic)")
# On AMD all vector instructions share the lanes, and some take them for four clocks.
AMD_CLOCKS = {"special": 4, "product": 4, "control": 0, "memory": 0}


@dataclass(frozen=True)
class Cost:
    """Work of a kernel for each element: instructions of a lane, by unit, and bytes that have to be moved.

    ``accessed`` are the bytes that its loads and stores name: more, if lanes load the same ones, an exponent of a block, say.
    """

    units: Mapping[str, float]
    bytes: float
    accessed: float

    @property
    def instructions(self) -> float:
        return sum(self.units.values())


def cost_of(specialisation: Specialisation, code: Code) -> Cost:
    """Return instructions and bytes an element of a kernel."""
    amd = code.target.startswith("gfx")
    path = common_path(*(read_amd(code.assembly) if amd else read_sass(code.disassembly)))
    lanes = code.threads / specialisation.elements_per_program  # of an element
    executed = list(path.executed(specialisation.passes))
    if not any(WRITES.match(i.text) for i in executed):
        raise ValueError(
            f"the path through {specialisation.name} on {code.target} writes nothing, so it is not the usual one"
        )
    units = {unit: count * lanes for unit, count in Counter(i.unit for i in executed).items()}
    return Cost(units, specialisation.bytes_per_element, lanes * sum(map(bytes_accessed, executed)))


def together(costs: Sequence[Cost], least_bytes: float) -> Cost:
    """Return the cost of several launches one after the other, which have to move so many bytes an element."""
    units: Counter[str] = Counter()
    for cost in costs:
        units.update(cost.units)
    return Cost(dict(units), least_bytes, sum(cost.accessed for cost in costs))


def estimate_seconds(cost: Cost, gpu: Gpu, elements: float) -> float:
    """Return the larger of the seconds that the bytes and the instructions of so many elements take."""
    return elements * max(cost.bytes / gpu.bandwidth, clocks_of(cost, gpu) / (gpu.units * gpu.clock))


def fits_in_cache(gpu: Gpu, block: float, registers: int, warps: int) -> bool:
    """Return True if a program that reads a block of so many bytes twice finds it in the cache the second time."""
    return gpu.programs(registers, warps) * block <= gpu.cache


def clocks_of(cost: Cost, gpu: Gpu) -> float:
    """Return the clocks of one unit that an element takes."""
    if gpu.target.startswith("gfx"):
        return sum(count * AMD_CLOCKS.get(unit, 1) for unit, count in cost.units.items()) / gpu.issued
    return max(cost.instructions / gpu.issued, *(cost.units.get(unit, 0) / n for unit, n in gpu.lanes.items()))


def limit_of(cost: Cost, gpu: Gpu) -> str:
    """Return what takes the time: ``"memory"`` or ``"instructions"``."""
    moving = cost.bytes / gpu.bandwidth
    return "memory" if moving >= clocks_of(cost, gpu) / (gpu.units * gpu.clock) else "instructions"
