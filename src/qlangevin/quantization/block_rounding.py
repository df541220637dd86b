"""Q^vc on blocks that share an exponent, with exact mean and variance.

The exponent must fit what is drawn, and what is drawn must not depend on the exponent: Algorithm 5 of the paper recomputes Δ
after the noise (its lines 6 and 7), which makes the variance wrong where a block crosses a power of two. Here the gaps are
settled before the coordinates that use them are drawn.

Two gaps can be needed: ``coarse``, the least on which every outcome fits, and ``fine``, half of it, if that is not below Δ(μ).
A coordinate is at risk if it may land beyond the fine grid. If both gaps are Δ(μ), the block is drawn there. Else

- one alone at risk is drawn first, on the union of both grids (fine up to N + 1, coarse beyond), as finely as if it had a
  block of its own; the block is coarse only if it lands outside (`draw_in_turn`);
- several at risk and v <= v_0: each goes outside as seldom as its mean allows, and a coin that makes the block coarse brings the
  rest of the variance (`draw_tossed`);
- several at risk and v > v_0: all but the largest are drawn first, on the coarse grid, whose points fine blocks have too, then
  the largest as if it were alone; the block is coarse only if one of them did land outside (`draw_in_turn`).

In the first two cases the probability Q that the block will be coarse is known before the others are drawn. On the coarse
grid they have a variance w that can exceed s, so on the fine grid they get what is left of s: (s - Q w)/(1 - Q).

Blocks are the rows of a matrix; h are centered uniform and ξ normal random numbers. `native/blocks.h` has the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .format_base import ceil_log2, power_of_two
from .laws import SLACK, V0, Law, Mean, feasible, in_gaps, outcomes, pick
from .random import NORMAL_BOUND, root

__all__ = ["BlockGrid", "draw_blocks", "find_gaps"]

UNIT = 2.0**-36  # of probabilities that are added up
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


def draw_blocks(grid: BlockGrid, mu: Mean, v: Tensor, h: Tensor, xi: Tensor, coins: Callable[[], Tensor]) -> Tensor:
    """Return Q^vc(μ, v) for blocks, one a row; v is a scalar or a matrix like μ, ``coins`` makes more numbers like h."""
    gaps = find_gaps(grid, mu, v)
    law = Law.on(mu, v, gaps.fine, grid.top)
    on_fine = law.draw(h, xi)
    if not bool(gaps.at_risk.any()):
        return on_fine
    on_coarse = Law.on(mu, v, gaps.coarse, grid.top).draw(h, xi)
    block = Block(law, gaps, mu.total.abs(), coarse_variance(mu, v, gaps), on_fine, on_coarse, h, grid.top)
    several, quiet = gaps.at_risk.sum(1, keepdim=True) > 1, law.s.expand_as(h).amax(1, keepdim=True) <= V0
    careful = draw_in_turn(block, ~several & quiet)
    if bool((several & quiet).any()):
        careful = torch.where(several & quiet, draw_tossed(block, coins()), careful)
    return torch.where(gaps.at_risk.any(1, keepdim=True), careful, on_fine)


class Block(NamedTuple):
    """Blocks of which some coordinates are at risk, and what their draws have in common."""

    law: Law  # on the fine gap
    gaps: BlockGaps
    size: Tensor  # |μ|
    w: Tensor  # variance of each coordinate on the coarse gap
    on_fine: Tensor  # draws of all coordinates, on either gap
    on_coarse: Tensor
    h: Tensor
    top: int


def draw_in_turn(block: Block, compensate: Tensor) -> Tensor:
    """Draw the coordinates at risk first, on the coarse grid and the largest on the union of both; the block is fine unless
    one of them lands outside. Where ``compensate``, those that are not at risk get what is left of the variance.
    """
    law, gaps, top = block.law, block.gaps, block.top
    largest = torch.where(gaps.at_risk, block.size, -1).argmax(1, keepdim=True)
    others = gaps.at_risk.scatter(1, largest, False)
    others_outside = (others & (block.on_coarse.abs() > top * gaps.fine)).any(1, keepdim=True)
    alone, p_outside, possible = draw_alone(law, largest, block.h, top)
    last = torch.where(possible & ~others_outside, alone, block.on_coarse.gather(1, largest))
    outside = others_outside | (last.abs() > top * gaps.fine)
    rest = torch.where(compensate & possible, draw_compensated(block, p_outside), block.on_fine)
    mixed = torch.where(gaps.at_risk, block.on_coarse, rest)
    return torch.where(outside, block.on_coarse, mixed).scatter(1, largest, last)


def draw_tossed(block: Block, coins: Tensor) -> Tensor:
    """Draw blocks with several coordinates at risk, v <= v_0.

    A coordinate at |y| = N + b beyond the fine grid jumps to N + 1 with probability b, else it stays at N. A jump makes the block
    coarse, and so does a coin; then those that did not jump go from N to N ± 1. With the product P of all 1 - b and the
    coin's probability q, the block is coarse with probability Q = 1 - (1 - q) P, and the variance of |y| = N + b is Q - b².
    At |y| = N - a the fine grid has variances up to m = a (2 - a), the coarse one has w = 1 - a²; together s needs
    Q >= (s - m)/(w - m). So Q is the largest that a coordinate at risk needs, or 1 - P if that is more.

    P is taken as 1 - Σ b + Σ b b' (pairs), which is not less, and for up to two such coordinates is P. The sums are of integers:
    they do not depend on the order.
    """
    law, top = block.law, float(block.top)
    n, r = law.point.nearest()
    sign = torch.where(n < 0, -1.0, 1.0)
    beyond = r * sign + (n.abs() - top)  # |y| - N
    is_beyond = block.gaps.at_risk & (beyond > 0)
    b, a = torch.where(is_beyond, beyond, 0), (-beyond).clamp_min(0)
    inner = (law.s - a * (2 - a)).clamp_min(0) / (1 - (a + a)).clamp_min(0.5)
    needed = torch.where(is_beyond, law.s + b * b, torch.where(block.gaps.at_risk, inner, 0)).amax(1, keepdim=True)
    total, squares = (count_units(x).sum(1, keepdim=True).to(b.dtype) * UNIT for x in (b, b * b))
    jump = (total - (total * total - squares) * 0.5).clamp(0, 1)  # 1 - P
    q_coarse = torch.maximum(needed, jump)  # Q
    q = (q_coarse - jump) / (1 - jump).clamp_min(UNIT)
    heads = coins[:, :1].abs() < q * 0.5

    jumps = is_beyond & pick(torch.zeros_like(b), b, block.h * sign)[1]
    aside = torch.where(jumps, 1.0, torch.where(coins < 0, -1.0, 1.0))
    if_coarse = torch.where(is_beyond, sign * (top + aside) * law.gap, block.on_coarse)
    if_fine = torch.where(is_beyond, sign * top * law.gap, draw_compensated(block, q_coarse))
    return torch.where(heads | jumps.any(1, keepdim=True), if_coarse, if_fine)


def count_units(x: Tensor) -> Tensor:
    """Return x in units of 2^-36, as integers."""
    return (x * (1 / UNIT)).to(torch.int64)


def coarse_variance(mu: Mean, v: Tensor, gaps: BlockGaps) -> Tensor:
    """Return w, the variance that a coordinate has on the coarse grid, in units of the fine one."""
    point, s = in_gaps(mu, v, gaps.coarse)
    r = point.nearest()[1].abs()
    return torch.maximum(s, r * (1 - r)) * 4


def draw_compensated(block: Block, q: Tensor) -> Tensor:
    """Draw on the fine grid, in three outcomes that stay inside, what is left of the variance: (s - Q w)/(1 - Q).

    At |y| = N - a the outcomes are N, N - 1 and N - 2, with P(N - 2) = (s - a (1 - a))/2, at most a/2.
    """
    law, h = block.law, block.h
    s = ((law.s - q * block.w) / (1 - q).clamp_min(2.0**-20)).clamp_min(0)
    n, r = law.point.nearest()
    down, up = pick(*outcomes(r, s), h)
    within = n + torch.where(up, 1.0, torch.where(down, -1.0, 0))

    a, sign = r.abs(), torch.where(n < 0, -1.0, 1.0)
    twice = torch.minimum((s - a * (1 - a)).clamp_min(0), a) * 0.5
    inwards = -h * sign
    steps = torch.where((inwards > 0) & (inwards < a - twice), torch.where(inwards < twice, 2.0, 1.0), 0)
    return torch.where(n.abs() == block.top, n - sign * steps, within) * law.gap


def draw_alone(law: Law, index: Tensor, h: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one coordinate of each block on the union of both grids.

    Return the draw, the probability that it lands outside, and a mask: True where three outcomes there can have the variance.
    """
    whole, rest, s, h = (t.expand_as(h).gather(1, index) for t in (*law.point, law.s, h))
    one = Law(law.gap, law.point._replace(whole=whole, rest=rest), s, torch.zeros_like(s, dtype=torch.bool), top + 1)
    n, r = one.point.nearest()
    size = n.abs()
    possible = feasible(n, r, s, top + 1) & (torch.where(size == top + 1, size + 2, size) <= 2 * top)
    outwards = r * torch.where(n < 0, -1.0, 1.0)
    p_in, p_out = outcomes(outwards, s, 1.0, 1.0 + (size == top + 1).to(s.dtype))
    outside = torch.where(size == top, p_out, torch.where(size == top + 1, 1 - p_in, (size > top).to(s.dtype)))
    return one.draw(h, torch.zeros_like(s)), outside, possible


