"""All comparisons. Each kind has its part of the time; cases that would begin later are left out."""

from __future__ import annotations

import time
from collections.abc import Iterator

from .comparing import Comparison, Place, compare
from .operations import Shapes, code_cases, corrected_cases, quantize_cases
from .training import beside_cases, chain_cases, network_cases, step_cases

__all__ = ["comparisons"]

# Rows shorter and longer than a warp and than a program, tensors that end in the middle of one, a vector.
LARGE: Shapes = ((5, 577), (3, 64), (2, 4099), (1025,))
SMALL: Shapes = ((3, 77), (65,))
TINY: Shapes = ((3, 20),)


def comparisons(place: Place, quick: bool, until: float) -> Iterator[Comparison]:
    """Yield the results of all comparisons; those that would begin after ``until`` are counted as left out."""
    gpu = place.path == "kernels"
    shapes = TINY if quick else LARGE if gpu else SMALL
    layers = (*shapes, (8, 3, 3, 3))
    families = {
        "quantize, stochastic": quantize_cases("stochastic", shapes),
        "encode, decode": code_cases(shapes),
        "quantize, nearest": quantize_cases("nearest", shapes),
        "lowered, packed ResNet, its chain": chain_cases(not gpu),
        "SGLD.step": step_cases(layers, quick),
        "SGLD.step, SGHMC.step with more": beside_cases(shapes),
        "lowered, packed network": network_cases(256 if gpu else 4),
        "corrected": corrected_cases(shapes),
    }
    for done, (what, cases) in enumerate(families.items()):
        now = time.monotonic()
        yield compare(what, cases, place, now + (until - now) / (len(families) - done))  # an equal part of what is left
