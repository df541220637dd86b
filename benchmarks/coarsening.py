"""Frequency with which `corrected` puts a block of bfp8 on a coarser grid than Δ(μ), and its variance where it has to.

Coarsening costs precision for all of a block. It is unavoidable where the noise carries a coordinate beyond ±NΔ, which happens
in the fraction ``must`` of the blocks when the exact law is drawn on an unbounded grid. The simple rule that leaves room for the
largest possible outcome coarsens the fraction ``headroom`` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import qlangevin as ql
from qlangevin.quantization import random
from qlangevin.quantization.formats import BlockFloat, FixedPoint
from qlangevin.quantization.random import NORMAL_BOUND

FORMAT, LENGTH = BlockFloat(8), 576
UNBOUNDED = FixedPoint(25, 0)  # the integers that float32 represents


@dataclass(frozen=True)
class Coarsening:
    """Fractions of blocks on a coarser grid, at variance c v_0."""

    c: float
    must: float
    exact: float
    headroom: float


@dataclass(frozen=True)
class Spread:
    """Variance over target where the largest coordinates are just below a power of two: mean over a block's coordinates."""

    c: float
    near_top: int
    exact: float
    paper: float


def blocks(count: int) -> Tensor:
    """Draw rows of N(0, 1), their scales spread evenly over a binade on the logarithmic axis."""
    rows = random.normal(ql.Key(1), count * LENGTH).view(count, LENGTH)
    return rows * torch.exp2(random.uniform(ql.Key(2), count)).view(-1, 1)


def measure_coarsening(c: float, count: int) -> Coarsening:
    """Draw blocks at variance c v_0 and count those on a coarser grid."""
    mu, key, top = blocks(count), ql.Key(3), FORMAT.top
    gap = FORMAT.gap(mu)
    y, s = mu / gap, torch.full_like(mu, c / 4)  # in gaps, where v_0 is a quarter
    codes = ql.corrected(mu, s * gap * gap, FORMAT, key) / gap
    reach = y.abs().amax(1) + NORMAL_BOUND * (c / 4) ** 0.5 + 1.5
    return Coarsening(
        c,
        must=share(ql.corrected(y, s, UNBOUNDED, key).abs().amax(1) > top),
        exact=share((codes.remainder(2) == 0).all(1)),  # by chance on the fine grid: 2^-576
        headroom=share(reach > top),
    )


def share(rows: Tensor) -> float:
    return float(rows.float().mean())


def measure_spread(c: float, near_top: int, draws: int) -> Spread:
    """Draw one block many times. The more coordinates are near the top, the more often one is carried over it."""
    y = random.normal(ql.Key(4), LENGTH).mul_(30).clamp_(-100, 100)
    y[:near_top] = FORMAT.top + 0.7
    mu = y.expand(draws, LENGTH).contiguous()
    exact, paper = (
        float(ql.corrected(mu, c / 4, FORMAT, ql.Key(5), algorithm=name).double().var(0).mean()) / (c / 4)
        for name in ("exact", "paper")
    )
    return Spread(c, near_top, exact, paper)


def run(quick: bool) -> tuple[list[Coarsening], list[Spread]]:
    count, draws = (2000, 1000) if quick else (20_000, 4000)
    return [measure_coarsening(c, count) for c in (0.1, 0.5, 1.5, 6.0)], [measure_spread(6.0, k, draws) for k in (1, 8)]
