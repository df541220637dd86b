"""What a low-precision chain converges to: its exact stationary law on the grid, without sampling.

In one dimension and on a finite grid SGLD with low-precision accumulators is a Markov chain with finitely many states.
From the grid point θ one step aims at a Gaussian of mean μ = θ - α U'(θ) and variance v = 2αT, and rounds it:

    nearest      θ' = Q^d(μ + √v ξ)
    stochastic   θ' = Q^s(μ + √v ξ)     naive SGLDLP-L
    corrected    θ' = Q^vc(μ, v)        VC SGLDLP-L

All three round with weights that are polynomials of degree 0, 1 or 2 between fixed edges, so that each transition
probability P(θ, θ') is a sum of truncated moments ∫ (t - a)^k φ(t) dt. The law π solves π P = π.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from .formats import FixedPoint, Float, Format, parse, power_of_two
from .random import NORMAL_BOUND
from .rounding import FAR, SLACK, ceil_log2, feasible, in_gaps, nearest_integer, outcomes, reaches

__all__ = ["Gaussian", "Method", "Stationary", "Target", "grid", "stationary", "transition", "wasserstein2"]

Method: TypeAlias = Literal["corrected", "stochastic", "nearest"]
MAX_POINTS = 5000
TAIL = 8.0  # |z| beyond which an integral over a standard Gaussian is neglected: probability 1e-15
REACH, NEVER = 15.0, 1e-50  # no chain ever takes a step of 15 σ: its probability is 1e-50, and counts as zero


@dataclass(frozen=True)
class Gaussian:
    """The target N(mean, std²)."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std > 0):
            raise ValueError(f"a Gaussian needs a finite mean and a positive finite std, got {self!r}")


Target: TypeAlias = Gaussian | Callable[[Tensor], Tensor]  # the callable is the quantile function F^-1(u)


@dataclass(frozen=True, eq=False)
class Stationary:
    """The law a chain converges to: ``probabilities`` on ``points``, both float64."""

    format: Format
    stepsize: float
    method: Method
    points: Tensor
    probabilities: Tensor
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
            raise ValueError(
                "w2 needs a target; pass target=Gaussian(mean, std) or a quantile function to stationary()"
            )
        return wasserstein2(self.points, self.probabilities, self.target)


def standard_gaussian(x: Tensor) -> Tensor:
    """U'(θ) = θ, the gradient of the energy of N(0, 1)."""
    return x


def stationary(
    format: Format | str,
    stepsize: float,
    method: Method = "corrected",
    gradient: Callable[[Tensor], Tensor] = standard_gaussian,
    temperature: float = 1.0,
    target: Target | None = None,
) -> Stationary:
    """The stationary law of θ' = Q(θ - α U'(θ), 2αT), exact up to float64.

    ``gradient`` is U', applied to all grid points at once. ``target`` is what `Stationary.w2` compares with; for the
    default gradient it is N(0, T).
    """
    if target is None and gradient is standard_gaussian:
        target = Gaussian(0.0, math.sqrt(max(temperature, 0.0)) or 1.0)
    format = parse(format)
    matrix = transition(format, stepsize, method, gradient, temperature)
    inside = _closed_class(matrix > 0, stepsize, method)
    probabilities = torch.zeros(len(matrix), dtype=torch.float64)
    probabilities[inside] = _solve(matrix[inside][:, inside])
    residual = float((probabilities @ matrix - probabilities).abs().max())
    if not residual < 1e-12:
        raise ArithmeticError(
            f"the stationary law of {format} at stepsize={stepsize} was not found: |πP - π| = {residual}"
        )
    return Stationary(format, stepsize, method, grid(format), probabilities, target)


