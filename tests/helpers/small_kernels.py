"""``python -m tests.helpers.small_kernels``: compile small kernels, right and wrong ones, and print what is found, as JSON.

A process of its own, because the interpreter, in which other tests run kernels, takes the compiler's place for good.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl

from benchmarks.gpu.compiling import TARGETS
from benchmarks.gpu_code import inspect


@triton.jit
def multiply_add(x, y, n, FUSED: tl.constexpr, BLOCK: tl.constexpr):
    """y <- x y + 1: in one operation, or in two."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, mask=i < n), tl.load(y + i, mask=i < n)
    tl.store(y + i, tl.fma(a, b, 1.0) if FUSED else a * b + 1.0, mask=i < n)


@triton.jit
def root_of_quotient(x, y, n, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    """y <- sqrt(x / y): correctly rounded, or nearly."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, mask=i < n), tl.load(y + i, mask=i < n)
    result = tl.math.sqrt_rn(tl.math.div_rn(a, b)) if EXACT else tl.sqrt(a / b)
    tl.store(y + i, result, mask=i < n)


@triton.jit
def place_of(x, y, n, BLOCK: tl.constexpr):
    """y <- x at a place that takes a 64-bit division."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i.to(tl.int64) // n, mask=i < n), mask=i < n)


@dataclass(frozen=True)
class Small:
    """A `Specialisation`."""

    name: str
    kernel: Any
    constexprs: dict[str, Any] = field(default_factory=dict)
    integers: str = "i32"
    num_warps: int = 4
    passes: int = 1
    elements_per_program: int = 1024
    bytes_per_element: float = 12.0

    @property
    def signature(self) -> dict[str, str]:
        return {"x": "*fp32", "y": "*fp32", "n": self.integers} | dict.fromkeys(self.constexprs, "constexpr")


SMALL = [
    Small("two operations", multiply_add, {"FUSED": False, "BLOCK": 1024}),
    Small("one operation", multiply_add, {"FUSED": True, "BLOCK": 1024}),
    Small("correctly rounded", root_of_quotient, {"EXACT": True, "BLOCK": 1024}),
    Small("approximate", root_of_quotient, {"EXACT": False, "BLOCK": 1024}),
    Small("64-bit division", place_of, {"BLOCK": 1024}, integers="i64"),
]

if __name__ == "__main__":
    found = {(s.name, target): inspect(s, target) for s in SMALL for target in TARGETS}
    print(json.dumps([[*key, f.problems, f.instructions, f.accessed] for key, f in found.items()]))
