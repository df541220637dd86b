"""The numbers of an estimate: losses of all steps of all chains, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..prediction.diagnostics import Summary, summarize
from .settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Traces"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Traces:
    """Records of the chains of an estimate, their mean λ̂ and its error."""

    name: str
    """Part of the model whose weights moved; "full" is all of it."""
    settings: Settings
    size: int
    """Weights that moved."""
    losses: Floats
    """Loss of the batch of each step, before the step, [chain, step], with the burn-in."""
    baselines: Floats
    """Losses at w* of the same examples, or L_n(w*) where the loss is a single number, [chain, step]."""
    init_loss: float
    """L_n(w*)."""
    observables: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Losses at each draw, [chain, draw, example] or [chain, draw, example, token]."""
    input_ids: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    """Token numbers of the observables, [example, token], where they have them."""
    resolution: Mapping[str, Any] | None = None
    """Verdict on the number of bits by the sampler's ``diagnose()`` after the last step; None if it has none."""
    parts: Mapping[str, Self] = field(default_factory=dict, repr=False)
    """The estimates of all masks by name, this one among them."""

    @property
    def trace(self) -> Floats:
        """nβ (L(w) - L(w*)) at each step, [chain, step], with the burn-in."""
        return self.settings.nbeta * (self.losses - self.baselines)

    @property
    def per_chain(self) -> Floats:
        """λ̂ of each chain."""
        return np.asarray(self.trace[:, self.settings.burn_in :].mean(1))

    @property
    def mean(self) -> float:
        """λ̂, over all steps after the burn-in."""
        return float(self.per_chain.mean())

    @cached_property
    def diagnostics(self) -> Summary:
        """Monte Carlo error, effective sample size and R-hat of the steps after the burn-in."""
        return summarize(self.trace[:, self.settings.burn_in :])

    @property
    def stderr(self) -> float:
        """Monte Carlo standard error of λ̂, which takes the correlation of steps into account."""
        return float(self.diagnostics.mcse_mean)

    @property
    def r_hat(self) -> float:
        """R-hat of the chains, 1 if they agree."""
        return float(self.diagnostics.r_hat)

    @property
    def ess(self) -> float:
        """Effective number of independent steps."""
        return float(self.diagnostics.ess_bulk)
