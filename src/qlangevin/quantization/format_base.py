"""The interface of number formats, and the exact arithmetic of powers of two that they share.

All grids are subsets of float32, so a number on a grid can be held exactly by any path of the library.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .laws import FAR, Law, Mean

__all__ = ["Draws", "DtypeLimits", "Format", "GridKind", "KernelGrid", "binade", "ceil_log2", "power_of_two"]

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_MIN_EXPONENT = -149  # 2^-149 is the least positive float32
CODE_DTYPES = {4: torch.int8, 8: torch.int8, 16: torch.int16, 32: torch.int32}  # by storage bits


class GridKind(IntEnum):
    """Families of grids that kernels tell apart; NONE leaves numbers as they are."""

    NONE, FIXED, BLOCK, FLOAT = range(4)


class KernelGrid(NamedTuple):
    """All that a kernel needs to know of a format for tensors of one shape."""

    kind: GridKind = GridKind.NONE
    shift: int = 0  # log2 Δ is the binade minus this
    min_gap: int = 0  # least log2 Δ
    max_gap: int = 0  # greatest log2 Δ
    top: float = 0.0  # largest code of a block; where a binade of floats ends, in gaps
    low: float = 0.0
    high: float = 0.0
    line: int = 1  # the elements of a tensor, in order, are lines of this length, ...
    size: int = 1  # ... each cut into blocks of this size, the last shorter


class DtypeLimits(NamedTuple):
    """Numbers that a floating dtype holds: up to ``digits`` binary digits, multiples of 2^least up to ``most``."""

    digits: int
    least: int
    most: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> DtypeLimits:
        """Return the limits of a dtype."""
        info = torch.finfo(dtype)
        digits = 1 - round(math.log2(info.eps))
        return cls(digits, round(math.log2(info.smallest_normal)) - digits + 1, info.max)


class Draws(NamedTuple):
    """Random numbers of a draw, like its tensor: h centered uniform, ξ normal; ``coins`` makes more h, which blocks may need."""

    h: Tensor
    xi: Tensor
    coins: Callable[[], Tensor]


class Format(ABC):
    """A set of numbers that tensors are rounded to. A format is a value: frozen, hashable, and ``parse(str(f)) == f``.

    A new format is one frozen dataclass derived from this class and listed in `formats.FORMATS`, plus its kernels. It defines

        from_name, __str__                      its name
        low, high, min_gap_exponent, digits     range and resolution of its numbers, all of them float32
        storage_bits                            bits of a code: 4, 8, 16 or 32
        gap                                     Δ at each element of a tensor
        law, or draw and drawn_gap              Q^vc, element by element or with elements that depend on one another
        encode, decode, are_codes               numbers on the grid as integers
        kernel_grid                             the description its kernels read

    and overrides what does not fit: `is_representable` and `largest_multiple` if codes are bounded more tightly than by
    ``low .. high``, `step` if Δ is constant, `value_count` and `values` if elements stand alone, `within` if its range can be
    clipped. If blocks of elements share an exponent: `has_exponents`, `block_count`, `group_size`, `keeps_blocks`,
    `cuts_blocks` and `stacked`.
    """

    narrower: ClassVar[str] = "a narrower format"  # a remedy where a dtype cannot hold all numbers of the format
    has_exponents: ClassVar[bool] = False  # True if codes come with exponents, one for each block

    def __setstate__(self, state: Any) -> None:
        """Take the fields that a file holds, checked as the constructor checks them."""
        self.__init__(**state)  # type: ignore[misc]

    @classmethod
    @abstractmethod
    def from_name(cls, name: str) -> Format | None:
        """Return the format that a name stands for; None if the name is not of this kind."""

    @property
    @abstractmethod
    def low(self) -> float:
        """The least number."""

    @property
    @abstractmethod
    def high(self) -> float:
        """The greatest number."""

    @property
    @abstractmethod
    def min_gap_exponent(self) -> int:
        """log2 of the least Δ."""

    @property
    @abstractmethod
    def digits(self) -> int:
        """Binary digits that a number takes, without its sign."""

    @property
    @abstractmethod
    def storage_bits(self) -> int:
        """Bits that a code takes in storage: 4, 8, 16 or 32."""

    @property
    def code_dtype(self) -> torch.dtype:
        """The integers that hold one code each; in storage two 4-bit codes share a byte."""
        return CODE_DTYPES[self.storage_bits]

    # ---- the grid

    def within(self, limits: DtypeLimits) -> Format:
        """Return the format, or if it allows that, the same clipped to the range of numbers that a dtype holds."""
        return self

    @property
    def step(self) -> float | None:
        """Δ if it is the same everywhere, else None."""
        return None

    @property
    def largest_multiple(self) -> float:
        """The largest |number| in units of its own gap, if that is less than the range allows."""
        return FAR

    @abstractmethod
    def gap(self, x: Tensor) -> Tensor:
        """Return Δ at each element of x."""

    def is_representable(self, x: Tensor) -> Tensor:
        """Return a mask: True where an element of x lies on the grid and in range."""
        return on_grid(x, self.gap(x)) & (x >= self.low) & (x <= self.high)

    @property
    def value_count(self) -> int | None:
        """The number of its numbers, up to a few; None if that depends on other elements."""
        return None

    def values(self) -> Tensor:
        """Return all numbers of the format in increasing order, as float64."""
        raise NotImplementedError(f"the numbers of {self} depend on other elements")

    @abstractmethod
    def kernel_grid(self, shape: torch.Size) -> KernelGrid:
        """Return what kernels need to know of the grid of a tensor."""

    # ---- rounding

    def law(self, mu: Mean, v: Tensor) -> Law:
        """Return the law of Q^vc(μ, v); the distance of its outcomes is settled before the noise is drawn."""
        raise NotImplementedError(f"an element of {self} has no law of its own: it depends on the others of its block")

    def draw(self, mu: Mean, v: Tensor, draws: Draws) -> Tensor:
        """Return Q^vc(μ, v), not yet clipped; v is a scalar or like μ."""
        return self.law(mu, v).draw(draws.h, draws.xi)

    def drawn_gap(self, mu: Mean, v: Tensor) -> Tensor:
        """Return Δ of the grid that Q^vc(μ, v) is drawn on at each element; noise can make it coarser than Δ(μ)."""
        return self.law(mu, v).gap.expand_as(mu.start)

    # ---- codes

    @abstractmethod
    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return (codes, exponents) of float32 numbers on the grid; exponents are empty if `has_exponents` is False."""

    @abstractmethod
    def decode(self, codes: Tensor, exponents: Tensor | None) -> Tensor:
        """Return the float32 numbers that codes stand for."""

    @abstractmethod
    def are_codes(self, codes: Tensor, exponents: Tensor | None) -> bool:
        """Return True if every code is one that `encode` makes; some bit patterns stand for no number."""

    # ---- blocks

    @property
    def group_size(self) -> int | None:
        """The number of consecutive elements that must stay together; None if that depends on the shape."""
        return 1

    def block_count(self, shape: torch.Size) -> int:
        """Return the number of exponents of a tensor."""
        return 0

    def keeps_blocks(self, order: Sequence[int]) -> bool:
        """Return True if blocks stay the same when the dims of a tensor are permuted like this."""
        return True

    def cuts_blocks(self, shape: torch.Size, dims: Iterable[int | None]) -> bool:
        """Return True if cutting a tensor along these dims can cut through a block; None is a dim that is not known."""
        return False

    def stacked(self, shape: torch.Size) -> tuple[Format, torch.Size]:
        """Return the format and the shape in which tensors stacked along dim 0 are each rounded as if they were alone."""
        return self, shape


