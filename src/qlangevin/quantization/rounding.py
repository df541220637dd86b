"""How to get onto the grid: the paper's Q^d, Q^s and Q^vc, in plain PyTorch.

`nearest` (Q^d), `stochastic` (Q^s) and `corrected` (Q^vc) are written here to be read beside the paper, for any device
and floating dtype; the kernels of `native` repeat them on the CPU, bit for bit. Lengths are measured in gaps: a
number μ becomes y = μ/Δ, a variance v becomes s = v/Δ², and the grid becomes the integers.

One law does all the random rounding. Between the integers n - 1, n, n + 1 the number y = n + r can be split in many ways
that keep its mean. Stochastic rounding is the one with the least variance, v_s = |r| (1 - |r|); to reach a
larger variance s, move the probability (s - v_s)/2 from n to each neighbour (see `outcomes`). So

    Q^s(μ)      n is the nearest integer, variance v_s
    Q^vc(μ, v)  v <= v_0 = Δ²/4: the same with variance max(v, v_s);
                v >  v_0: first add Gaussian noise of variance v - v_0, then reach exactly v_0

has the mean and variance of Algorithm 2, line by line, in fewer random numbers, and Q^s(μ) = Q^vc(μ, 0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import random
from .formats import FLOAT32_MAX, FP32, BlockFloat, Float, Format, power_of_two
from .random import NORMAL_BOUND, Key, root

__all__ = ["as_printed", "exact", "nearest", "outcomes", "stochastic"]

FAR = 2.0**30  # in gaps: further out than any code, near enough to compute with
WIDE = 2.0**54  # in squared gaps: the variance of noise that reaches nearly as far
SLACK = 1 + 2.0**-20  # covers the rounding of float32 where a bound has to hold strictly


def nearest_integer(x: Tensor) -> Tensor:
    """The nearest integer, half away from zero: trunc(x), and one more where the rest is at least a half."""
    whole = x.trunc()
    rest = x - whole
    return whole + (rest + rest).trunc()


def outcomes(r: Tensor, s: Tensor, below: Tensor | float = 1.0, above: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """(P(n - below), P(n + above)) of the law on {n - below, n, n + above} with mean n + r and variance max(s, v_s).

    Equation (categorical) of the paper in another arrangement: with below = above = 1 the two are the negative and the
    positive part of r, plus (s - v_s)/2 each. A law of three points reaches variances up to (below + r)(above - r).
    """
    up, down = r.clamp_min(0), (-r).clamp_min(0)
    least = up * (above - up) + down * (below - down)  # v_s, the variance of stochastic rounding
    room = (1 - up / above - down / below) * (below * above)  # what is left of P(n), as variance
    extra = torch.minimum((s - least).clamp_min(0), room)
    return down / below + extra / (below * (below + above)), up / above + extra / (above * (below + above))


def settle(y: Tensor, s: Tensor, gaussian: Tensor, u: Tensor, xi: Tensor, wide_at: float = FAR) -> Tensor:
    """One draw of Q^vc on the integers (lines 4-17 of Algorithm 2); where not ``gaussian``, three outcomes give it all.

    At ±wide_at the grid changes: the neighbour further from zero is two away.
    """
    s0 = 0.25
    start = y.trunc()  # y = start + rest exactly, so that the noise meets a small number and keeps its digits
    x = (y - start) + torch.where(gaussian, root((s - s0).clamp_min(0)), 0) * xi
    offset = nearest_integer(x)
    n, r = start + offset, x - offset
    above, below = 1.0 + (n == wide_at).to(y.dtype), 1.0 + (n == -wide_at).to(y.dtype)
    p_down, p_up = outcomes(r, torch.where(gaussian, s0, s), below, above)
    return n + torch.where(u >= 1 - p_up, above, torch.where(u < p_down, -below, 0))


def in_gaps(mu: Tensor, v: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """(y, s): value and variance in units of the gap, infinities brought down to numbers."""
    return (mu / gap).clamp(-FAR, FAR), (v / gap / gap).clamp_max(WIDE)


def reaches(y: Tensor, s: Tensor) -> Tensor:
    """A bound on |outcome| when the Gaussian part is drawn: |ξ| has one."""
    return y.abs() + root(s) * NORMAL_BOUND + 1.5


def feasible(y: Tensor, s: Tensor, wide_at: float = FAR) -> Tensor:
    """Whether three outcomes around y can have the variance s."""
    n = nearest_integer(y)
    r = (y - n) * torch.where(n < 0, -1.0, 1.0)  # away from zero is up
    return s <= (1 + r) * (1 + (n.abs() == wide_at).to(y.dtype) - r)


def ceil_log2(x: Tensor) -> Tensor:
    """The least integer e with x <= 2^e; very negative at zero."""
    mantissa, exponent = torch.frexp(x.clamp_max(FLOAT32_MAX))
    return torch.where(x == 0, -1000, exponent - (mantissa == 0.5).to(exponent.dtype))


def nearest(x: Tensor, format: Format) -> Tensor:
    """Q^d: the nearest number of the format, half away from zero. A block's grid is set by its largest element."""
    gap = format.gap(x)
    n = nearest_integer((x / gap).clamp(-FAR, FAR))
    if isinstance(format, BlockFloat):
        n = n.clamp(-format.top, format.top)
    return clip(n * gap, format)


