"""Transition probabilities of a low-precision chain in one dimension, exact up to float64.

All methods round x = μ + √v ξ, or a part of it, with weights that are polynomials of degree 0, 1 or 2 in x between fixed edges.
So each probability P(θ, θ') is a sum of truncated moments ∫ (t - a)^k φ(t) dt.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..quantization.formats import Format
from ..quantization.laws import V0, Law, Mean, outcomes

__all__ = ["NODES", "WEIGHTS", "cdf", "density", "transition_matrix"]

REACH, NEVER = 15.0, 1e-50  # no chain ever takes a step of 15 σ: its probability is 1e-50, and counts as zero
NODES, WEIGHTS = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(12))  # for integrals over [-1, 1]


def transition_matrix(mu: Tensor, v: float, points: Tensor, format: Format, method: str) -> Tensor:
    """Return the matrix P, computed for 64 rows at a time and only between points they can reach."""
    rows = {"nearest": _nearest_rows, "stochastic": _stochastic_rows, "corrected": _corrected_rows}[method]
    matrix = torch.zeros(len(mu), len(points), dtype=torch.float64)
    for k in range(0, len(mu), 64):
        part = mu[k : k + 64]
        reach = REACH * math.sqrt(v) + 5 * float(format.gap(part.clamp(format.low, format.high)).max())
        first = int(torch.searchsorted(points, part.min() - reach).clamp_max(len(points) - 2))
        last = int(torch.searchsorted(points, part.max() + reach).clamp_min(first + 1))
        matrix[k : k + 64, first : last + 1] = rows(part, v, points[first : last + 1], format)
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
    rows[:, 0] += cdf(edges[:, 0])
    rows[:, -1] += cdf(-edges[:, -1])
    return rows


def _corrected_rows(mu: Tensor, v: float, points: Tensor, format: Format) -> Tensor:
    """P(θ') of `rounding.exact`: three outcomes around μ, or three around each x ~ N(μ, v - Δ²/4)."""
    law = format.law(Mean(mu), torch.full_like(mu, v))
    gaps = law.gap.expand_as(mu)
    rows = mu.new_zeros(len(mu), len(points))
    codes, probabilities = _three_outcomes(law)
    rows.scatter_add_(1, _columns(codes * gaps[:, None], points), probabilities)
    for gap in gaps[law.gaussian].unique():
        same = law.gaussian & (gaps == gap)
        cells = _cells(law, points / gap, None if law.finest is None else float(law.finest[same][0]))
        part = mu.new_zeros(int(same.sum()), len(points))
        for move, p in zip((-1, 0, 1), _gaussian_moves(law.point.y[same], law.s[same], cells), strict=True):
            part.index_add_(1, _columns((cells.n + move).clamp(-law.wide_at, law.wide_at) * gap, points), p)
        rows[same] = part
    return rows


def _columns(values: Tensor, points: Tensor) -> Tensor:
    """Return the columns of numbers on the grid; what is clipped, or never reached, counts as the first or the last."""
    return torch.searchsorted(points, values).clamp_max(len(points) - 1)


def _three_outcomes(law: Law) -> tuple[Tensor, Tensor]:
    """Return three codes for each row and their probabilities, zero where Gaussian noise is added."""
    n, r = law.nearest()
    below, above = 1.0 + (n == -law.wide_at).to(n.dtype), 1.0 + (n == law.wide_at).to(n.dtype)
    down, up = outcomes(r, law.s, below, above)
    probabilities = torch.where(law.gaussian[:, None], 0, torch.stack((down, 1 - down - up, up), 1))
    return torch.stack((n - below, n, n + above), 1), probabilities


class Cells(NamedTuple):
    """In gaps, numbers n and the intervals of x, one after the other, whose outcomes are n - 1, n and n + 1."""

    n: Tensor
    left: Tensor
    right: Tensor


def _cells(law: Law, points: Tensor, finest: float | None) -> Cells:
    """Return the cells of a law that lie between the first and the last point, all in gaps.

    Without ``finest`` the numbers are the integers. With it, those of `laws.parts`: n is a multiple of 1/parts, which is the same
    where |x| + 1 is in the same binade, so that cells end at |x| = 2^k - 1.
    """
    if finest is None:
        n = torch.arange(int(points[0].floor()), int(points[-1].ceil()) + 1, dtype=points.dtype)
        return Cells(n, n - 0.5, n + 0.5)
    last, binades, k = min(law.wide_at, float(points.abs().max()) + 1), [], 0
    while 2**k - 1 < last:
        low, high, width = 2**k - 1, 2 ** (k + 1) - 1, 1 / min(max(law.wide_at / 2 ** (k + 1), 1), finest)
        n = torch.arange(low, high + width, width, dtype=points.dtype)
        binades.append(Cells(n, (n - width / 2).clamp_min(low), (n + width / 2).clamp_max(high)))
        k += 1
    n, left, right = (torch.cat(parts) for parts in zip(*binades, strict=True))
    n, left, right = torch.cat((-n.flip(0), n)), torch.cat((-right.flip(0), left)), torch.cat((-left.flip(0), right))
    near = (right >= points[0] - 1) & (left <= points[-1] + 1)
    return Cells(n[near], left[near], right[near])


def _gaussian_moves(y: Tensor, s: Tensor, cells: Cells) -> tuple[Tensor, Tensor, Tensor]:
    """P(n - 1), P(n), P(n + 1) for x ~ N(y, s - 1/4) in each cell, P(n ± 1) = (1/2 ± (x - n))²/2; beyond the cells x stays.

    (1/2 ± r)²/2 is `laws.outcomes` at s = 1/4: the squared distance of x from n ∓ 1/2.
    """
    y, sigma = y[:, None], (s - V0).clamp_min(1e-18).sqrt()[:, None]
    a, b = (cells.left - y) / sigma, (cells.right - y) / sigma
    up = _square(a, b, (cells.left - cells.n + 0.5) / sigma) * sigma.square() / 2
    down = _square(-b, -a, (cells.n + 0.5 - cells.right) / sigma) * sigma.square() / 2
    stay = _moment(a, b, 0) - up - down
    stay[:, 0] += cdf(a[:, 0])
    stay[:, -1] += cdf(-b[:, -1])
    return down, stay, up


def _square(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """∫ (t - a + c)² φ(t) dt from a to b, for c >= 0."""
    square = _moment(a, b, 2)
    return square if bool((c == 0).all()) else square + 2 * c * _moment(a, b, 1) + c * c * _moment(a, b, 0)


def _moment(a: Tensor, b: Tensor, k: int) -> Tensor:
    """∫ (t - a)^k φ(t) dt from a to b, for k = 0, 1, 2.

    The closed form subtracts nearly equal numbers if the interval is short; there Gauss's quadrature is exact.
    """
    area = torch.where(a > 0, cdf(-a) - cdf(-b), cdf(b) - cdf(a))
    if k == 0:
        return area
    at_a, at_b = density(a), density(b)
    closed = at_a - at_b - a * area if k == 1 else (1 + a * a) * area - a * at_a + (2 * a - b) * at_b
    width, short = (b - a).clamp_max(0.5), torch.zeros_like(a)
    if bool((width < 0.5).any()):
        for node, weight in zip((NODES + 1) / 2, WEIGHTS / 2, strict=True):
            short += weight * (node * width) ** k * density(a + node * width) * width
    return torch.where(width < 0.5, short, closed.clamp_min(0))


def cdf(t: Tensor) -> Tensor:
    """Φ(t). (torch.special.ndtr is (1 + erf)/2, which has no digits left in the lower tail.)"""
    return torch.erfc(t * -math.sqrt(0.5)) / 2


def density(t: Tensor) -> Tensor:
    """φ(t)."""
    return torch.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)
