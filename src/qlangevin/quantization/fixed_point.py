"""Fixed point: integers times one gap, the same everywhere."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from .format_base import Format, GridKind, KernelGrid, all_within, bits_in_storage, check_field
from .laws import Law, Mean

__all__ = ["FixedPoint"]

NAME = re.compile(r"fixed(\d+)\.(-?\d+)")


@dataclass(frozen=True)
class FixedPoint(Format):
    """W-bit two's complement integers times Δ = 2^-F: the paper's fixed point, low = -2^(W-1) Δ, high = (2^(W-1) - 1) Δ.

    The code of a number is the integer value / Δ.
    """

    bits: int
    frac: int

    def __post_init__(self) -> None:
        check_field(self, "bits", 2, 25)  # 25: every code is an integer float32 holds exactly
        check_field(self, "frac", self.bits - 1 - 127, 126)

    @classmethod
    def from_name(cls, name: str) -> FixedPoint | None:
        match = NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None

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
    def digits(self) -> int:
        return self.bits - 1

    @property
    def storage_bits(self) -> int:
        return bits_in_storage(self.bits)

    @property
    def value_count(self) -> int:
        """2^W."""
        return 1 << self.bits

    def gap(self, x: Tensor) -> Tensor:
        return torch.full_like(x, self.step)

    def values(self) -> Tensor:
        half = 1 << (self.bits - 1)
        return torch.arange(-half, half, dtype=torch.float64) * self.step

    def kernel_grid(self, shape: torch.Size) -> KernelGrid:
        exponent = self.min_gap_exponent
        return KernelGrid(GridKind.FIXED, min_gap=exponent, max_gap=exponent, low=self.low, high=self.high)

    def law(self, mu: Mean, v: Tensor) -> Law:
        return Law.on(mu, v, mu.start.new_tensor(self.step))

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return (values / self.step).to(self.code_dtype), values.new_empty(0, dtype=torch.int8)

    def decode(self, codes: Tensor, exponents: Tensor | None) -> Tensor:
        return codes.to(torch.float32) * self.step

    def are_codes(self, codes: Tensor, exponents: Tensor | None) -> bool:
        half = 1 << (self.bits - 1)
        return all_within(codes, -half, half - 1)
