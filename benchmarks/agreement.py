"""Comparison of our nearest rounding with qtorch's: every difference must belong to a class with a known reason.

half-way           a number exactly between two neighbours. Ours goes away from zero, qtorch's to the even neighbour (fixed
                   point) or to the greater (blocks).
almost half-way    qtorch adds a constant in float32 before it rounds: x/Δ + 1/2 (fixed point), x + 6·2^E (blocks),
                   x ± 2^emin (gradual underflow). The sum, rounded, is half-way, though x is not.
underflow          |x| is below qtorch's least power of two, 2^(2 - 2^(e-1)). The paper's, and so ours, is a quarter of that.
overflow           x is beyond our largest number. qtorch's exponent goes up to 2^(e-1), one more than the paper's.
block underflow    the block's largest element is subnormal in float32: qtorch then has no exponent to work with.
block overflow     the block's largest element is 2^126 or more: 6·2^E is infinite, and qtorch returns the largest number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

import qlangevin as ql
from qlangevin.quantization import random
from qlangevin.quantization.formats import BlockFloat, FixedPoint, Float, binade, power_of_two

FIXED = ("fixed8.3", "fixed8.6", "fixed8.7", "fixed4.2", "fixed16.10", "fixed8.-2")
FLOATS = ("e4m3", "e5m2", "e3m4", "e8m7", "fp8_e4m3", "fp8_e5m2", "fp16", "bf16")
BLOCKS = ("bfp8", "bfp8/tensor", "bfp4", "bfp4/tensor", "bfp12", "bfp12/tensor")
UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Agreement:
    """Counts for one format: numbers compared, and numbers that differ in each class."""

    format: str
    compared: int
    different: dict[str, int]


def neighbours(x: Tensor) -> Tensor:
    """Return x, and the float32 before and after each of its numbers."""
    inf = torch.tensor(torch.inf)
    return torch.cat((x, torch.nextafter(x, inf), torch.nextafter(x, -inf)))


def numbers(gap: float, count: int, seed: int) -> Tensor:
    """Return ordinary numbers and hard ones: powers of two, half-way cases, their neighbours, huge and subnormal numbers."""
    normal, spread = (random.normal(ql.Key(seed).fold(i), count) for i in range(2))
    powers = power_of_two(torch.arange(-149, 128), torch.float32)
    halves = (torch.arange(-600, 600) + 0.5) * gap
    mantissas = torch.cat([powers * (1 + k / 64) for k in range(64)])
    hard = neighbours(torch.cat((powers, halves, mantissas)))
    extremes = torch.tensor([0.0, -0.0, 3e38, torch.finfo(torch.float32).max, torch.inf, 1e-45])
    ordinary = torch.cat((normal * gap * 50, normal * torch.exp2(spread * 20)))
    return torch.cat((ordinary, hard, -hard, extremes, -extremes))


def rows(format: BlockFloat, count: int, seed: int) -> Tensor:
    """Return blocks with largest elements in every binade of float32, and with half-way cases of their own gap."""
    base = random.uniform(ql.Key(seed), count).mul(2).sub(1)
    top = format.top
    halves = torch.arange(-top, top, max(1, top // 128)) + 0.5
    hard = neighbours(torch.cat((halves, halves.sign() * 0.5))) / (top + 1)
    ends = torch.tensor([1.0, -1.0, 1 - 2.0**-24, -1 + 2.0**-24, (top + 0.5) / (top + 1), 0.0, 1e-6, -1e-6, 2.0**-30])
    row = torch.cat((hard, base, ends))
    exponents = torch.arange(-149, 128).view(-1, 1)
    lows = (row.clamp(-0.9999, 0.9999) * power_of_two(exponents, torch.float32)) * 2  # largest just below 2^(E+1)
    return torch.cat((lows, lows * 0.51, torch.zeros(1, row.numel())))


def is_almost_half(x: Tensor, constant: Tensor, gap: Tensor) -> Tensor:
    """Return True where x is not half-way between multiples of the gap, but x + constant, rounded to float32, is."""
    total = (x + constant).double() - constant.double()
    return is_half(total, gap) & ~is_half(x.double(), gap)


def is_half(x: Tensor, gap: Tensor) -> Tensor:
    return (x / gap.double()).remainder(1) == 0.5


def compare_fixed(quant: ModuleType, format: FixedPoint, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    gap = torch.tensor(format.step)
    theirs = quant.fixed_point_quantize(x, format.bits, format.frac, rounding="nearest")
    different, one_off = differences(x, ql.quantize(x, format), theirs, gap)
    yield "half-way", one_off & is_half(x.double(), gap)
    yield "almost half-way", one_off & is_almost_half(x, gap / 2, gap)
    yield UNEXPLAINED, different


def compare_float(quant: ModuleType, format: Float, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    least = 2.0 ** (2 - 2 ** (format.exp - 1))
    ours, theirs = ql.quantize(x, format), quant.float_quantize(x, format.exp, format.man, rounding="nearest")
    different, one_off = differences(x, ours, theirs, format.gap(x))
    small, coarse = x.abs() < least, least * 2.0**-format.man
    rounded = (theirs - x).abs() <= coarse * (0.5 + 2.0**-20)  # theirs is the nearest number of its own grid
    yield "underflow", different & small & rounded & (2.0**format.emin < least)
    yield "almost half-way", one_off & small & is_almost_half(x, least * torch.where(x < 0, -1.0, 1.0), format.gap(x))
    yield "overflow", different & (ours.abs() == format.high) & (theirs.abs() > format.high)
    yield UNEXPLAINED, different


def compare_block(quant: ModuleType, format: BlockFloat, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    if format.block == "tensor":
        theirs = torch.stack([quant.block_quantize(row, format.bits, dim=-1, rounding="nearest") for row in x])
        ours = torch.stack([ql.quantize(row, format) for row in x])
    else:
        theirs = quant.block_quantize(x, format.bits, dim=0, rounding="nearest")
        ours = ql.quantize(x, format)
    largest = x.abs().amax(1, keepdim=True)
    gap = power_of_two(format.gap_exponent(largest), torch.float32)
    different, one_off = differences(x, ours, theirs, gap)
    yield "block underflow", different & (largest < 2.0**-126)
    yield "block overflow", different & (largest >= 2.0**126)
    base = power_of_two(binade(largest).clamp(-126, 125), torch.float32) * 6
    yield "half-way", one_off & is_half(x.double(), gap)
    yield "almost half-way", one_off & is_almost_half(x, base, gap)
    yield UNEXPLAINED, different


def differences(x: Tensor, ours: Tensor, theirs: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of the numbers that differ, and of those that differ by one gap."""
    different = ours != theirs
    return different, different & ((ours.double() - theirs.double()).abs() == gap.double())


def tally(name: str, x: Tensor, classes: Iterator[tuple[str, Tensor]]) -> Agreement:
    """Count each difference in the first class that holds it."""
    counts: Counter[str] = Counter()
    left = torch.ones_like(x, dtype=torch.bool)
    for label, where in classes:
        counts[label] += int((where & left).sum())
        left &= ~where
    return Agreement(name, x.numel(), dict(counts))


def run(quant: ModuleType, quick: bool) -> list[Agreement]:
    """Compare all formats."""
    count, out = 20_000 if quick else 1_000_000, []
    for i, name in enumerate((*FIXED, *FLOATS, *BLOCKS)):
        format = ql.parse(name)
        if isinstance(format, FixedPoint):
            x = numbers(format.step, count, i)
            out.append(tally(name, x, compare_fixed(quant, format, x)))
        elif isinstance(format, Float):
            x = numbers(2.0**format.min_gap_exponent, count, i)
            out.append(tally(name, x, compare_float(quant, format, x)))
        elif isinstance(format, BlockFloat):
            x = rows(format, count // 500, i)
            out.append(tally(name, x, compare_block(quant, format, x)))
    return out
