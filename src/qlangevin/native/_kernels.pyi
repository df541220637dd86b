"""The compiled module: tensors come as addresses, 0 for none. `native/__init__.py` is its only caller."""

PURPOSES: dict[str, int]
ROUNDINGS: dict[str, int]
GRID_KINDS: dict[str, int]

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
        theta: int,
        codes: int,
        exponents: int,
        code_bytes: int,
        accumulator: int,
        gradient: int,
        numel: int,
        weights: Grid,
        gradients: Grid,
        accumulators: Grid,
        seed: int,
        stream: int,
        step: int,
    ) -> None: ...

def levels() -> list[str]: ...
def level() -> str: ...
def use_level(name: str, /) -> None: ...
def quantize(
    *,
    x: int,
    out: int,
    numel: int,
    grid: Grid,
    rounding: int,
    seed: int,
    stream: int,
    step: int,
    purpose: int,
    variance: float = 0.0,
    variances: int = 0,
    positive: int = 0,
    move: int = 0,
    codes: int = 0,
    exponents: int = 0,
    code_bytes: int = 0,
    threads: int,
) -> bool: ...
def sgld(
    steps: list[Step], *, rounding: int, lr: float, weight_decay: float, variance: float, maximize: bool, threads: int
) -> None: ...
def encode(
    *, values: int, codes: int, exponents: int, code_bytes: int, numel: int, grid: Grid, threads: int
) -> None: ...
def decode(
    *, values: int, codes: int, exponents: int, code_bytes: int, numel: int, grid: Grid, threads: int
) -> None: ...
def relu_with_codes(
    *, x: int, out: int, codes: int, exponents: int, code_bytes: int, numel: int, grid: Grid, threads: int
) -> bool: ...
def encode_exactly(
    *, values: int, codes: int, exponents: int, code_bytes: int, numel: int, grid: Grid, threads: int
) -> bool: ...
def draw(
    *, out: int, numel: int, normal: bool, seed: int, stream: int, step: int, purpose: int, threads: int
) -> None: ...
def first_not_finite(addresses: list[int], numels: list[int], threads: int, /) -> int: ...
