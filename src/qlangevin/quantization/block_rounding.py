"""Q^vc on blocks that share an exponent, with exact mean and variance.

The exponent must fit what is drawn, and what is drawn must not depend on the exponent: Algorithm 5 of the paper recomputes Δ
after the noise (its lines 6 and 7), which makes the variance wrong where a block crosses a power of two. Here the gaps are
settled before the coordinates that use them are drawn.

Two gaps can be needed: ``coarse``, the least on which every outcome fits, and ``fine``, half of it, if that is not below Δ(μ).
A coordinate is at risk if it may land beyond the fine grid. If both gaps are Δ(μ), the block is drawn there. Else those at
risk are drawn first, on the coarse grid, whose points fine blocks have too, and the block is coarse only if one of them did
land outside. The largest of them is drawn last, on the union of both grids (fine up to N + 1, coarse beyond): alone it can
be as fine as if it had a block of its own.

Blocks are the rows of a matrix; u are uniform and ξ normal random numbers. `native/blocks.h` has the same functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .format_base import ceil_log2, power_of_two
from .laws import SLACK, Law, feasible, in_gaps, nearest_integer
from .random import NORMAL_BOUND, root

__all__ = ["BlockGrid", "draw_blocks"]

SQRT_4_3 = 1.1547006  # up to σ = Δ/sqrt(4/3), that is s <= 3/4, three outcomes are always feasible


class BlockGrid(NamedTuple):
    """The grids that blocks may be drawn on: gaps from Δ(μ) to the greatest, codes -N .. N."""

    gap_exponent: Tensor  # log2 Δ(μ) of each block, a column
    max_gap_exponent: int
    top: int  # N


class BlockGaps(NamedTuple):
    """The two gaps of every block, as columns, and a mask of the coordinates at risk on the fine one."""

    fine: Tensor
    coarse: Tensor
    at_risk: Tensor


def draw_blocks(grid: BlockGrid, mu: Tensor, v: Tensor, u: Tensor, xi: Tensor) -> Tensor:
    """Return Q^vc(μ, v) for blocks, one a row; v is a scalar or a matrix like μ."""
    top = grid.top
    gaps = find_gaps(grid, mu, v)
    on_fine = Law.on(mu, v, gaps.fine, top).draw(u, xi)
    if not bool(gaps.at_risk.any()):
        return on_fine

    on_coarse = Law.on(mu, v, gaps.coarse, top).draw(u, xi)
    largest = torch.where(gaps.at_risk, mu.abs(), -1).argmax(1, keepdim=True)
    others = gaps.at_risk.scatter(1, largest, False)
    others_outside = (others & (on_coarse.abs() > top * gaps.fine)).any(1, keepdim=True)

    mu_m, v_m, u_m, coarse_m = (t.expand_as(mu).gather(1, largest) for t in (mu, v, u, on_coarse))
    alone, possible = draw_alone(mu_m, v_m, u_m, gaps.fine, top)
    last = torch.where(possible & ~others_outside, alone, coarse_m)

    outside = others_outside | (last.abs() > top * gaps.fine)
    mixed = torch.where(gaps.at_risk, on_coarse, on_fine)
    careful = torch.where(outside, on_coarse, mixed).scatter(1, largest, last)
    return torch.where(gaps.at_risk.any(1, keepdim=True), careful, on_fine)


def draw_alone(mu: Tensor, v: Tensor, u: Tensor, fine: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return a draw on the union of both grids, and a mask: True where three outcomes there can have the variance."""
    y, s = in_gaps(mu, v, fine)
    n = nearest_integer(y).abs()
    outermost = torch.where(n == top + 1, n + 2, n)
    possible = feasible(y, s, top + 1) & (outermost <= 2 * top)
    never = torch.zeros_like(possible)
    return Law(fine, y, s, never, top + 1).draw(u, torch.zeros_like(y)), possible


def find_gaps(grid: BlockGrid, mu: Tensor, v: Tensor) -> BlockGaps:
    """Search the least gap on which all outcomes fit, downwards from one of which a bound says so."""
    largest = mu.abs().amax(1, keepdim=True)
    sigma = root(v)
    most_sigma = sigma.amax(1, keepdim=True) if sigma.dim() else sigma
    enough = ceil_log2(sufficient_gap(largest, most_sigma, float(grid.top)))
    coarse = torch.maximum(grid.gap_exponent, enough).clamp_max(grid.max_gap_exponent)
    while True:
        fine = torch.maximum(grid.gap_exponent, coarse - 1)
        at_risk = may_leave(mu, v, power_of_two(fine, mu.dtype), grid.top) & (fine < coarse)
        too_coarse = (fine < coarse) & ~at_risk.any(1, keepdim=True)
        if not bool(too_coarse.any()):
            break
        coarse = torch.where(too_coarse, fine, coarse)
    nan = torch.where(largest.isnan(), torch.nan, 1.0)  # a NaN spoils its block, visibly
    return BlockGaps(power_of_two(fine, mu.dtype) * nan, power_of_two(coarse, mu.dtype) * nan, at_risk)


def sufficient_gap(largest: Tensor, sigma: Tensor, top: float) -> Tensor:
    """Return a gap on which no outcome exceeds N, given the largest |μ| and σ of each block."""
    three = torch.maximum(largest * (SLACK / (top - 0.5)), sigma * SQRT_4_3)
    with_noise = (largest + sigma * NORMAL_BOUND) * (SLACK / (top - 1.5)) if top > 1 else three
    return torch.where(sigma == 0, largest / top, torch.minimum(three, with_noise))


def may_leave(mu: Tensor, v: Tensor, gap: Tensor, top: int) -> Tensor:
    """Return a mask of the coordinates that, drawn on a gap, might leave the codes -N .. N."""
    law = Law.on(mu, v, gap, top)
    n = nearest_integer(law.y)
    r = (law.y - n).abs()
    outward = (law.y.abs() > n.abs()) | (law.s > r * (1 - r))
    inside = feasible(law.y, law.s) & (n.abs() + outward.to(law.y.dtype) <= top)
    return ~law.gaussian & ~inside
