"""Bands of f(x): how wide a sampler's are compared with those of the reference, and how much of the reference they cover."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

from .methods import Method
from .reference import LEVELS, Reference
from .regression import Sampled

__all__ = ["Band", "compare_with_exact", "compare_with_reference"]

Z = 1.959964  # half the width of a band of 95 %, in standard deviations


@dataclass(frozen=True, eq=False)
class Band:
    """Mean and standard deviation of f on the grid; the band is mean ± 1.96 sd."""

    method: Method
    mean: Tensor
    sd: Tensor
    width: float
    """Mean over the grid of sd over that of the reference."""
    width_error: float
    """Standard error of the width, from the spread between groups of chains."""
    coverage: float
    """Probability under the reference that f(x) is inside the band, averaged over the grid; 95 % if the band is right."""


def compare_with_exact(sampled: Sampled, mean: Tensor, sd: Tensor) -> Band:
    """Compare with a Gaussian posterior that is known."""
    found, spread = _moments(sampled)
    low, high = (found - Z * spread - mean) / sd, (found + Z * spread - mean) / sd
    normal = Normal(0.0, 1.0)
    coverage = float((normal.cdf(high) - normal.cdf(low)).mean())
    return Band(sampled.method, found, spread, *_width(sampled, sd), coverage)


def compare_with_reference(sampled: Sampled, reference: Reference) -> Band:
    """Compare with quantiles of HMC."""
    found, spread = _moments(sampled)
    below, above = (_level(found + side * Z * spread, reference.quantiles) for side in (-1, 1))
    return Band(sampled.method, found, spread, *_width(sampled, reference.sd), float((above - below).mean()))


def _moments(sampled: Sampled) -> tuple[Tensor, Tensor]:
    flat = sampled.values.flatten(0, 1)
    return flat.mean(0), flat.std(0)


def _width(sampled: Sampled, sd: Tensor, groups: int = 8) -> tuple[float, float]:
    """Return the mean ratio of standard deviations, and its standard error by the jackknife over groups of chains."""
    parts = sampled.values.chunk(groups)
    without = torch.stack(
        [
            (torch.cat([p for j, p in enumerate(parts) if j != i]).flatten(0, 1).std(0) / sd).mean()
            for i in range(groups)
        ]
    )
    error = ((groups - 1) * without.var(correction=0)).sqrt()
    return float((_moments(sampled)[1] / sd).mean()), float(error)


def _level(values: Tensor, quantiles: Tensor) -> Tensor:
    """Return the level of a value at each point of the grid, by linear interpolation between quantiles."""
    place = torch.searchsorted(quantiles.T.contiguous(), values[:, None]).squeeze(1)
    upper = place.clamp(1, len(LEVELS) - 1)
    lower, points = upper - 1, torch.arange(len(values))
    a, b = quantiles[lower, points], quantiles[upper, points]
    level = LEVELS[lower] + (LEVELS[upper] - LEVELS[lower]) * ((values - a) / (b - a)).clamp(0, 1)
    return torch.where(place == 0, 0.0, torch.where(place == len(LEVELS), 1.0, level))
