"""Differences between scores over seeds: which ones count, by Welch's t test.

Two or three seeds are too few for "two standard errors": of equal methods with three seeds each, 12 % differ by more. Welch's
test allows for how uncertain such standard errors are, and for methods that scatter differently. With means a and b, standard
errors e_a and e_b, and n_a and n_b seeds, chance explains differences of at most

    t(ν) e        e² = e_a² + e_b²        ν = e⁴ / (e_a⁴ / (n_a - 1) + e_b⁴ / (n_b - 1))

where t(ν) is the quantile of Student's distribution that |t| exceeds with a probability of 5 %. Runs with the same seed share
initial weights and the order of data. Where this makes their scores alike, fewer than 5 % of equal methods exceed the limit.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from .summary import Estimate

__all__ = ["LEVEL", "NEAR", "Verdict", "limit", "lower", "matches"]

Verdict: TypeAlias = Literal["holds", "does not hold", "undecided"]

LEVEL = 0.05
NEAR = 0.02  # of a score: a difference that does not matter


def limit(a: Estimate, b: Estimate, level: float = LEVEL) -> float:
    """Return the largest difference that chance explains; infinite if a or b has a single seed."""
    from scipy.special import stdtrit  # takes a moment

    if a.error is None or b.error is None:
        return math.inf
    variances = a.error**2, b.error**2
    if not sum(variances):
        return 0.0
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / (a.seeds - 1) + variances[1] ** 2 / (b.seeds - 1))
    return float(stdtrit(freedom, 1 - level / 2)) * math.sqrt(sum(variances))


def lower(a: Estimate, b: Estimate, level: float = LEVEL) -> Verdict:
    """Judge whether a is below b."""
    gap = b.mean - a.mean
    if abs(gap) <= limit(a, b, level):
        return "undecided"
    return "holds" if gap > 0 else "does not hold"


def matches(a: Estimate, b: Estimate) -> Verdict:
    """Judge whether a exceeds b by at most 2 % of b: whether the 95 % interval of a - b lies below that, or above."""
    gap, chance, slack = a.mean - b.mean, limit(a, b), NEAR * b.mean
    if gap + chance <= slack:
        return "holds"
    return "does not hold" if gap - chance > slack else "undecided"
