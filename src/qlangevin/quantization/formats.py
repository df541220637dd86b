"""What a number can be: fixed point, block floating point, floating point.

A format is a value: frozen, hashable, printable, and ``parse(str(f)) == f``. It knows its grid, that is
the gap Δ between neighbouring numbers at a given place, the range ``low .. high``, and how many bits a number
takes in storage. How to get *onto* the grid is the business of `rounding`.

All grids are subsets of float32, so a number on a grid can be held exactly by any path of the library.
"""

from __future__ import annotations

import math
import numbers
import re
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

__all__ = ["BF16", "FP8_E4M3", "FP8_E5M2", "FP16", "FP32", "BlockFloat", "FixedPoint", "Float", "Format", "parse"]

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_MIN_EXPONENT = -149  # 2^-149 is the least positive float32


def _integer(format: object, name: str, low: int, high: int) -> None:
    """Refuse a field that is not an integer in ``low .. high``; make one of NumPy's a plain one."""
    value = getattr(format, name)
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an integer between {low} and {high}, got {value!r}")
    object.__setattr__(format, name, int(value))


def binade(x: Tensor) -> Tensor:
    """E = floor(log2 |x|), exactly, as int32; very negative at zero, 127 at infinity."""
    exponent = torch.frexp(x.abs().clamp_max(FLOAT32_MAX)).exponent - 1
    return torch.where(x == 0, -1000, exponent)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exactly, subnormal numbers included."""
    half = torch.div(exponent, 2, rounding_mode="floor")  # 2^-149 in one factor would pass through 2^149
    one = torch.ones_like(exponent, dtype=dtype)
    return torch.ldexp(one, half) * torch.ldexp(one, exponent - half)


@dataclass(frozen=True)
class FixedPoint:
    """W-bit two's complement integers times Δ = 2^-F: the paper's fixed point, low = -2^(W-1) Δ, high = (2^(W-1) - 1) Δ."""

    bits: int
    frac: int

    def __post_init__(self) -> None:
        _integer(self, "bits", 2, 25)  # 25: every code is an integer float32 holds exactly
        _integer(self, "frac", self.bits - 1 - 127, 126)

    def __str__(self) -> str:
        return f"fixed{self.bits}.{self.frac}"

    @property
    def step(self) -> float:
        """Δ, the same everywhere."""
        return 2.0**-self.frac

    @property
    def min_gap_exponent(self) -> int:
        return -self.frac

    @property
    def low(self) -> float:
        return -(2.0 ** (self.bits - 1)) * self.step

    @property
    def high(self) -> float:
        return (2.0 ** (self.bits - 1) - 1) * self.step

    @property
    def storage_bits(self) -> int:
        return _storage_bits(self.bits)

    def gap(self, x: Tensor) -> Tensor:
        """Δ at each element of x."""
        return torch.full_like(x, self.step)

    def is_representable(self, x: Tensor) -> Tensor:
        """Which elements of x lie on the grid and in range."""
        return _on_grid(x, self.gap(x)) & (x >= self.low) & (x <= self.high)


@dataclass(frozen=True)
class BlockFloat:
    """W-bit signed integers times a power of two shared by a block: Δ = 2^(E - W + 2), E = floor(log2 max|block|).

    E is clipped to the range of an ``exp_bits``-bit integer, -2^(F-1) .. 2^(F-1) - 1. ``block`` says who shares:
    ``"tensor"`` everybody (the paper's big block), ``"row"`` a slice along dim 0 (its small block; a tensor with
    fewer than two dimensions is one block), an integer g groups of g along the last dim (the last group may be shorter).

    Codes are symmetric, -N .. N with N = 2^(W-1) - 1, as in the reference implementation. The code -2^(W-1) is not
    used: with it -2^(E+1) could be written with the exponent E and with E + 1, and quantizing would not be idempotent.
    """

    bits: int
    block: Literal["row", "tensor"] | int = "row"
    exp_bits: int = 8

    def __post_init__(self) -> None:
        _integer(self, "bits", 2, 24)
        _integer(self, "exp_bits", 1, 8)
        if isinstance(self.block, numbers.Integral):
            _integer(self, "block", 1, 2**31 - 1)
        elif self.block not in ("row", "tensor"):
            raise ValueError(f"block must be 'row', 'tensor' or a group size, got {self.block!r}")
        if self.min_gap_exponent < FLOAT32_MIN_EXPONENT:
            raise ValueError(
                f"bits={self.bits} with exp_bits={self.exp_bits} needs numbers down to 2^{self.min_gap_exponent}, below "
                f"float32; use at most {self.bits - (FLOAT32_MIN_EXPONENT - self.min_gap_exponent)} bits or fewer exp_bits"
            )

    def __str__(self) -> str:
        exponent = "" if self.exp_bits == 8 else f"e{self.exp_bits}"
        return f"bfp{self.bits}{exponent}" + ("" if self.block == "row" else f"/{self.block}")

    @property
    def top(self) -> int:
        """N, the largest code."""
        return (1 << (self.bits - 1)) - 1

    @property
    def min_gap_exponent(self) -> int:
        return -(1 << (self.exp_bits - 1)) - self.bits + 2

    @property
    def max_gap_exponent(self) -> int:
        return (1 << (self.exp_bits - 1)) - 1 - self.bits + 2

    @property
    def low(self) -> float:
        return -self.high

    @property
    def high(self) -> float:
        return float(self.top) * 2.0**self.max_gap_exponent

    @property
    def storage_bits(self) -> int:
        return _storage_bits(self.bits)

    def layout(self, shape: torch.Size) -> tuple[int, int]:
        """(line, size): the elements of a tensor, in order, are lines cut into blocks of this size, the last shorter."""
        if isinstance(self.block, int) and len(shape):
            line = max(shape[-1], 1)
            return (self.block, self.block) if line % self.block == 0 else (line, min(self.block, line))
        rows = shape[0] if self.block == "row" and len(shape) > 1 else 1
        line = max(shape.numel() // max(rows, 1), 1)
        return line, line

    def block_count(self, shape: torch.Size) -> int:
        line, size = self.layout(shape)
        return shape.numel() // line * -(-line // size)

    def blocks(self, x: Tensor) -> Tensor:
        """x as a matrix with one block a row; short blocks are filled up with zeros."""
        line, size = self.layout(x.shape)
        lines = x.reshape(-1, line)
        return torch.nn.functional.pad(lines, (0, -line % size)).view(-1, size)

    def unblocks(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `blocks` for a tensor of the given shape."""
        line, size = self.layout(shape)
        return rows.reshape(-1, -(-line // size) * size)[:, :line].reshape(shape)

    def gap_exponent(self, rows: Tensor) -> Tensor:
        """log2 Δ of each block of `blocks(x)`, as an int32 column."""
        exponent = binade(rows.abs().amax(1, keepdim=True)) - self.bits + 2
        return exponent.clamp(self.min_gap_exponent, self.max_gap_exponent)

    def gap(self, x: Tensor) -> Tensor:
        """Δ at each element of x: that of its block; NaN in a block that holds a NaN."""
        rows = self.blocks(x)
        gap = power_of_two(self.gap_exponent(rows), x.dtype)
        gap = torch.where(rows.isnan().any(1, keepdim=True), torch.nan, gap)
        return self.unblocks(gap.expand_as(rows), x.shape)

    def is_representable(self, x: Tensor) -> Tensor:
        """Which elements of x lie on the grid its block's largest element sets."""
        gap = self.gap(x)
        return _on_grid(x, gap) & (x.abs() <= self.top * gap)


@dataclass(frozen=True)
class Float:
    """Floating point with gradual underflow: Δ = 2^(E - man), E = clip(floor(log2 |x|), emin, emax).

    ``Float(exp, man)`` has the paper's exponent range, emin = -2^(exp-1) and emax = 2^(exp-1) - 1, spends no code on
    infinity or NaN, and reaches (2 - 2^-man) 2^emax. With the zeroth binade of gradual underflow that is one binade
    more than ``exp`` bits can tell apart: e4m3 has 271 values, one byte has 256 codes, so it is stored in two. The formats
    of hardware, `FP8_E4M3`, `FP8_E5M2`, `FP16`, `BF16` and `FP32`, have torch's value sets and fit their bits.
    """

    exp: int
    man: int
    hardware: str | None = None

    # name -> (exp, man), emin, emax, high, torch dtype
    HARDWARE: ClassVar[dict[str | None, tuple[tuple[int, int], int, int, float, torch.dtype]]] = {
        "fp8_e4m3": ((4, 3), -6, 8, 448.0, torch.float8_e4m3fn),
        "fp8_e5m2": ((5, 2), -14, 15, 57344.0, torch.float8_e5m2),
        "fp16": ((5, 10), -14, 15, 65504.0, torch.float16),
        "bf16": ((8, 7), -126, 127, float(torch.finfo(torch.bfloat16).max), torch.bfloat16),
        "fp32": ((8, 23), -126, 127, float(FLOAT32_MAX), torch.float32),
    }

    def __post_init__(self) -> None:
        _integer(self, "exp", 1, 8)
        _integer(self, "man", 1 if self.exp == 8 else 0, 23)
        known = self.HARDWARE.get(self.hardware)
        if self.hardware is not None and (known is None or known[0] != (self.exp, self.man)):
            raise ValueError(
                f"hardware formats have names, parse('fp8_e4m3') say; got {self.hardware!r} with other bits"
            )
        if self.min_gap_exponent < FLOAT32_MIN_EXPONENT:
            raise ValueError(
                f"exp={self.exp} with man={self.man} needs numbers down to 2^{self.min_gap_exponent}, below float32; "
                f"use man <= {self.man - (FLOAT32_MIN_EXPONENT - self.min_gap_exponent)} or fewer exponent bits"
            )

    def __str__(self) -> str:
        return self.hardware or f"e{self.exp}m{self.man}"

    @property
    def emin(self) -> int:
        return self.HARDWARE[self.hardware][1] if self.hardware else -(1 << (self.exp - 1))

    @property
    def emax(self) -> int:
        return self.HARDWARE[self.hardware][2] if self.hardware else (1 << (self.exp - 1)) - 1

    @property
    def min_gap_exponent(self) -> int:
        return self.emin - self.man

    @property
    def max_gap_exponent(self) -> int:
        return self.emax - self.man

    @property
    def top(self) -> int:
        """A binade ends at top times its gap."""
        return 1 << (self.man + 1)

    @property
    def low(self) -> float:
        return -self.high

    @property
    def high(self) -> float:
        return self.HARDWARE[self.hardware][3] if self.hardware else (2 - 2.0**-self.man) * 2.0**self.emax

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype with this value set, if there is one."""
        return self.HARDWARE[self.hardware][4] if self.hardware else None

    @property
    def storage_bits(self) -> int:
        # sign, and (emax - emin + 2) binades of 2^man codes each, the lowest that of gradual underflow
        codes = 2 * (self.emax - self.emin + 2) * 2**self.man
        return self.dtype.itemsize * 8 if self.dtype else _storage_bits(max((codes - 1).bit_length(), 8))

    def gap_exponent(self, x: Tensor) -> Tensor:
        """log2 Δ at each element of x, as int32."""
        return (binade(x) - self.man).clamp(self.min_gap_exponent, self.max_gap_exponent)

    def gap(self, x: Tensor) -> Tensor:
        """Δ at each element of x."""
        return power_of_two(self.gap_exponent(x), x.dtype)

    def is_representable(self, x: Tensor) -> Tensor:
        """Which elements of x lie on the grid and in range."""
        return _on_grid(x, self.gap(x)) & (x >= self.low) & (x <= self.high)


FP8_E4M3 = Float(4, 3, "fp8_e4m3")
FP8_E5M2 = Float(5, 2, "fp8_e5m2")
FP16 = Float(5, 10, "fp16")
BF16 = Float(8, 7, "bf16")
FP32 = Float(8, 23, "fp32")

Format: TypeAlias = FixedPoint | BlockFloat | Float

_BY_NAME = {str(f): f for f in (FP8_E4M3, FP8_E5M2, FP16, BF16, FP32)}
_PATTERNS = (
    (re.compile(r"fixed(\d+)\.(-?\d+)"), lambda m: FixedPoint(int(m[1]), int(m[2]))),
    (
        re.compile(r"bfp(\d+)(?:e(\d+))?(?:/(row|tensor|\d+))?"),
        lambda m: BlockFloat(int(m[1]), int(m[3]) if (m[3] or "row").isdigit() else m[3] or "row", int(m[2] or 8)),
    ),
    (re.compile(r"e(\d+)m(\d+)"), lambda m: Float(int(m[1]), int(m[2]))),
)


def parse(name: str | Format) -> Format:
    """The format a name stands for, such as ``"fixed8.3"``, ``"bfp8"``, ``"bfp8/32"``, ``"e4m3"`` or ``"fp8_e4m3"``."""
    if isinstance(name, (FixedPoint, BlockFloat, Float)):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"a format is a FixedPoint, BlockFloat, Float or a name such as 'bfp8', got {type(name).__name__}"
        )
    if name in _BY_NAME:
        return _BY_NAME[name]
    for pattern, build in _PATTERNS:
        if match := pattern.fullmatch(name):
            return build(match)
    raise ValueError(
        f"unknown format {name!r}; a format is written like fixed8.3 (8 bits, 3 of them fractional), bfp8, bfp8/tensor, "
        f"bfp8/32 (block floating point), e4m3 (floating point), or is one of {', '.join(_BY_NAME)}"
    )


def check_holds(dtype: torch.dtype, format: Format) -> None:
    """Refuse a dtype that cannot hold every number of the format exactly."""
    if not dtype.is_floating_point:
        raise TypeError(f"expected a real floating-point tensor, got {dtype}; convert it with .float() first")
    info = torch.finfo(dtype)
    digits = 1 - round(math.log2(info.eps))
    least = round(math.log2(info.smallest_normal)) - digits + 1
    needs = format.man + 1 if isinstance(format, Float) else format.bits - 1
    if needs > digits or format.min_gap_exponent < least or format.high > info.max:
        narrower = "fewer exponent bits (bfp8e7, say)" if isinstance(format, BlockFloat) else "a narrower format"
        raise ValueError(
            f"{dtype} cannot hold every number of {format}: it has {digits} binary digits and goes from 2^{least} to "
            f"{info.max:.4g}, the format needs {needs}, from 2^{format.min_gap_exponent} to {format.high:.4g}; "
            f"use float32 tensors or {narrower}"
        )


def _storage_bits(bits: int) -> int:
    """Two codes a byte up to 4 bits, then whole bytes: int8, int16, int32."""
    return next(size for size in (4, 8, 16, 32) if bits <= size)


def _on_grid(x: Tensor, gap: Tensor) -> Tensor:
    """Which elements of x are finite multiples of gap."""
    multiple = x / gap
    return x.isfinite() & (multiple == multiple.trunc()) & (multiple * gap == x)  # a tiny x over a large gap is no zero