def binade(x: Tensor) -> Tensor:
    """Return E = floor(log2 |x|), exactly, as int32; very negative at zero, 127 at infinity."""
    exponent = torch.frexp(x.abs().clamp_max(FLOAT32_MAX)).exponent - 1
    return torch.where(x == 0, -1000, exponent)


def ceil_log2(x: Tensor) -> Tensor:
    """Return the least integer e with x <= 2^e; very negative at zero."""
    mantissa, exponent = torch.frexp(x.clamp_max(FLOAT32_MAX))
    return torch.where(x == 0, -1000, exponent - (mantissa == 0.5).to(exponent.dtype))


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^exponent, exactly, subnormal numbers included."""
    half = torch.div(exponent, 2, rounding_mode="floor")  # 2^-149 in one factor would pass through 2^149
    one = torch.ones_like(exponent, dtype=dtype)
    return torch.ldexp(one, half) * torch.ldexp(one, exponent - half)


def on_grid(x: Tensor, gap: Tensor) -> Tensor:
    """Return a mask: True where an element of x is a finite multiple of the gap."""
    multiple = x / gap
    return x.isfinite() & (multiple == multiple.trunc()) & (multiple * gap == x)  # a tiny x over a large gap is no zero


def all_within(t: Tensor, low: int, high: int) -> bool:
    """Return True if all of these integers are in ``low .. high``."""
    if t.numel() == 0:
        return True
    least, most = torch.aminmax(t)
    return bool(least >= low) and bool(most <= high)


@cache
def bits_in_storage(bits: int) -> int:
    """Return the bits a code takes in storage: two codes a byte up to 4 bits, then whole bytes (int8, int16, int32)."""
    return next(size for size in (4, 8, 16, 32) if bits <= size)


def check_field(format: Any, name: str, low: int, high: int) -> None:
    """Raise ValueError if a field is not an integer in ``low .. high``; make one of NumPy's a plain int."""
    value = getattr(format, name)
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an integer between {low} and {high}, got {value!r}")
    object.__setattr__(format, name, int(value))  # formats are frozen
