"""The variance that a step has on its grid, against the variance that Langevin dynamics asks for.

A step takes a weight to μ = θ + δ with noise of variance v, on a grid of gap Δ. In units of the gap μ/Δ = n + r, n the nearest
integer, and s = v/Δ². Stochastic rounding of μ has the variance v_s = |r| (1 - |r|), at most v_0 = 1/4. The step has, exactly,

    corrected    max(s, v_s)                             on the gap it is drawn on
    stochastic   s + E[v_s(x)],  x ~ N(r, s)             naive: rounding comes on top of the noise
    nearest      Var[Q^d(x)],    x ~ N(r, s)

Over s that is the inflation of the effective temperature. As |δ| is usually far below Δ, v_s/v is about |δ| Δ/v = Δ |∇U|/(2T),
the resolution: the learning rate cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..quantization.formats import parse
from ..quantization.laws import V0, Mean, in_gaps
from ..quantization.operators import Rounding

__all__ = ["Proposal", "StepVariance", "join", "measure_step"]

FEW = 0.01  # in squared gaps: up to here noise does not reach beyond the two neighbouring gaps
HARMONICS = 10  # at s = `FEW` the next one is 1e-11
WIDE = 1.0  # from here on the variance of Q^d is s + 1/12 up to 1e-8


class Proposal(NamedTuple):
    """Proposal of a step to some weights, before any grid: θ, drift δ, and variance v, a number or one for each weight.

    The others are of velocities, None without them.
    """

    theta: Tensor
    drift: Tensor
    variance: Tensor
    noise: Tensor | None = None
    """Noise of SGLD at the same learning rate, 2 lr T / N, most of which comes by way of the velocity."""
    slope: Tensor | None = None
    """Drift of SGLD at the same learning rate."""
    heat: Tensor | None = None
    """Variance added to the weights in each step that would double their temperature; of SGLD it is the noise itself."""
    warmer: Tensor | None = None
    """Inflation, less 1, that rounding the velocities adds."""

    @property
    def noisy(self) -> bool:
        """True if the step adds noise, be it by way of the velocity alone."""
        return float((self.variance if self.noise is None else self.noise).max()) > 0

    @property
    def noisy_by_velocity_alone(self) -> bool:
        """True if all noise comes by way of the velocity: given it, a weight draws none that its grid could be compared with."""
        return self.noisy and not float(self.variance.max()) > 0

    def scaled(self, factor: float) -> Proposal:
        """Return the proposal of SGLD at another learning rate: drift and variance are proportional to it."""
        return Proposal(self.theta, self.drift * factor, self.variance * factor)

    def with_row(self, row: Tensor) -> Proposal:
        """Return the proposal with one more row of weights, which do not move: blocks of whole tensors take gaps from it."""

        def extend(t: Tensor | None, last: Tensor | None = None) -> Tensor | None:
            if t is None or t.dim() == 0:
                return t
            return torch.cat((t, t.amax().expand_as(row) if last is None else last))

        still = torch.zeros_like(row)
        theta, drift = torch.cat((self.theta, row)), torch.cat((self.drift, still))
        variance, noise, heat = extend(self.variance), extend(self.noise), extend(self.heat)
        slope, warmer = extend(self.slope, still), extend(self.warmer, still)
        return Proposal(theta, drift, cast(Tensor, variance), noise, slope, heat, warmer)


def join(proposals: Sequence[Proposal], count: int) -> Proposal:
    """Return the first ``count`` rows of each proposal, and what the first has after them."""

    def cat(each: Sequence[Tensor | None]) -> Tensor | None:
        if (first := each[0]) is None or first.dim() == 0:
            return first
        return torch.cat([*(t[:count] for t in each if t is not None), first[count:]])

    return Proposal(*(cat(each) for each in zip(*proposals, strict=True)))  # type: ignore[arg-type]


class StepVariance(NamedTuple):
    """A step on its grid, for each weight."""

    gap: Tensor  # Δ; 0 where there is no grid
    drift: Tensor  # δ
    slope: Tensor  # -lr G ∇loss: δ, but for what velocities add to it
    noise: Tensor  # by which the step heats the chain: v, but for what comes by way of velocities
    s: Tensor  # v/Δ²; v_s, variance and heat are in the same units
    v_s: Tensor
    variance: Tensor
    heat: Tensor
    warmer: Tensor  # what rounding the velocities adds to the inflation

    @property
    def inflation(self) -> Tensor:
        """The effective temperature over the one asked for; without noise the ratio is infinite."""
        return 1 + (self.variance - self.s) / self.heat.clamp_min(1e-300) + self.warmer

    @property
    def above(self) -> Tensor:
        """True where v > v_0: any drift is drawn with the right variance."""
        return self.s > V0

    @property
    def below(self) -> Tensor:
        """True where v < v_s: no unbiased rounding to this grid has as little variance as v."""
        return ~self.above & (self.s < self.v_s)


def measure_step(proposal: Proposal, format: str | None, rounding: Rounding) -> StepVariance:
    """Return gap and variance of a step of each weight; without a format there is no grid, and no inflation."""
    theta, drift, v, noise, slope, heat, warmer = proposal
    noise = (v if noise is None else noise).double().expand_as(theta)
    zero, one = torch.zeros_like(theta), torch.ones_like(theta)
    slope, warmer = (drift if slope is None else slope), (zero if warmer is None else warmer)
    if format is None:
        return StepVariance(zero, drift, slope, noise, one, zero, one, one, warmer)
    mu = Mean(theta, drift)
    gap = parse(format).drawn_gap(mu, v if rounding == "corrected" else torch.zeros_like(v))
    point, s = in_gaps(mu, v, gap)
    r, s = point.nearest()[1].double().abs(), s.double().expand_as(theta)
    v_s = r * (1 - r)
    if rounding == "corrected":
        variance = torch.maximum(s, v_s)
    elif rounding == "stochastic":
        variance = s + mean_rounding_variance(r, s)
    else:
        variance = nearest_variance(r, s)
    warmth = s if heat is None else in_gaps(mu, heat, gap)[1].double().expand_as(theta)
    return StepVariance(gap.double(), drift.double(), slope.double(), noise, s, v_s, variance, warmth, warmer.double())


def mean_rounding_variance(r: Tensor, s: Tensor) -> Tensor:
    """Return E[u (1 - u)], u the distance of x ~ N(r, s) from the integer below it, for |r| <= 1/2.

    Where s is small it is E|x| - E[x²]; elsewhere its Fourier series 1/6 - Σ_k cos(2πk r) exp(-2π²k² s)/(π²k²).
    """
    few = s.clamp_max(FEW)
    sigma = few.sqrt()
    z = r / sigma.clamp_min(1e-150)
    folded = sigma * math.sqrt(2 / math.pi) * torch.exp(-z * z / 2) + r * torch.erf(z * math.sqrt(0.5))
    near = folded - (r * r + few)
    wide = torch.full_like(s, 1 / 6)
    for k in range(1, HARMONICS + 1):
        decay = torch.exp(-2 * (math.pi * k) ** 2 * s.clamp_min(FEW))
        wide = wide - torch.cos(2 * math.pi * k * r) * decay / (math.pi * k) ** 2
    return torch.where(s < FEW, near, wide)


def nearest_variance(r: Tensor, s: Tensor) -> Tensor:
    """Return the variance of the integer nearest to x ~ N(r, s), |r| <= 1/2."""
    sigma = s.clamp(1e-150, WIDE).sqrt()
    first = second = torch.zeros_like(s)
    for n in range(-9, 10):
        upper, lower = ((n + side - r) / sigma * math.sqrt(0.5) for side in (0.5, -0.5))
        p = torch.where(lower > 0, torch.erfc(lower) - torch.erfc(upper), torch.erfc(-upper) - torch.erfc(-lower)) / 2
        first, second = first + n * p, second + n * n * p
    return torch.where(s < WIDE, second - first.square(), s + 1 / 12)
