"""Judgements of chains: those that cannot be used end with an error, doubtful estimates get a remark.

Two bounds hold at any minimum w*. The learning coefficient of d weights is at most d/2. And localization alone gives each
weight the variance 1/γ around w*, which a minimum can only make smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .settings import Settings

__all__ = ["ChainLeftError", "check_distance", "check_losses", "make_remarks"]

WINDOW = 64  # steps whose mean loss is judged
FAR = 16.0  # times the largest mean square distance, or the largest learning coefficient, that a minimum allows
MOST_R_HAT = 1.1
LESS_LR = "take a smaller lr or a larger localization"


class ChainLeftError(FloatingPointError):
    """A chain that is not near w* any more: its loss is not finite, or it has left the neighbourhood.

    ``losses`` are those of its steps so far, ``finished`` those of the chains that had ended, by part and chain. With a store
    they are also on the disk.
    """

    def __init__(self, message: str, losses: npt.NDArray[np.float64] | None = None) -> None:
        super().__init__(message)
        self.losses = losses
        self.finished: dict[tuple[str, int], npt.NDArray[np.float64]] = {}


def check_losses(excess: Sequence[float], settings: Settings, size: int, chain: int, step: int) -> None:
    """Raise ChainLeftError if nβ times the mean excess loss of the last steps is far above d/2."""
    if len(excess) < WINDOW:
        return
    value, most = settings.nbeta * float(np.mean(excess[-WINDOW:])), size / 2
    if value > FAR * most:
        raise ChainLeftError(
            f"chain {chain} has left the neighbourhood of w* by step {step}: nβ (L(w) - L(w*)) = {value:.4g}, and at a "
            f"minimum of {size} weights no learning coefficient exceeds {most:g}; {LESS_LR}"
        )


def check_distance(distance: float, settings: Settings, chain: int, step: int) -> None:
    """Raise ChainLeftError if the mean square distance from w* is far above 1/γ."""
    if settings.localization and not distance * settings.localization <= FAR:
        raise ChainLeftError(
            f"chain {chain} has left the neighbourhood of w* by step {step}: weights are {math.sqrt(distance):.3g} away from it "
            f"on average, and localization={settings.localization:g} should keep them within "
            f"{settings.localization**-0.5:.3g}; {LESS_LR}, or weights in a finer format than {settings.format_name}"
        )


def make_remarks(
    mean: float, error: float, r_hat: float, settings: Settings, size: int, resolution: Any = None
) -> list[str]:
    """Return one sentence for each reason to doubt an estimate, with what to do about it."""
    found = []
    if mean < -2 * error:
        found.append(
            f"the learning coefficient is negative, {mean:.4g} ± {error:.2g}: w* is not a minimum of the loss, and the chain "
            "found lower ones. Train longer, or with a smaller lr at the end; or take a larger localization, a smaller lr here, "
            "and the data that the model was trained on"
        )
    if mean - 4 * error > size / 2:
        found.append(
            f"the learning coefficient is {mean:.4g} ± {error:.2g}, above {size / 2:g}, the largest that {size} weights can "
            f"have: {LESS_LR}, or a finer format than {settings.format_name}"
        )
    if r_hat > MOST_R_HAT:
        found.append(f"R-hat is {r_hat:.3g}: the chains do not agree; take more draws, or a longer burn_in")
    if resolution is not None and not resolution.get("sufficient", True):
        found.append(f"{resolution.get('summary', 'the bits do not suffice')} Take a finer format, or a larger lr")
    return found
