"""What an estimate says: the learning coefficient of each chain and of all, its error, traces and observables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..prediction.diagnostics import Summary, summarize
from .judging import make_remarks
from .settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LLC"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LLC:
    """A local learning coefficient λ̂ = nβ (E[L_n(w)] - L_n(w*)), and all that it was computed from."""

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
    """Whether the bits sufficed, by the sampler's ``diagnose()`` after the last step; None if it has none."""
    parts: Mapping[str, LLC] = field(default_factory=dict, repr=False)
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

    @cached_property
    def remarks(self) -> list[str]:
        """Reasons to doubt the estimate, each with what to do about it."""
        return make_remarks(self.mean, self.stderr, self.r_hat, self.settings, self.size, self.resolution)

    def __str__(self) -> str:
        s = self.settings
        about = (
            f"{len(self.losses)} chains of {s.draws * s.steps_between} steps after {s.burn_in}, R-hat {self.r_hat:.3f}"
        )
        return f"LLC of {self.name}: {self.mean:.4g} ± {self.stderr:.2g} ({self.size} weights, {s.weights or 'fp32'}, {about})"

    def to_json(self) -> dict[str, Any]:
        """Return the estimate without traces and observables, in JSON's types."""
        figures = {"llc": self.mean, "stderr": self.stderr, "r_hat": self.r_hat, "ess": self.ess}
        return {
            "name": self.name,
            **{name: value if np.isfinite(value) else None for name, value in figures.items()},
            "per_chain": self.per_chain.tolist(),
            "init_loss": self.init_loss,
            "weights_moved": self.size,
            "settings": self.settings.to_json(),
            "resolution": self.resolution,
            "remarks": self.remarks,
        }

    def plot(self) -> Figure:
        """Draw the trace of each chain, and λ̂ of each chain and part."""
        from .plotting import draw_estimate

        return draw_estimate(self)

    def to_xarray(self) -> Any:
        """Return the draws as an `xarray.DataTree` that devinterp's ``compute_llc``, ``compute_bif`` and
        ``compute_susceptibilities`` take; see `tree`."""
        from .tree import to_tree

        return to_tree(self)
