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
from collections.abc import Iterable
from typing import Literal, TypeAlias

from .summary import Estimate

__all__ = ["LEVEL", "NEAR", "Verdict", "higher_somewhere", "limit", "lower", "matches"]

Verdict: TypeAlias = Literal["holds", "does not hold", "undecided"]

LEVEL = 0.05
NEAR = 0.02  # of a score: a difference that does not matter


def limit(a: Estimate, b: Estimate) -> float:
    """Return the largest difference that chance explains; infinite if a or b has a single seed."""
    from scipy.special import stdtrit  # takes a moment

    error, freedom = _error(a, b)
    return float(stdtrit(freedom, 1 - LEVEL / 2)) * error if 0 < error < math.inf else error


def lower(a: Estimate, b: Estimate) -> Verdict:
    """Judge whether a is below b."""
    gap = b.mean - a.mean
    if abs(gap) <= limit(a, b):
        return "undecided"
    return "holds" if gap > 0 else "does not hold"


def matches(a: Estimate, b: Estimate) -> Verdict:
    """Judge whether a exceeds b by at most 2 % of b: whether the 95 % interval of a - b lies below that, or above."""
    gap, chance, slack = a.mean - b.mean, limit(a, b), NEAR * b.mean
    if gap + chance <= slack:
        return "holds"
    return "does not hold" if gap - chance > slack else "undecided"


def higher_somewhere(pairs: Iterable[tuple[Estimate, Estimate]]) -> bool:
    """Judge whether a is above b in one pair at least.

    Simes' test: for some k the k smallest of m probabilities p that chance makes such a difference are at most k/m of the level.
    """
    chances = sorted(_chance_of_higher(a, b) for a, b in pairs)
    return any(p <= LEVEL * k / len(chances) for k, p in enumerate(chances, 1))


def _chance_of_higher(a: Estimate, b: Estimate) -> float:
    """Return the probability that |t| is as large by chance; 1 where a is not above b."""
    from scipy.special import stdtr

    error, freedom = _error(a, b)
    gap = a.mean - b.mean
    if gap <= 0 or error == math.inf:
        return 1.0
    return 2 * float(stdtr(freedom, -gap / error)) if error else 0.0


def _error(a: Estimate, b: Estimate) -> tuple[float, float]:
    """Return the standard error of a - b and its degrees of freedom; an infinite error if a or b has a single seed."""
    if a.error is None or b.error is None:
        return math.inf, 0.0
    variances = a.error**2, b.error**2
    total = sum(variances)
    spread = variances[0] ** 2 / (a.seeds - 1) + variances[1] ** 2 / (b.seeds - 1)
    return math.sqrt(total), total**2 / spread if spread else math.inf
