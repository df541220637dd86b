"""Properties of the chains that are known without sampling.

`stationary`  the exact law a chain on a finite grid converges to, and its distance to the target: one dimension
`gaussian`    the exact law of SGLD and SGHMC in full precision on a Gaussian, at steps of finite length: any dimension
`bounds`      Theorems 1, 2 and 3 of the paper: how far from the target a chain can be at most, in any dimension
"""

from __future__ import annotations

from .bounds import Algorithm, Bits, Bound, Constants, Theorem3, best_stepsize, bits_needed, bound
from .gaussian import GaussianLaw, NoiseLaw, Update, gaussian
from .stationary import Method, Stationary, Target, grid, stationary, wasserstein2

__all__ = [
    "Algorithm",
    "Bits",
    "Bound",
    "Constants",
    "GaussianLaw",
    "Method",
    "NoiseLaw",
    "Stationary",
    "Target",
    "Theorem3",
    "Update",
    "best_stepsize",
    "bits_needed",
    "bound",
    "gaussian",
    "grid",
    "stationary",
    "wasserstein2",
]
