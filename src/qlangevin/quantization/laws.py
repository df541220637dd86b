"""Random rounding on the integers: the one law that Q^s and Q^vc of every format are made of.

Lengths are measured in gaps: a number μ becomes y = μ/Δ, a variance v becomes s = v/Δ², and the grid becomes the integers.
Between the integers n - 1, n, n + 1 the number y = n + r can be split in many ways that keep its mean. Stochastic rounding
is the one with the least variance, v_s = |r| (1 - |r|); to reach a larger variance s, move the probability (s - v_s)/2
from n to each neighbour (see `outcomes`). So

    Q^s(μ)      n is the nearest integer, variance v_s
    Q^vc(μ, v)  v <= v_0 = Δ²/4: the same with variance max(v, v_s)
                v >  v_0: first add Gaussian noise of variance v - v_0, then reach exactly v_0

has the mean and variance of Algorithm 2 in fewer random numbers, and Q^s(μ) = Q^vc(μ, 0).

Floating point. The law only needs a grid that has n - 1, n and n + 1, not one of integers: any such n with r = y - n, |r| <= 1/2,
gives mean y and variance s, if s >= |r| (1 - |r|). The floats around y are finer than the widest gap that noise can reach, so n
is the nearest of the finest multiples of 1/parts that have their neighbours one away on the grid, too (see `parts`).

Digits. A step moves a weight θ, a large integer of gaps, by a drift that can be a billionth of a gap; their sum in float32 would
lose it. So a mean is a pair (`Mean`), in gaps an integer and a rest (`Point`), and the random numbers h that are compared with
probabilities have all their digits near zero (`random.centered`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .random import NORMAL_BOUND, root

__all__ = [
    "Law",
    "Mean",
    "Point",
    "feasible",
    "in_gaps",
    "nearest_integer",
    "outcomes",
    "parts",
    "pick",
    "reaches",
    "settle",
]

V0 = 0.25  # v_0 = Δ²/4 in squared gaps, the largest variance of stochastic rounding
FAR = 2.0**30  # in gaps: further out than any code, near enough to compute with
WIDE = 2.0**54  # in squared gaps: the variance of noise that reaches nearly as far
SLACK = 1 + 2.0**-20  # covers the rounding of float32 where a bound has to hold strictly


class Mean(NamedTuple):
    """A mean μ = start + move: where a weight is, and its drift; without a drift the move is None."""

    start: Tensor
    move: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """μ, rounded: near enough to choose a gap."""
        return self.start if self.move is None else self.start + self.move

    def map(self, f: Callable[[Tensor], Tensor]) -> Mean:
        """Return the mean with a function applied to both parts."""
        return Mean(f(self.start), None if self.move is None else f(self.move))


class Point(NamedTuple):
    """A number in gaps, y = whole + rest: an integer, and a rest that keeps its digits beside it."""

    whole: Tensor
    rest: Tensor

    @property
    def y(self) -> Tensor:
        """The number itself, rounded."""
        return self.whole + self.rest

    def nearest(self, parts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (n, r): the nearest integer, or multiple of 1/parts, a power of two; and y - n with all its digits."""
        offset = nearest_integer(self.rest) if parts is None else nearest_integer(self.rest * parts) / parts
        return self.whole + offset, self.rest - offset


def nearest_integer(x: Tensor) -> Tensor:
    """Return the nearest integer, half away from zero: trunc(x), and one more where the rest is at least a half."""
    integer = x.trunc()
    rest = x - integer
    return integer + (rest + rest).trunc()


def in_gaps(mu: Mean, v: Tensor, gap: Tensor) -> tuple[Point, Tensor]:
    """Return mean and variance in units of the gap; infinities become finite."""
    y = (mu.start / gap).clamp(-FAR, FAR)
    whole = y.trunc()
    rest = y - whole  # exactly
    if mu.move is not None:
        rest = rest + (mu.move / gap).clamp(-FAR, FAR)
    return Point(whole, rest), (v / gap / gap).clamp_max(WIDE)


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


