"""The compiled module: tensors come as memory, (address, bytes), with a type if they are bfloat16 or float16.

`native/__init__.py` is its only caller.
"""

from typing import TypeAlias

from .memory import Memory

Kept: TypeAlias = tuple[Memory | None, Memory | None, Memory | None, int, "Grid"]

PURPOSES: dict[str, int]
ROUNDINGS: dict[str, int]
GRID_KINDS: dict[str, int]
FLOAT_TYPES: dict[str, int]

class Grid:
    def __init__(
        self,
        *,
        kind: int,
        shift: int,
        min_gap: int,
        max_gap: int,
        top: float,
        low: float,
        high: float,
        line: int,
        size: int,
    ) -> None: ...

class Step:
    def __init__(
        self,
        *,
        theta: Memory | None,
        codes: Memory | None,
        exponents: Memory | None,
        code_bytes: int,
        accumulator: Memory | None,
        gradient: Memory,
        numel: int,
        weights: Grid,
        gradients: Grid,
        accumulators: Grid,
        seed: int,
        stream: int,
        step: int,
    ) -> None: ...
    # What a step keeps beside the weights: numbers or codes, exponents, bytes of a code, and a grid.
    def set_center(self, kept: Kept, *, pull: float) -> None: ...
    def set_mask(self, mask: Memory) -> None: ...
    def set_moments(
        self, kept: Kept, *, decay: float, fresh: float, eps: float, scale: float, unscale: float, frozen: bool
    ) -> None: ...
    def set_velocity(self, kept: Kept, *, seed: int, stream: int, step: int, coefficients: list[float]) -> None: ...

def levels() -> list[str]: ...
def level() -> str: ...
def use_level(name: str, /) -> None: ...
def quantize(
    *,
    x: Memory,
    out: Memory,
    numel: int,
    grid: Grid,
    rounding: int,
    seed: int,
    stream: int,
    step: int,
    purpose: int,
    variance: float = 0.0,
    variances: Memory | None = None,
    positive: Memory | None = None,
    move: Memory | None = None,
    codes: Memory | None = None,
    exponents: Memory | None = None,
    code_bytes: int = 0,
    threads: int,
) -> bool: ...
def sgld(
    steps: list[Step], *, rounding: int, lr: float, weight_decay: float, variance: float, maximize: bool, threads: int
) -> None: ...
def encode(
    *, values: Memory, codes: Memory, exponents: Memory | None, code_bytes: int, numel: int, grid: Grid, threads: int
) -> None: ...
def decode(
    *, values: Memory, codes: Memory, exponents: Memory | None, code_bytes: int, numel: int, grid: Grid, threads: int
) -> None: ...
def relu_with_codes(
    *,
    x: Memory,
    out: Memory,
    codes: Memory,
    exponents: Memory | None,
    code_bytes: int,
    numel: int,
    grid: Grid,
    threads: int,
) -> bool: ...
def encode_exactly(
    *, values: Memory, codes: Memory, exponents: Memory | None, code_bytes: int, numel: int, grid: Grid, threads: int
) -> bool: ...
def draw(
    *, out: Memory, numel: int, normal: bool, seed: int, stream: int, step: int, purpose: int, threads: int
) -> None: ...
def first_not_finite(tensors: list[Memory], threads: int) -> int: ...
