"""A look at a chain now and then, for what goes wrong without an error: weights that saturate, drifts that tear a chain apart.

Looks are before steps 1, 2, 4, 8, ... and before every thousandth, which costs a long run next to nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._dtensor import local
from .._warnings import warn_once
from ..quantization.formats import parse
from ..quantization.qtensor import decoded
from .step import StepSettings

__all__ = ["Watch", "count_saturated", "is_look"]

SATURATED_SHARE = 0.01  # of a parameter's weights at an end of the range
REACHABLE = (
    2.0**64
)  # ends of a range beyond it, such as those of block floating point, are not reached by finite chains
MOST_DRIFT = 2  # times the weights: a step that moves them further than that replaces them
LEAST_DRIFT = 10  # times the noise: with less it is the noise that moves the weights


def is_look(step: int) -> bool:
    """Return True if the weights are looked at before this step."""
    return step & (step - 1) == 0 or step % 1000 == 0


def count_saturated(weights: Tensor, format: str | None) -> int:
    """Return how many weights are at an end of their format's range; None has no ends."""
    if format is None or weights.numel() == 0:
        return 0
    low, high = parse(format).low, parse(format).high
    least, most = weights.aminmax()
    if least > low and most < high:  # one pass over memory, and the usual case
        return 0
    return int(((weights >= high) | (weights <= low)).sum())


class Watch:
    """Sums over one sampler's chain, and the warnings that were given: each once."""

    def __init__(self) -> None:
        self.given: set[str] = set()
        self._drift = self._noise = self._weights = 0.0  # squared norms, summed over the parameters of one look

    def look(self, p: Tensor, gradient: Tensor, settings: StepSettings, step: int, name: str) -> None:
        """Look at one parameter before a step; `conclude` follows when all of them were looked at."""
        format, weights = settings.weights_format(local(p)), decoded(local(p).detach())
        grid = None if format is None else parse(format)
        if grid is not None and grid.high < REACHABLE and "saturated" not in self.given:
            self._check_saturation(weights, str(format), name)
        if step == 1 or "drift" in self.given:  # weights that are zero at first are moved by any gradient
            return
        gap = getattr(grid, "step", None) or 0.0  # a drift below the gap of a fixed grid does not move weights far
        self._weights += _squared_norm(weights) + weights.numel() * gap**2
        self._drift += settings.lr**2 * _squared_norm(gradient)
        self._noise += settings.variance * weights.numel()

    def conclude(self) -> None:
        """Warn if the drift over all parameters is far larger than the weights, and forget the sums."""
        if not self._drift and not self._weights:  # most steps: nothing was looked at
            return
        drift, noise, weights = (math.sqrt(x) for x in (self._drift, self._noise, self._weights))
        self._drift = self._noise = self._weights = 0.0
        if drift > MOST_DRIFT * weights and drift > LEAST_DRIFT * noise:
            ratio = f"{drift / weights:.3g} times" if weights else "infinitely many times"
            warn_once(
                self.given,
                "drift",
                f"a step moves the weights by lr |gradient| = {drift:.3g}, {ratio} their norm: the chain jumps about instead of "
                "following the posterior. Is the loss a sum over the batch? It must be the mean. If it is, take a smaller lr",
                stacklevel=6,
            )

    def _check_saturation(self, weights: Tensor, format: str, name: str) -> None:
        count, size = count_saturated(weights, format), weights.numel()
        if count > SATURATED_SHARE * size and count >= min(4, size):
            warn_once(
                self.given,
                "saturated",
                f"{count} of {size} weights of {name} are at an end of the range of {format}, {parse(format).low:g} to "
                f"{parse(format).high:g}, where updates are clipped, and the chain does not sample the posterior. Take a format "
                "with a wider range (fewer fractional bits, or block floating point) or a smaller lr",
                stacklevel=7,
            )


def _squared_norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t)) ** 2