def pick(p_down: Tensor, p_up: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks (down, up) that have these probabilities for h uniform between -1/2 and 1/2.

    Up where 0 < h < p_up, down where 0 < -h < p_down; what a probability has beyond 1/2 is at the other end.
    """
    up = ((h > 0) & (h < p_up)) | (h < p_up - 1)
    down = ((h < 0) & (-h < p_down)) | (-h < p_down - 1)
    return down, up


def parts(point: Point, top: float, finest: Tensor) -> Tensor:
    """Return the power of two, 1 <= parts <= finest, for which multiples n of 1/parts near y are floats, as are n ± 1.

    A float in the binade of z has ``top`` gaps to the binade's end, so 1/parts is the gap at z = |y| + 1. Where a rest has
    cancelled a large integer, and with it the digits, 1/parts is no less than the digits allow: |rest| · parts < 2^23.
    """
    z = torch.maximum(point.y.abs() + 1, point.rest.abs() * (top * 2.0**-23))
    exponent = torch.frexp(z).exponent  # z < 2^exponent <= 2 z
    return torch.minimum(torch.ldexp(torch.full_like(z, top), -exponent).clamp_min(1), finest)


def settle(
    point: Point,
    s: Tensor,
    gaussian: Tensor,
    h: Tensor,
    xi: Tensor,
    wide_at: float = FAR,
    finest: Tensor | None = None,
) -> Tensor:
    """Draw Q^vc on the integers: lines 3-9 of Algorithm 2 where ``gaussian``, lines 10-20 in three outcomes elsewhere.

    At ±wide_at the grid changes: the neighbour further from zero is two away. With ``finest`` the grid is that of a float
    with wide_at gaps to the end of a binade, whose least gap is 1/finest.
    """
    noise = torch.where(gaussian, root((s - V0).clamp_min(0)), 0) * xi
    x = Point(point.whole, point.rest + noise)  # line 4: x <- μ + sqrt(v - v_0) ξ
    n, r = x.nearest(None if finest is None else parts(x, wide_at, finest))  # line 5: r <- x - Q^d(x)
    above, below = 1.0 + (n == wide_at).to(n.dtype), 1.0 + (n == -wide_at).to(n.dtype)
    p_down, p_up = outcomes(r, torch.where(gaussian, V0, s), below, above)  # lines 7 and 15, sign(r) included
    down, up = pick(p_down, p_up, h)
    return n + torch.where(up, above, torch.where(down, -below, 0))  # lines 9 and 16


def reaches(y: Tensor, s: Tensor) -> Tensor:
    """Return a bound on |outcome| if the Gaussian part is drawn: |ξ| <= `NORMAL_BOUND`."""
    return y.abs() + root(s) * NORMAL_BOUND + 1.5


def feasible(n: Tensor, r: Tensor, s: Tensor, wide_at: float = FAR) -> Tensor:
    """Return a mask: True where three outcomes around n + r, n the nearest integer, can have the variance s."""
    outwards = r * torch.where(n < 0, -1.0, 1.0)  # away from zero is up
    return s <= (1 + outwards) * (1 + (n.abs() == wide_at).to(r.dtype) - outwards)


class Law(NamedTuple):
    """Law of Q^vc for every coordinate of a tensor on a given gap: a draw is `settle` (point, s) times the gap."""

    gap: Tensor  # Δ
    point: Point  # μ/Δ
    s: Tensor  # v/Δ²
    gaussian: Tensor  # True where Gaussian noise is added (line 3 of Algorithm 2)
    wide_at: float = FAR  # the integer beyond which the grid has every second integer only
    finest: Tensor | None = (
        None  # floats: Δ over the least gap that numbers nearer to zero have; None: all have the same
    )

    @classmethod
    def on(cls, mu: Mean, v: Tensor, gap: Tensor, top: float | None = None) -> Law:
        """Return the law on a gap; Gaussian noise is added only where no outcome exceeds ``top`` gaps."""
        point, s = in_gaps(mu, v, gap)
        gaussian = s > V0
        return cls(gap, point, s, gaussian if top is None else gaussian & (reaches(point.y, s) <= top))

    def nearest(self) -> tuple[Tensor, Tensor]:
        """Return (n, r) without Gaussian noise: the number that outcomes are around, and μ/Δ - n."""
        return self.point.nearest(None if self.finest is None else parts(self.point, self.wide_at, self.finest))

    def draw(self, h: Tensor, xi: Tensor) -> Tensor:
        """Return the outcome for centered numbers h and normal numbers ξ."""
        return settle(self.point, self.s, self.gaussian, h, xi, self.wide_at, self.finest) * self.gap