def grid(format: Format | str) -> Tensor:
    """All numbers of the format in increasing order, as float64; at most `MAX_POINTS` of them."""
    format = parse(format)
    if not isinstance(format, (FixedPoint, Float)):
        raise ValueError(
            f"format must be fixed or floating point, such as fixed8.3 or e4m3, got {format}: how an element of a block "
            "moves depends on the others, so that it has no law of its own"
        )
    if isinstance(format, FixedPoint):
        count = 2**format.bits
    else:
        count = 2 * (format.emax - format.emin + 2) * 2**format.man - 1
    if count > MAX_POINTS:
        raise ValueError(
            f"format must have at most {MAX_POINTS} numbers, {format} has about {count}; "
            "use at most 12 bits of fixed point, or a small float such as e4m3"
        )
    if isinstance(format, FixedPoint):
        return torch.arange(-(count // 2), count // 2, dtype=torch.float64) * format.step
    binades = torch.arange(format.emin, format.emax + 1, dtype=torch.int32)
    normal = torch.arange(2**format.man, 2 ** (format.man + 1), dtype=torch.float64)
    positive = (power_of_two(binades - format.man, torch.float64)[:, None] * normal).reshape(-1)
    subnormal = torch.arange(1, 2**format.man, dtype=torch.float64) * 2.0**format.min_gap_exponent
    positive = torch.cat((subnormal, positive[positive <= format.high]))
    return torch.cat((-positive.flip(0), positive.new_zeros(1), positive))


def transition(
    format: Format | str,
    stepsize: float,
    method: Method = "corrected",
    gradient: Callable[[Tensor], Tensor] = standard_gaussian,
    temperature: float = 1.0,
) -> Tensor:
    """P(θ_i, θ_j) between the points of `grid`; what would leave the range is clipped to its ends."""
    for name, value in (("stepsize", stepsize), ("temperature", temperature)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive finite number, got {value!r}")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    format = parse(format)
    points = grid(format)
    slope = gradient(points)
    if slope.shape != points.shape or not bool(slope.isfinite().all()):
        raise ValueError(f"gradient must map {len(points)} grid points to as many finite numbers, got {slope}")
    mu, v = points - stepsize * slope.to(points.dtype), 2 * stepsize * temperature
    rows = {"nearest": _nearest_rows, "stochastic": _stochastic_rows, "corrected": _corrected_rows}[method]
    matrix = torch.zeros(len(mu), len(points), dtype=mu.dtype)
    for part in torch.arange(len(mu)).split(64):  # in parts: their neighbourhoods are small
        m = mu[part]
        reach = REACH * math.sqrt(v) + 5 * float(format.gap(m.clamp(format.low, format.high)).max())
        first = int(torch.searchsorted(points, m.min() - reach).clamp_max(len(points) - 2))
        last = int(torch.searchsorted(points, m.max() + reach).clamp_min(first + 1))
        matrix[part, first : last + 1] = rows(m, v, points[first : last + 1], format)
    return torch.where(matrix < NEVER, 0, matrix)


def _nearest_rows(mu: Tensor, v: float, points: Tensor, format: Format) -> Tensor:
    """P(θ') = probability of the cell between the midpoints to the left and to the right of θ'."""
    middle = torch.nn.functional.pad((points[1:] + points[:-1]) / 2, (1, 0), value=-math.inf)
    edges = (torch.nn.functional.pad(middle, (0, 1), value=math.inf) - mu[:, None]) / math.sqrt(v)
    return _moment(edges[:, :-1], edges[:, 1:], 0)


def _stochastic_rows(mu: Tensor, v: float, points: Tensor, format: Format) -> Tensor:
    """P(θ') = E of the tent that is 1 at θ' and 0 at its neighbours."""
    edges = (points - mu[:, None]) / math.sqrt(v)
    a, b = edges[:, :-1], edges[:, 1:]
    rows = torch.zeros_like(edges)
    rows[:, 1:] += _moment(a, b, 1) / (b - a)
    rows[:, :-1] += _moment(-b, -a, 1) / (b - a)
    rows[:, 0] += _cdf(edges[:, 0])
    rows[:, -1] += _cdf(-edges[:, -1])
    return rows


def _corrected_rows(mu: Tensor, v: float, points: Tensor, format: Format) -> Tensor:
    """The law of `rounding.exact`: three outcomes around μ, or three around each x ~ N(μ, v - Δ²/4)."""
    gap, gaussian, wide_at = _settled_grid(mu, v, format)
    y, s = in_gaps(mu, torch.full_like(mu, v), gap)
    n = nearest_integer(y)
    above, below = 1.0 + (n == wide_at).to(y.dtype), 1.0 + (n == -wide_at).to(y.dtype)
    down, up = outcomes(y - n, s, below, above)
    three = torch.stack((n - below, n, n + above), 1), torch.stack((down, 1 - down - up, up), 1)
    codes = points / format.gap(points)
    if isinstance(format, Float):
        codes = torch.arange(-format.top, format.top + 1, dtype=y.dtype)
    many = codes.expand(len(y), -1), _gaussian_codes(y, (s - 0.25).clamp_min(0).sqrt(), codes)

    rows = mu.new_zeros(len(mu), len(points))
    for chosen, (values, law) in ((~gaussian, three), (gaussian, many)):
        index = torch.searchsorted(points, (values * gap[:, None]).clamp(format.low, format.high)).clamp_max(
            len(points) - 1
        )
        rows.scatter_add_(1, index, torch.where(chosen[:, None], law, 0))
    return rows


def _settled_grid(mu: Tensor, v: float, format: Format) -> tuple[Tensor, Tensor, float]:
    """(Δ, whether Gaussian noise is added, code at which the grid widens): the choices of `rounding.exact`."""
    variance = torch.full_like(mu, v)
    if not isinstance(format, Float):
        gap = format.gap(mu)
        return gap, in_gaps(mu, variance, gap)[1] > 0.25, FAR
    sigma, top = math.sqrt(v), format.top
    room = ((mu.abs() + sigma * NORMAL_BOUND) * (SLACK / (top - 1.5))).clamp_max(sigma)
    exponent = torch.maximum(format.gap_exponent(mu), ceil_log2(room)).clamp_max(format.max_gap_exponent)
    gap = power_of_two(exponent, mu.dtype)
    y, s = in_gaps(mu, variance, gap)
    gaussian = (s > 0.25) & (reaches(y, s) <= top)
    double = ~gaussian & ~feasible(y, s, top) & (exponent < format.max_gap_exponent)
    return torch.where(double, 2 * gap, gap), gaussian, float(top)


def _gaussian_codes(y: Tensor, sigma: Tensor, codes: Tensor) -> Tensor:
    """Law of n + c for x ~ N(y, σ²), n nearest to x, P(c = ±1) = (1/2 ± (x - n))²/2; beyond the last code, that code.

    (1/2 ± r)²/2 is `rounding.outcomes` at s = 1/4: the squared distance of x from one edge of its cell.
    """
    sigma = sigma.clamp_min(1e-9)[:, None]  # rows without noise are not used, but must not divide by zero
    a, b = (codes - 0.5 - y[:, None]) / sigma, (codes + 0.5 - y[:, None]) / sigma
    up, down = (_moment(*ends, 2) * sigma.square() / 2 for ends in ((a, b), (-b, -a)))
    law = _moment(a, b, 0) - up - down
    law[:, 1:] += up[:, :-1]
    law[:, :-1] += down[:, 1:]
    law[:, 0] += down[:, 0] + _cdf(a[:, 0])
    law[:, -1] += up[:, -1] + _cdf(-b[:, -1])
    return law


def _moment(a: Tensor, b: Tensor, k: int) -> Tensor:
    """∫ (t - a)^k φ(t) dt from a to b, for k = 0, 1, 2.

    The closed form subtracts nearly equal numbers if the interval is short; there Gauss's quadrature is exact.
    """
    area = torch.where(a > 0, _cdf(-a) - _cdf(-b), _cdf(b) - _cdf(a))
    if k == 0:
        return area
    at_a, at_b = _density(a), _density(b)
    first = at_a - at_b - a * area
    closed = first if k == 1 else (1 + a * a) * area - a * at_a + (2 * a - b) * at_b
    if bool((b - a > 0.5).all()):
        return closed.clamp_min(0)
    width = (b - a).clamp_max(0.5)
    short = torch.zeros_like(a)
    for node, weight in zip(*_legendre(), strict=True):
        short += weight * (node * width) ** k * _density(a + node * width)
    return torch.where(b - a > 0.5, closed.clamp_min(0), short * width)


def _cdf(t: Tensor) -> Tensor:
    """Φ(t); torch.special.ndtr is (1 + erf)/2 and has no digits left in the lower tail."""
    return torch.special.erfc(t * -math.sqrt(0.5)) / 2


def _density(t: Tensor) -> Tensor:
    return (-0.5 * t * t).exp() / math.sqrt(2 * math.pi)


@functools.cache
def _legendre(count: int = 12) -> tuple[list[float], list[float]]:
    """Nodes and weights of Gauss's quadrature on [0, 1], from the eigenvectors of its Jacobi matrix (Golub and Welsch)."""
    k = torch.arange(1, count, dtype=torch.float64)
    off = torch.diag(k / (4 * k * k - 1).sqrt(), 1)
    values, vectors = torch.linalg.eigh(off + off.T)
    return ((values + 1) / 2).tolist(), vectors[0].square().tolist()


def _closed_class(moves: Tensor, stepsize: float, method: str) -> Tensor:
    """The states the chain ends up in; the others it leaves for ever."""
    state = len(moves) // 2
    while True:
        forward, backward = _reachable(moves, state), _reachable(moves.T, state)
        escape = forward & ~backward
        if not bool(escape.any()):
            break
        state = int(escape.nonzero()[0])  # from here there is no way back: try again further down
    if not bool(backward.all()):
        raise ValueError(
            f"stepsize={stepsize} with method={method!r} has no unique stationary law: the chain stays where it starts, the "
            "noise being too small for the gap; use a larger stepsize, a finer format, or method='corrected'"
        )
    return forward


def _reachable(moves: Tensor, start: int) -> Tensor:
    """Which states can be reached from ``start``."""
    seen = torch.zeros(len(moves), dtype=torch.bool)
    seen[start] = True
    frontier = seen.clone()
    while bool(frontier.any()):
        frontier = moves[frontier].any(0) & ~seen
        seen |= frontier
    return seen


def _solve(matrix: Tensor) -> Tensor:
    """π P = π by the elimination of Grassmann, Taksar and Heyman (1985), which never subtracts.

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
    """W_2² = Σ_i ∫ (x_i - F^-1(u))² du, over the u that lie between the sums of probabilities before and after x_i.

    ``points`` must be increasing. With u = Φ(z) a Gaussian target has a closed form in φ(z); for the quantile function of
    any other target the integral over z is done by Gauss's quadrature.
    """
    points, p = points.double(), probabilities.double()
    lower, upper = p.cumsum(0)[:-1], p.flip(0).cumsum(0).flip(0)[1:]
    z = torch.where(lower < 0.5, torch.special.ndtri(lower), -torch.special.ndtri(upper))  # exact in both tails
    if isinstance(target, Gaussian):
        z = torch.nn.functional.pad(z.clamp(-40, 40), (1, 0), value=-40.0)  # φ(40) = 0
        z = torch.nn.functional.pad(z, (0, 1), value=40.0)
        x, phi = (points - target.mean) / target.std, _density(z)
        cross, second = -phi.diff(), p - (z * phi).diff()
        return target.std * math.sqrt(max(0.0, float((x * x * p - 2 * x * cross + second).sum())))
    steps = torch.arange(-TAIL, TAIL + 0.25, 0.25, dtype=torch.float64)
    edges = torch.cat((z.clamp(-TAIL, TAIL), steps)).sort().values
    nodes, weights = (torch.tensor(t, dtype=torch.float64) for t in _legendre())
    t = edges[:-1, None] + edges.diff()[:, None] * nodes
    x = points[torch.searchsorted(z, (edges[1:, None] + edges[:-1, None]) / 2)]
    quantiles = target(_cdf(t))
    if quantiles.shape != t.shape or not bool(quantiles.isfinite().all()):
        raise ValueError("target must be a quantile function: numbers between 0 and 1 to as many finite numbers")
    squares = (x - quantiles).square() * _density(t) * edges.diff()[:, None] * weights
    return math.sqrt(float(squares.sum()))