def stochastic(x: Tensor, format: Format, u: Tensor) -> Tensor:
    """Q^s: up or down with probabilities that keep the mean."""
    zero = x.new_zeros(())
    return exact(x, zero, format, u, zero)


def exact(mu: Tensor, v: Tensor, format: Format, u: Tensor, xi: Tensor) -> Tensor:
    """Q^vc with mean μ and variance max(v, v_s), on a grid that is settled before the noise is drawn."""
    if mu.numel() == 0:
        return mu.clone()
    if mu.dim() == 0:
        return exact(mu.view(1), v, format, u.view(1), xi.view(1)).view(())
    if isinstance(format, BlockFloat):
        each = v.expand_as(mu) if v.dim() else v
        rows, each, u, xi = (format.blocks(t) if t.dim() else t for t in (mu, each, u, xi))
        return clip(format.unblocks(_exact_blocks(rows, each, u, xi, format), mu.shape), format)
    if isinstance(format, Float):
        return clip(_exact_float(mu, v, u, xi, format), format)
    gap = mu.new_tensor(format.step)
    y, s = in_gaps(mu, v, gap)
    return clip(settle(y, s, s > 0.25, u, xi) * gap, format)


def _exact_float(mu: Tensor, v: Tensor, u: Tensor, xi: Tensor, format: Float) -> Tensor:
    """Multiples of a gap g up to top·g are floats. Take the least g >= Δ(μ) on which the whole law stays below top."""
    sigma, top = root(v), format.top
    room = torch.minimum(sigma, (mu.abs() + sigma * NORMAL_BOUND) * (SLACK / (top - 1.5)))
    exponent = torch.maximum(format.gap_exponent(mu), ceil_log2(room)).clamp_max(format.max_gap_exponent)
    gap = power_of_two(exponent, mu.dtype)
    y, s = in_gaps(mu, v, gap)
    gaussian = (s > 0.25) & (reaches(y, s) <= top)
    # Without room for Gaussian noise three outcomes must do; where even they are too narrow, twice the gap is enough.
    double = ~gaussian & ~feasible(y, s, top) & (exponent < format.max_gap_exponent)
    scale = torch.where(double, 0.5, 1.0)
    return settle(y * scale, s * (scale * scale), gaussian, u, xi, top) / scale * gap


