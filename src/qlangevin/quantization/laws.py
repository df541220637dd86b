"""Random rounding on the integers: the one law that Q^s and Q^vc of every format are made of.

Lengths are measured in gaps: a number μ becomes y = μ/Δ, a variance v becomes s = v/Δ², and the grid becomes the integers.
Between the integers n - 1, n, n + 1 the number y = n + r can be split in many ways that keep its mean. Stochastic rounding
is the one with the least variance, v_s = |r| (1 - |r|); to reach a larger variance s, move the probability (s - v_s)/2
from n to each neighbour (see `outcomes`). So

    Q^s(μ)      n is the nearest integer, variance v_s
    Q^vc(μ, v)  v <= v_0 = Δ²/4: the same with variance max(v, v_s)
                v >  v_0: first add Gaussian noise of variance v - v_0, then reach exactly v_0

has the mean and variance of Algorithm 2 in fewer random numbers, and Q^s(μ) = Q^vc(μ, 0).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .random import NORMAL_BOUND, root

__all__ = ["Law", "feasible", "in_gaps", "nearest_integer", "outcomes", "reaches", "settle"]

V0 = 0.25  # v_0 = Δ²/4 in squared gaps, the largest variance of stochastic rounding
FAR = 2.0**30  # in gaps: further out than any code, near enough to compute with
WIDE = 2.0**54  # in squared gaps: the variance of noise that reaches nearly as far
SLACK = 1 + 2.0**-20  # covers the rounding of float32 where a bound has to hold strictly


def nearest_integer(x: Tensor) -> Tensor:
    """Return the nearest integer, half away from zero: trunc(x), and one more where the rest is at least a half."""
    integer = x.trunc()
    rest = x - integer
    return integer + (rest + rest).trunc()


def outcomes(r: Tensor, s: Tensor, below: Tensor | float = 1.0, above: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Return (P(n - below), P(n + above)) of the law on {n - below, n, n + above} with mean n + r and variance max(s, v_s).

    Equation (categorical) of the paper in another arrangement: with below = above = 1 the two are the negative and the
    positive part of r, plus (s - v_s)/2 each. A law of three points reaches variances up to (below + r)(above - r).
    """
    up, down = r.clamp_min(0), (-r).clamp_min(0)
    least = up * (above - up) + down * (below - down)  # v_s, the variance of stochastic rounding
    room = (1 - up / above - down / below) * (below * above)  # the rest of P(n), as variance
    extra = torch.minimum((s - least).clamp_min(0), room)
    return down / below + extra / (below * (below + above)), up / above + extra / (above * (below + above))


def settle(y: Tensor, s: Tensor, gaussian: Tensor, u: Tensor, xi: Tensor, wide_at: float = FAR) -> Tensor:
    """Draw Q^vc on the integers: lines 3-9 of Algorithm 2 where ``gaussian``, lines 10-20 in three outcomes elsewhere.

    At ±wide_at the grid changes: the neighbour further from zero is two away.
    """
    start = y.trunc()  # y = start + rest exactly, so that the noise meets a small number and keeps its digits
    noise = torch.where(gaussian, root((s - V0).clamp_min(0)), 0) * xi
    x = (y - start) + noise  # line 4: x <- μ + sqrt(v - v_0) ξ
    offset = nearest_integer(x)
    n, r = start + offset, x - offset  # line 5: r <- x - Q^d(x)
    above, below = 1.0 + (n == wide_at).to(y.dtype), 1.0 + (n == -wide_at).to(y.dtype)
    p_down, p_up = outcomes(r, torch.where(gaussian, V0, s), below, above)  # lines 7 and 15, sign(r) included
    return n + torch.where(u >= 1 - p_up, above, torch.where(u < p_down, -below, 0))  # lines 9 and 16


def in_gaps(mu: Tensor, v: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y, s), value and variance in units of the gap; infinities become finite."""
    return (mu / gap).clamp(-FAR, FAR), (v / gap / gap).clamp_max(WIDE)


def reaches(y: Tensor, s: Tensor) -> Tensor:
    """Return a bound on |outcome| if the Gaussian part is drawn: |ξ| <= `NORMAL_BOUND`."""
    return y.abs() + root(s) * NORMAL_BOUND + 1.5


def feasible(y: Tensor, s: Tensor, wide_at: float = FAR) -> Tensor:
    """Return a mask: True where three outcomes around y can have the variance s."""
    n = nearest_integer(y)
    r = (y - n) * torch.where(n < 0, -1.0, 1.0)  # away from zero is up
    return s <= (1 + r) * (1 + (n.abs() == wide_at).to(y.dtype) - r)


class Law(NamedTuple):
    """Law of Q^vc for every coordinate of a tensor on a given gap: a draw is `settle` (y, s) times the gap."""

    gap: Tensor  # Δ
    y: Tensor  # μ/Δ
    s: Tensor  # v/Δ²
    gaussian: Tensor  # True where Gaussian noise is added (line 3 of Algorithm 2)
    wide_at: float = FAR  # the integer beyond which the grid has every second integer only

    @classmethod
    def on(cls, mu: Tensor, v: Tensor, gap: Tensor, top: float | None = None) -> Law:
        """Return the law on a gap; Gaussian noise is added only where no outcome exceeds ``top`` gaps."""
        y, s = in_gaps(mu, v, gap)
        gaussian = s > V0
        return cls(gap, y, s, gaussian if top is None else gaussian & (reaches(y, s) <= top))

    def draw(self, u: Tensor, xi: Tensor) -> Tensor:
        """Return the outcome for uniform numbers u and normal numbers ξ."""
        return settle(self.y, self.s, self.gaussian, u, xi, self.wide_at) * self.gap
