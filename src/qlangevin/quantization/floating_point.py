"""Floating point: the paper's, with any number of exponent and mantissa bits, and the formats of hardware."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .format_base import (
    FLOAT32_MAX,
    FLOAT32_MIN_EXPONENT,
    Format,
    GridKind,
    KernelGrid,
    binade,
    bits_in_storage,
    ceil_log2,
    check_field,
    power_of_two,
)
from .laws import SLACK, V0, Law, Mean, feasible, in_gaps
from .random import NORMAL_BOUND, root

__all__ = ["BF16", "FP8_E4M3", "FP8_E5M2", "FP16", "FP32", "Float"]

NAME = re.compile(r"e(\d+)m(\d+)")


class Hardware(NamedTuple):
    """The value set of a torch dtype."""

    exp: int
    man: int
    emin: int
    emax: int
    high: float
    dtype: torch.dtype


@dataclass(frozen=True)
class Float(Format):
    """Floating point with gradual underflow: Δ = 2^(E - man), E = clip(floor(log2 |x|), emin, emax).

    ``Float(exp, man)`` has the paper's exponent range, emin = -2^(exp-1) and emax = 2^(exp-1) - 1, spends no code on
    infinity or NaN, and reaches (2 - 2^-man) 2^emax. With the zeroth binade of gradual underflow that is one binade
    more than ``exp`` bits can tell apart: e4m3 has 271 values, one byte has 256 codes, so it is stored in two. The formats
    of hardware, `FP8_E4M3`, `FP8_E5M2`, `FP16`, `BF16` and `FP32`, have torch's value sets and fit their bits.

    A code is the sign bit, then the rank of |value| among the format's numbers counted from zero,
    2^man (E - emin + 1) + mantissa, and value / Δ below 2^emin. For the formats of hardware that is torch's bit pattern.
    """

    exp: int
    man: int
    hardware: str | None = None

    HARDWARE: ClassVar[dict[str, Hardware]] = {
        "fp8_e4m3": Hardware(4, 3, -6, 8, 448.0, torch.float8_e4m3fn),
        "fp8_e5m2": Hardware(5, 2, -14, 15, 57344.0, torch.float8_e5m2),
        "fp16": Hardware(5, 10, -14, 15, 65504.0, torch.float16),
        "bf16": Hardware(8, 7, -126, 127, float(torch.finfo(torch.bfloat16).max), torch.bfloat16),
        "fp32": Hardware(8, 23, -126, 127, float(FLOAT32_MAX), torch.float32),
    }

    def __post_init__(self) -> None:
        check_field(self, "exp", 1, 8)
        check_field(self, "man", 1 if self.exp == 8 else 0, 23)
        if self.hardware is not None:
            known = self.HARDWARE.get(self.hardware)
            if known is None or (known.exp, known.man) != (self.exp, self.man):
                raise ValueError(
                    f"hardware formats have names, parse('fp8_e4m3') say; got {self.hardware!r} with other bits"
                )
        if self.min_gap_exponent < FLOAT32_MIN_EXPONENT:
            raise ValueError(
                f"exp={self.exp} with man={self.man} needs numbers down to 2^{self.min_gap_exponent}, below float32; "
                f"use man <= {self.man - (FLOAT32_MIN_EXPONENT - self.min_gap_exponent)} or fewer exponent bits"
            )

    @classmethod
    def from_name(cls, name: str) -> Float | None:
        if known := cls.HARDWARE.get(name):
            return cls(known.exp, known.man, name)
        match = NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None

    def __str__(self) -> str:
        return self.hardware or f"e{self.exp}m{self.man}"

    @property
    def emin(self) -> int:
        return self.HARDWARE[self.hardware].emin if self.hardware else -(1 << (self.exp - 1))

    @property
    def emax(self) -> int:
        return self.HARDWARE[self.hardware].emax if self.hardware else (1 << (self.exp - 1)) - 1

    @property
    def min_gap_exponent(self) -> int:
        return self.emin - self.man

    @property
    def max_gap_exponent(self) -> int:
        return self.emax - self.man

    @property
    def top(self) -> int:
        """The end of a binade in units of its gap."""
        return 1 << (self.man + 1)

    @property
    def low(self) -> float:
        return -self.high

    @property
    def high(self) -> float:
        return self.HARDWARE[self.hardware].high if self.hardware else (2 - 2.0**-self.man) * 2.0**self.emax

    @property
    def digits(self) -> int:
        return self.man + 1

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype with this value set, if there is one."""
        return self.HARDWARE[self.hardware].dtype if self.hardware else None

    @property
    def storage_bits(self) -> int:
        # sign, and (emax - emin + 2) binades of 2^man codes each, the lowest that of gradual underflow
        codes = 2 * (self.emax - self.emin + 2) * 2**self.man
        return self.dtype.itemsize * 8 if self.dtype else bits_in_storage(max((codes - 1).bit_length(), 8))

    @property
    def value_count(self) -> int:
        """Two signs, emax - emin + 2 binades of 2^man numbers each, one zero; hardware may use some codes for NaN."""
        return (self.emax - self.emin + 2) * self.top - 1

    def gap_exponent(self, x: Tensor) -> Tensor:
        """Return log2 Δ at each element of x, as int32."""
        return (binade(x) - self.man).clamp(self.min_gap_exponent, self.max_gap_exponent)

    def gap(self, x: Tensor) -> Tensor:
        return power_of_two(self.gap_exponent(x), x.dtype)

    def values(self) -> Tensor:
        exponents = torch.arange(self.min_gap_exponent, self.max_gap_exponent + 1, dtype=torch.int32)
        multiples = torch.arange(-self.top, self.top + 1, dtype=torch.float64)
        numbers: Tensor = torch.unique(power_of_two(exponents, torch.float64)[:, None] * multiples)
        return numbers.masked_select(numbers.abs() <= self.high) + 0.0

    def kernel_grid(self, shape: torch.Size) -> KernelGrid:
        if self == FP32:
            return KernelGrid()
        limits = (self.min_gap_exponent, self.max_gap_exponent, float(self.top), self.low, self.high)
        return KernelGrid(GridKind.FLOAT, self.man, *limits)

    def law(self, mu: Mean, v: Tensor) -> Law:
        """Return the law of Q^vc: x = μ + sqrt(v - Δ²/4) ξ, then n - Δ, n or n + Δ with mean x and variance Δ²/4.

        Δ is the least gap >= Δ(μ) that floats within reach of the noise do not exceed, so that the second part of the variance
        is the same wherever x lands. n is the float nearest to x, on the gap that floats have at |x| + Δ: then n ± Δ are
        floats, too. Where v <= Δ²/4 nothing is added, and Δ is the least gap >= Δ(μ) on which three outcomes reach v.
        """
        sigma, total = root(v), mu.total
        reach = (total.abs() + sigma * NORMAL_BOUND) * (SLACK / (self.top - 0.5))  # on this gap n + 1 <= top
        exponent = torch.maximum(self.gap_exponent(total), ceil_log2(torch.minimum(sigma, reach)))
        exponent = exponent.clamp_max(self.max_gap_exponent)
        law = self._law_on(mu, v, exponent)
        gaussian = (law.s > V0) & (reach <= law.gap)
        # Without room for Gaussian noise three outcomes must do; where even they are too narrow, twice the gap is enough.
        double = ~gaussian & ~feasible(*law.nearest(), law.s, self.top) & (exponent < self.max_gap_exponent)
        return self._law_on(mu, v, exponent + double.to(exponent.dtype))._replace(gaussian=gaussian)

    def _law_on(self, mu: Mean, v: Tensor, exponent: Tensor) -> Law:
        """Return the law of three outcomes whose distance is 2^exponent."""
        gap = power_of_two(exponent, mu.start.dtype)
        finest = power_of_two((exponent - self.min_gap_exponent).clamp_max(self.man), mu.start.dtype)
        point, s = in_gaps(mu, v, gap)
        return Law(gap, point, s, torch.zeros_like(s, dtype=torch.bool), self.top, finest)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        none = values.new_empty(0, dtype=torch.int8)
        if self == FP32:
            return values.view(torch.int32).clone(), none
        size = values.abs()
        gap = self.gap_exponent(size)
        multiple = (size / power_of_two(gap, torch.float32)).to(torch.int32)
        rank = multiple + (gap - self.min_gap_exponent) * 2**self.man
        sign = torch.where(values.signbit(), -(self._rank_mask + 1), 0)
        return (rank + sign).to(self.code_dtype), none

    def decode(self, codes: Tensor, exponents: Tensor | None) -> Tensor:
        if self == FP32:
            return codes.view(torch.float32).clone()
        rank = codes.to(torch.int32) & self._rank_mask
        above = ((rank >> self.man) - 1).clamp_min(0)  # binades above the lowest, which holds the subnormal numbers too
        gap = power_of_two(above + self.min_gap_exponent, torch.float32)
        size = (rank - above * 2**self.man).to(torch.float32) * gap
        return torch.where(codes < 0, -size, size)

    def are_codes(self, codes: Tensor, exponents: Tensor | None) -> bool:
        highest = int(self.high * 2.0**-self.max_gap_exponent) + (self.emax - self.emin) * 2**self.man
        return codes.numel() == 0 or int((codes & self._rank_mask).max()) <= highest

    @property
    def _rank_mask(self) -> int:
        """All bits of a code but the sign."""
        return (1 << (8 * self.code_dtype.itemsize - 1)) - 1


FP8_E4M3 = Float(4, 3, "fp8_e4m3")
FP8_E5M2 = Float(5, 2, "fp8_e5m2")
FP16 = Float(5, 10, "fp16")
BF16 = Float(8, 7, "bf16")
FP32 = Float(8, 23, "fp32")
