"""Properties of the chains that are known without sampling.

`stationary`  the exact law a chain on a finite grid converges to, and its distance to the target: one dimension
`bounds`      Theorems 1, 2 and 3 of the paper: how far from the target a chain can be at most, in any dimension
"""

from __future__ import annotations

from .bounds import Algorithm, Bits, Bound, Constants, Theorem3, best_stepsize, bits_needed, bound
from .stationary import Method, Stationary, Target, grid, stationary, wasserstein2

__all__ = [
    "Algorithm",
    "Bits",
    "Bound",
    "Constants",
    "Method",
    "Stationary",
    "Target",
    "Theorem3",
    "best_stepsize",
    "bits_needed",
    "bound",
    "grid",
    "stationary",
    "wasserstein2",
]