def _exact_blocks(mu: Tensor, v: Tensor, u: Tensor, xi: Tensor, format: BlockFloat) -> Tensor:
    """Q^vc on blocks, one a row. The exponent must fit what is drawn, and what is drawn must not depend on the exponent.

    Two gaps can be needed: ``coarse``, the least on which every outcome fits, and ``fine``, half of it, if that is not
    below Δ(μ). A coordinate is at risk if it may land beyond the fine grid. If both are Δ(μ), the block is drawn there. Else
    those at risk are drawn first, on the coarse grid, whose points fine blocks have too, and the block is coarse only
    if one of them did land outside. The largest of them is drawn last, on the union of both grids (fine up to N + 1,
    coarse beyond): alone it can be as fine as if it had a block of its own.
    """
    top = format.top
    fine, coarse, risky = _gaps(mu, v, format)
    y, s = in_gaps(mu, v, fine)
    drawn = settle(y, s, (s > 0.25) & (reaches(y, s) <= top), u, xi) * fine
    if not bool(risky.any()):
        return drawn

    y, s = in_gaps(mu, v, coarse)
    drawn_coarse = settle(y, s, (s > 0.25) & (reaches(y, s) <= top), u, xi) * coarse
    drawn = torch.where(risky, drawn_coarse, drawn)
    largest = torch.where(risky, mu.abs(), -1).argmax(1, keepdim=True)
    others = risky.scatter(1, largest, False)
    outside = (others & (drawn_coarse.abs() > top * fine)).any(1, keepdim=True)

    y, s, u, xi = (t.expand_as(mu).gather(1, largest) for t in (mu, v, u, xi))
    y, s = in_gaps(y, s, fine)
    n = nearest_integer(y).abs()
    possible = feasible(y, s, top + 1) & (torch.where(n == top + 1, n + 2, n) <= 2 * top) & ~outside
    alone = settle(y, s, torch.zeros_like(possible), u, xi, top + 1) * fine
    alone = torch.where(possible, alone, drawn_coarse.gather(1, largest))
    outside = outside | (alone.abs() > top * fine)
    final = torch.where(outside, drawn_coarse, drawn).scatter(1, largest, alone)
    return torch.where(risky.any(1, keepdim=True), final, drawn)


def _risky(mu: Tensor, v: Tensor, gap: Tensor, top: int) -> Tensor:
    """Which coordinates, drawn on a gap, might leave the codes -N .. N."""
    y, s = in_gaps(mu, v, gap)
    gaussian = (s > 0.25) & (reaches(y, s) <= top)
    n = nearest_integer(y)
    r = (y - n).abs()
    outward = (y.abs() > n.abs()) | (s > r * (1 - r))
    return ~gaussian & ~(feasible(y, s) & (n.abs() + outward.to(y.dtype) <= top))


def _gaps(mu: Tensor, v: Tensor, format: BlockFloat) -> tuple[Tensor, Tensor, Tensor]:
    """(fine, coarse) of each block, and which coordinates are at risk on the fine one.

    The search for the least gap on which all outcomes fit begins at one of which a bound says so.
    """
    top = float(format.top)
    largest, sigma = mu.abs().amax(1, keepdim=True), root(v)
    if sigma.dim():
        sigma = sigma.amax(1, keepdim=True)
    three = torch.maximum(largest * (SLACK / (top - 0.5)), sigma * 1.1547006)  # sqrt(4/3): s <= 3/4 is always feasible
    with_noise = (largest + sigma * NORMAL_BOUND) * (SLACK / (top - 1.5)) if top > 1 else three
    room = torch.where(sigma == 0, largest / top, torch.minimum(three, with_noise))
    canonical = format.gap_exponent(mu)
    coarse = torch.maximum(canonical, ceil_log2(room)).clamp_max(format.max_gap_exponent)
    while True:
        fine = torch.maximum(canonical, coarse - 1)
        risky = _risky(mu, v, power_of_two(fine, mu.dtype), format.top) & (fine < coarse)
        lower = (fine < coarse) & ~risky.any(1, keepdim=True)
        if not bool(lower.any()):
            break
        coarse = torch.where(lower, fine, coarse)
    nan = torch.where(largest.isnan(), torch.nan, 1.0)  # a NaN spoils its block, visibly
    return power_of_two(fine, mu.dtype) * nan, power_of_two(coarse, mu.dtype) * nan, risky


