"""The exact stationary law of a low-precision chain on its grid, without sampling.

In one dimension and on a finite grid SGLD with low-precision accumulators is a Markov chain with finitely many states.
From the grid point θ one step aims at a Gaussian of mean μ = θ - α U'(θ) and variance v = 2αT, and rounds it:

    nearest      θ' = Q^d(μ + √v ξ)
    stochastic   θ' = Q^s(μ + √v ξ)     naive SGLDLP-L
    corrected    θ' = Q^vc(μ, v)        VC SGLDLP-L

`transition` has the probabilities P(θ, θ') of such a step. The law π solves π P = π.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.distributions import Distribution, Normal

from .._validate import check_choice
from ..quantization.formats import Format, parse
from .transition import NODES, WEIGHTS, cdf, density, transition_matrix

__all__ = ["Method", "Stationary", "Target", "grid", "stationary", "wasserstein2"]

Method: TypeAlias = Literal["corrected", "stochastic", "nearest"]
Target: TypeAlias = (
    Distribution | Callable[[Tensor], Tensor]
)  # a distribution that has icdf, or a quantile function F^-1

MAX_POINTS = 5000


@dataclass(frozen=True, eq=False)
class Stationary:
    """Stationary law of a chain: ``probabilities`` on ``points``. ``transition[i, j]`` is P(θ_i, θ_j). All float64."""

    points: Tensor
    probabilities: Tensor
    transition: Tensor
    target: Target | None

    @property
    def mean(self) -> float:
        return float(self.probabilities @ self.points)

    @property
    def variance(self) -> float:
        return float(self.probabilities @ (self.points - self.mean) ** 2)

    @property
    def w2(self) -> float:
        """The 2-Wasserstein distance to the target."""
        if self.target is None:
            raise ValueError("w2 needs something to compare with; pass target=Normal(mean, std), say, to stationary()")
        return wasserstein2(self.points, self.probabilities, self.target)


def stationary(
    format: Format | str,
    stepsize: float,
    method: Method = "corrected",
    gradient: Callable[[Tensor], Tensor] | None = None,
    temperature: float = 1.0,
    target: Target | None = None,
) -> Stationary:
    """Return the stationary law of θ' = Q(θ - α U'(θ), 2αT), exact up to float64; θ' is clipped to the range of the format.

    ``gradient`` is U', applied to all grid points at once; by default U'(θ) = θ. ``target`` is the law that `Stationary.w2`
    compares with: one of `torch.distributions` or a quantile function; for the default gradient N(0, T).
    """
    for name, value in (("stepsize", stepsize), ("temperature", temperature)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    check_choice("method", method, get_args(Method))
    points = grid(format)
    slope = points if gradient is None else gradient(points)
    if slope.shape != points.shape or not bool(slope.isfinite().all()):
        raise ValueError(f"gradient must map {len(points)} grid points to as many finite numbers, got {slope}")
    matrix = transition_matrix(points - stepsize * slope, 2 * stepsize * temperature, points, parse(format), method)
    inside = _closed_class(matrix > 0, stepsize, method)
    pi = torch.zeros_like(points)
    pi[inside] = _solve(matrix[inside][:, inside])
    residual = float((pi @ matrix - pi).abs().max())
    if not residual < 1e-12:
        raise ArithmeticError(f"no stationary law found for {format} at stepsize={stepsize}: |πP - π| = {residual}")
    if target is None and gradient is None:
        target = Normal(0.0, torch.tensor(temperature, dtype=torch.float64).sqrt())
    return Stationary(points, pi, matrix, target)


def grid(format: Format | str) -> Tensor:
    """Return all numbers of the format in increasing order, as float64; at most `MAX_POINTS` of them."""
    format = parse(format)
    count = format.value_count
    if count is None:
        why = "where an element of a block goes depends on the others, so that it has no law of its own"
        raise ValueError(f"format must be fixed or floating point, such as fixed8.3 or e4m3, got {format}: {why}")
    if count > MAX_POINTS:
        remedy = "use at most 12 bits of fixed point, or a small float such as e4m3"
        raise ValueError(f"format must have at most {MAX_POINTS} numbers, {format} has about {count}; {remedy}")
    return format.values()


def _closed_class(moves: Tensor, stepsize: float, method: str) -> Tensor:
    """Return a mask of the states that the chain ends up in; it leaves the others for ever."""
    state = len(moves) // 2
    while True:
        forward, backward = _reachable(moves, state), _reachable(moves.T, state)
        beyond = (forward & ~backward).nonzero()  # states from which there is no way back
        if len(beyond) == 0:
            break
        state = int(beyond[0])
    if not bool(backward.all()):
        remedy = "use a larger stepsize, a finer format, or method='corrected'"
        raise ValueError(f"at stepsize={stepsize} a chain with method={method!r} stays near where it starts; {remedy}")
    return forward


def _reachable(moves: Tensor, start: int) -> Tensor:
    """Return a mask of the states that can be reached from ``start``."""
    seen = new = torch.arange(len(moves)) == start
    while bool(new.any()):
        new = moves[new].any(0) & ~seen
        seen = seen | new
    return seen


def _solve(matrix: Tensor) -> Tensor:
    """Solve π P = π by the elimination of Grassmann, Taksar and Heyman (1985), which never subtracts.

    Hence every π_i has full relative accuracy however slowly the chain moves: at α = 1e-4 P is almost the identity.
    """
    p, n = matrix.clone(), len(matrix)
    rows, columns = p.nonzero(as_tuple=True)
    band = int((rows - columns).abs().max())  # elimination fills nothing outside the band
    for k in range(n - 1, 0, -1):
        near = slice(max(0, k - band), k)
        p[near, k] /= p[k, near].sum()
        p[near, near].addr_(p[near, k], p[k, near])
    pi = torch.ones(n, dtype=p.dtype)
    for k in range(1, n):
        near = slice(max(0, k - band), k)
        pi[k] = pi[near] @ p[near, k]
        if pi[k] > 1e100:
            pi[: k + 1] /= pi[k].clone()
    return pi / pi.sum()


def wasserstein2(points: Tensor, probabilities: Tensor, target: Target) -> float:
    """Return the 2-Wasserstein distance of a law on points to a target with quantile function F^-1.

    W_2² = Σ_i ∫ (x_i - F^-1(u))² du, over the u that lie between the sums of probabilities before and after x_i. ``points`` must
    be increasing. With u = Φ(z) a Gaussian target has a closed form in φ(z); for any other the integral over z
    is done by Gauss's quadrature.
    """
    p = probabilities.double()
    lower, upper = p.cumsum(0)[:-1], p.flip(0).cumsum(0).flip(0)[1:]
    z = torch.where(lower < 0.5, torch.special.ndtri(lower), -torch.special.ndtri(upper))  # exact in both tails
    if isinstance(target, Normal):
        ends = z.new_full((1,), 40.0)  # φ(40) = 0
        z = torch.cat((-ends, z.clamp(-ends, ends), ends))
        x, phi = (points - float(target.loc)) / float(target.scale), density(z)
        square = float((x * x * p + 2 * x * phi.diff() + p - (z * phi).diff()).sum())
        return float(target.scale) * math.sqrt(max(0.0, square))
    steps = torch.linspace(-8, 8, 65, dtype=torch.float64)  # beyond 8 there is 1e-15 of the probability
    edges = torch.cat((z.clamp(-8, 8), steps)).sort().values[:, None]
    middle, half = (edges[1:] + edges[:-1]) / 2, edges.diff(dim=0) / 2
    t, x = middle + half * NODES, points[torch.searchsorted(z, middle)]
    quantiles = target.icdf(cdf(t)) if isinstance(target, Distribution) else target(cdf(t))
    if quantiles.shape != t.shape or not bool(quantiles.isfinite().all()):
        raise ValueError("target must be a quantile function: numbers between 0 and 1 to as many finite numbers")
    return math.sqrt(float(((x - quantiles).square() * density(t) * half * WEIGHTS).sum()))
