"""Models whose learning coefficients are known, 16 chains of each at once, for `llc_truths`.

The loss is K(w) = L(w) - L(w*), without noise from data. Chains are further rows of the weights: a problem takes parameters of
shape [chains · rows, columns] and returns K of each chain, so that rows keep blocks of their own in formats with exponents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["Problem", "deep_linear_coefficient", "make_problems", "reduced_rank_coefficient"]

PAIRS = 32


@dataclass(frozen=True)
class Problem:
    """A loss, its minimum w*, and what is known of it."""

    name: str
    minimum: tuple[Tensor, ...]
    """w*, a matrix for each parameter."""
    excess: Callable[[Sequence[Tensor]], Tensor]
    """K(w) of each chain, of parameters [chain, rows, columns]."""
    coefficient: float
    """λ, by theory."""
    expected: Callable[[float, float, float], float] | None = None
    """E[nβ K(w)] at finite (ε, nβ, γ), where there is a formula; else `llc_truths` simulates it."""
    at_zero_lr: Callable[[float, float], float] | None = None
    """The same for ε → 0, by quadrature, in two dimensions."""

    nbeta: float = 1000.0
    localization: float = 100.0
    lrs: tuple[float, ...] = (1e-5, 1e-4, 4e-4)
    steps: float = 0.1
    """Steps of a chain, in units of 1/lr; half of them are burn-in."""

    @property
    def size(self) -> int:
        return sum(t.numel() for t in self.minimum)


def make_problems(seed: int = 0) -> list[Problem]:
    """Return all problems."""
    generator = torch.Generator().manual_seed(seed)
    return [
        _quadratic("linear regression, d = 64", torch.ones(64), generator),
        _quadratic("quadratic form, d = 64, rank 16", (torch.arange(64) < 16).float(), generator),
        _monomial(1, 1),
        _monomial(2, 1),
        _monomial(2, 2),
        _deep_linear("reduced-rank regression 32-8-16, rank 4", (32, 8, 16), 4, generator),
        _deep_linear("deep linear network 32-8-8-8, rank 2", (32, 8, 8, 8), 2, generator),
    ]


def _quadratic(name: str, curvature: Tensor, generator: torch.Generator) -> Problem:
    minimum = torch.randn(1, len(curvature), generator=generator) * 0.3

    def excess(w: Sequence[Tensor]) -> Tensor:
        return (curvature * (w[0] - minimum).square()).sum((1, 2)) / 2

    def expected(lr: float, nbeta: float, localization: float) -> float:
        k = nbeta * curvature.double() + localization  # an AR(1) process in each direction
        return float((nbeta * curvature / (2 * k * (1 - lr * k / 4))).sum())

    return Problem(name, (minimum,), excess, float(curvature.sum()) / 2, expected)


def _monomial(a: int, b: int) -> Problem:
    """Pairs with K = x^2a y^2b around the origin; λ = min(1/2a, 1/2b) for each pair."""

    def excess(w: Sequence[Tensor]) -> Tensor:
        return (w[0][:, 0] ** (2 * a) * w[0][:, 1] ** (2 * b)).sum(1)

    @lru_cache
    def at_zero_lr(nbeta: float, localization: float) -> float:
        side = torch.linspace(0, 7 / math.sqrt(localization), 6001, dtype=torch.float64)
        side = (side[1:] + side[:-1]) / 2
        power = nbeta * side[:, None] ** (2 * a) * side[None] ** (2 * b)
        density = (-power - localization / 2 * (side[:, None] ** 2 + side[None] ** 2)).exp()
        return PAIRS * float((density * power).sum() / density.sum())

    name = f"{PAIRS} pairs x{'²⁴'[a - 1]} y{'²⁴'[b - 1]}"
    known = PAIRS * min(1 / (2 * a), 1 / (2 * b))
    lrs = (5e-5, 1e-4, 2e-4)
    return Problem(name, (torch.zeros(2, PAIRS),), excess, known, None, at_zero_lr, 1e4, 10.0, lrs, 0.6)


def _deep_linear(name: str, widths: Sequence[int], rank: int, generator: torch.Generator) -> Problem:
    """A product of matrices, of which the true one has this rank, at the point where all but the first units are zero."""
    minimum = []
    for inputs, outputs in itertools.pairwise(widths):
        w = torch.zeros(outputs, inputs)
        w[:rank, :rank] = torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0]
        minimum.append(w)

    def product(w: Sequence[Tensor]) -> Tensor:
        found = w[0]
        for each in w[1:]:
            found = each @ found
        return found

    true = product(minimum)

    def excess(w: Sequence[Tensor]) -> Tensor:
        return (product(w) - true).square().sum((1, 2)) / 2

    known = deep_linear_coefficient(widths, rank)
    return Problem(name, tuple(minimum), excess, known, None, None, 1e4, 30.0, (1e-5, 2e-5, 5e-5), 0.2)


def reduced_rank_coefficient(inputs: int, hidden: int, outputs: int, rank: int) -> float:
    """Return λ of reduced-rank regression (Aoyagi and Watanabe, 2005)."""
    m, h, n, r = inputs, hidden, outputs, rank
    if m + h < n + r:
        return (h * m - h * r + n * r) / 2
    if n + h < m + r:
        return (h * n - h * r + m * r) / 2
    if m + n < h + r:
        return m * n / 2
    whole = -((h + r) ** 2) - m**2 - n**2 + 2 * (h + r) * (m + n) + 2 * m * n
    return (whole + (m + h + n + r) % 2) / 8


def deep_linear_coefficient(widths: Sequence[int], rank: int) -> float:
    """Return λ of a deep linear network with this true rank (Aoyagi, 2024).

    With Δ_j = width_j - rank, the layers are those of the set M with l + 1 members for which, with S the sum of their Δ,
    l max Δ_j < S in M and l Δ_j >= S outside; and a = S - (ceil(S/l) - 1) l.
    """
    excess = sorted(width - rank for width in widths)
    base = (rank * (widths[0] + widths[-1]) - rank**2) / 2
    for count in range(len(excess), 1, -1):
        inside, outside, layers = excess[:count], excess[count:], count - 1
        total = sum(inside)
        if layers * inside[-1] < total and all(layers * d >= total for d in outside):
            a = total - (math.ceil(total / layers) - 1) * layers
            pairs = sum(x * y for x, y in itertools.combinations(inside, 2))
            return base + a * (layers - a) / (4 * layers) - (layers - 1) / (4 * layers) * total**2 + pairs / 2
    return base  # a layer has no more units than the rank