def find_gaps(grid: BlockGrid, mu: Mean, v: Tensor) -> BlockGaps:
    """Search the least gap on which all outcomes fit, downwards from one of which a bound says so."""
    largest = mu.total.abs().amax(1, keepdim=True)
    sigma, dtype = root(v), largest.dtype
    most_sigma = sigma.amax(1, keepdim=True) if sigma.dim() else sigma
    enough = ceil_log2(sufficient_gap(largest, most_sigma, float(grid.top)))
    coarse = torch.maximum(grid.gap_exponent, enough).clamp_max(grid.max_gap_exponent)
    while True:
        fine = torch.maximum(grid.gap_exponent, coarse - 1)
        at_risk = may_leave(mu, v, power_of_two(fine, dtype), grid.top) & (fine < coarse)
        too_coarse = (fine < coarse) & ~at_risk.any(1, keepdim=True)
        if not bool(too_coarse.any()):
            break
        coarse = torch.where(too_coarse, fine, coarse)
    nan = torch.where(largest.isnan(), torch.nan, 1.0)  # a NaN spoils its block, visibly
    return BlockGaps(power_of_two(fine, dtype) * nan, power_of_two(coarse, dtype) * nan, at_risk)


def sufficient_gap(largest: Tensor, sigma: Tensor, top: float) -> Tensor:
    """Return a gap on which no outcome exceeds N, given the largest |μ| and σ of each block."""
    three = torch.maximum(largest * (SLACK / (top - 0.5)), sigma * SQRT_4_3)
    with_noise = (largest + sigma * NORMAL_BOUND) * (SLACK / (top - 1.5)) if top > 1 else three
    return torch.where(sigma == 0, largest * (SLACK / top), torch.minimum(three, with_noise))


def may_leave(mu: Mean, v: Tensor, gap: Tensor, top: int) -> Tensor:
    """Return a mask of the coordinates that, drawn on a gap, might leave the codes -N .. N."""
    law = Law.on(mu, v, gap, top)
    n, r = law.point.nearest()
    outward = (r * n > 0) | (law.s > r.abs() * (1 - r.abs()))
    inside = feasible(n, r, law.s) & (n.abs() + outward.to(r.dtype) <= top)
    return ~law.gaussian & ~inside
