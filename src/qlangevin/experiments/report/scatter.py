"""Scatter of scores over seeds, and the difference between two scores that it does not explain.

Two or three seeds of a method are too few to estimate its own standard error: of methods that are equal, with three seeds each,
12 % differ by more than two standard errors. But methods in one format scatter alike, in proportion to their scores. So the
relative variance is pooled over them. With the score x_ij of method i and seed j,

    c² = Σ_i Σ_j (x_ij / x̄_i - 1)² / ν        ν = Σ_i (n_i - 1)

a difference counts if |a - b| > t(ν) c √(a²/n_a + b²/n_b), where t is the quantile of Student's distribution that chance exceeds
in 5 % of all comparisons. A method with a single seed is judged by the scatter of the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from .summary import Cells, Estimate

__all__ = ["LEVEL", "Scatter", "pool_scatter"]

LEVEL = 0.05


class Scatter(NamedTuple):
    """Standard deviation over seeds as a part of the score, and its degrees of freedom."""

    relative: float
    freedom: int

    def error(self, a: Estimate, b: Estimate) -> float:
        """Return the standard error of the difference of two scores."""
        return self.relative * math.hypot(a.mean / math.sqrt(a.seeds), b.mean / math.sqrt(b.seeds))

    def limit(self, a: Estimate, b: Estimate) -> float:
        """Return the largest difference that is put down to chance."""
        from scipy.special import stdtrit  # takes a moment

        return float(stdtrit(self.freedom, 1 - LEVEL / 2)) * self.error(a, b)


def pool_scatter(cells: Cells, formats: Collection[str], name: str) -> Scatter | None:
    """Return the scatter of a score over the seeds of all methods in these formats; None if none has two seeds."""
    total, freedom = 0.0, 0
    for (_, format), runs in cells.items():
        values = [run["scores"][name] for run in runs if name in run["scores"]] if format in formats else []
        mean = math.fsum(values) / max(1, len(values))
        if len(values) > 1 and mean > 0:
            total += math.fsum((value / mean - 1) ** 2 for value in values)
            freedom += len(values) - 1
    return Scatter(math.sqrt(total / freedom), freedom) if freedom else None
