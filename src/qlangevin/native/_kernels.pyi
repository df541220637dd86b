"""The compiled module: tensors come as addresses. `native/__init__.py` is what calls it."""

class Grid:
    def __init__(
        self,
        kind: int,
        shift: int,
        min_gap: int,
        max_gap: int,
        top: float,
        low: float,
        high: float,
        line: int,
        size: int,
        /,
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
    x: int,
    out: int,
    numel: int,
    grid: Grid,
    rounding: int,
    seed: int,
    stream: int,
    step: int,
    purpose: int,
    variance: float,
    variances: int,
    positive: int,
    codes: int,
    exponents: int,
    bytes: int,
    threads: int,
    /,
) -> bool: ...
def sgld(
    steps: list[Step], *, rounding: int, lr: float, weight_decay: float, variance: float, maximize: bool, threads: int
) -> None: ...
def recode(
    values: int, codes: int, exponents: int, bytes: int, numel: int, grid: Grid, encode: bool, threads: int, /
) -> None: ...
def rectify(
    x: int, values: int, codes: int, exponents: int, bytes: int, numel: int, grid: Grid, threads: int, /
) -> bool: ...
def encode_exactly(
    values: int, codes: int, exponents: int, bytes: int, numel: int, grid: Grid, threads: int, /
) -> bool: ...
def draw(
    out: int, numel: int, normal: bool, seed: int, stream: int, step: int, purpose: int, threads: int, /
) -> None: ...
def first_not_finite(addresses: list[int], numels: list[int], threads: int, /) -> int: ...