def as_printed(mu: Tensor, v: Tensor, format: Format, key: Key) -> Tensor:
    """Algorithm 2, and for block and floating formats Algorithm 5, as the paper prints them.

    Algorithm 5 recomputes Δ after the Gaussian noise, so that the variance is wrong where x leaves the binade of μ. It may
    also leave a block that needs one bit more than it has; what is then off the grid is rounded stochastically.
    """
    none = torch.zeros((), dtype=torch.bool, device=mu.device)
    mu = mu.nan_to_num(torch.nan, format.high, format.low)
    gap = format.gap(mu)
    v0 = gap * gap / 4
    x = mu + root((v - v0).clamp_min(0)) * _normal(key, mu)
    gap_x = format.gap(x)
    qd = nearest_integer(x / gap_x) * gap_x
    r = x - qd
    choice = _uniform(key, mu, random.CHOICE)
    first = qd + r.sign() * categorical(r.abs(), gap_x * gap_x / 4, gap_x, choice)

    qs = settle(mu / gap, mu.new_zeros(()), none, _uniform(key, mu), mu.new_zeros(())) * gap
    r = mu - qs
    vs = (1 - r.abs() / gap) * r * r + r.abs() / gap * (-r + r.sign() * gap) ** 2
    second = qs + torch.where(v > vs, categorical(torch.zeros_like(r), v - vs, gap, choice), 0)

    theta = clip(torch.where(v > v0, first, second), format)
    return stochastic(theta, format, _uniform(key, mu, random.LEFTOVER))


def categorical(mean: Tensor, v: Tensor, gap: Tensor, u: Tensor) -> Tensor:
    """The paper's Cat(μ, v): Δ, -Δ or 0 with the probabilities of its Equation (categorical)."""
    p_up = (v + mean * mean + mean * gap) / (2 * gap * gap)
    p_down = (v + mean * mean - mean * gap) / (2 * gap * gap)
    return torch.where(u >= 1 - p_up, gap, 0) - torch.where(u < p_down, gap, 0)


def clip(x: Tensor, format: Format) -> Tensor:
    """Into the representable range; -0 becomes 0, so that equal numbers have equal bits."""
    return x.clamp(format.low, format.high) + 0.0


def _uniform(key: Key, like: Tensor, purpose: int = random.ROUNDING) -> Tensor:
    return random.uniform(key, like.numel(), purpose, like.device).to(like.dtype).view(like.shape)


def _normal(key: Key, like: Tensor) -> Tensor:
    return random.normal(key, like.numel(), device=like.device).to(like.dtype).view(like.shape)


def quantize_values(x: Tensor, format: Format, rounding: str, key: Key, purpose: int = random.ROUNDING) -> Tensor:
    """Q^d or Q^s of a float32 or float64 tensor, random bits from the key."""
    if format == FP32 and x.dtype == torch.float32:
        return x.clone()
    return nearest(x, format) if rounding == "nearest" else stochastic(x, format, _uniform(key, x, purpose))


def corrected_values(mu: Tensor, v: Tensor, format: Format, algorithm: str, key: Key) -> Tensor:
    """Q^vc of a float32 or float64 tensor, random bits from the key."""
    if format == FP32:  # the arithmetic's own precision: nothing to correct
        return quantize_values(mu + root(v) * _normal(key, mu), format, "nearest", key)
    if algorithm == "paper":
        return as_printed(mu, v, format, key)
    return exact(mu, v, format, _uniform(key, mu), _normal(key, mu))
