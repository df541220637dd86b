"""Result of an estimate: the learning coefficient of each chain and of all, its error, and reasons to doubt it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .judging import make_remarks
from .plotting import draw_estimate
from .traces import Traces
from .tree import to_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LLC"]


@dataclass(frozen=True, eq=False)
class LLC(Traces):
    """A local learning coefficient λ̂ = nβ (E[L_n(w)] - L_n(w*)), and all that it was computed from."""

    @cached_property
    def remarks(self) -> list[str]:
        """Reasons to doubt the estimate, each with what to do about it."""
        return make_remarks(self.mean, self.stderr, self.r_hat, self.settings, self.size, self.resolution)

    def __str__(self) -> str:
        s = self.settings
        about = (
            f"{len(self.losses)} chains of {s.draws * s.steps_between} steps after {s.burn_in}, R-hat {self.r_hat:.3f}"
        )
        return (
            f"LLC of {self.name}: {self.mean:.4g} ± {self.stderr:.2g} ({self.size} weights, {s.format_name}, {about})"
        )

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
        return draw_estimate(self)

    def to_xarray(self) -> Any:
        """Return the draws as an `xarray.DataTree` that devinterp's ``compute_llc``, ``compute_bif`` and
        ``compute_susceptibilities`` take; see `tree`."""
        return to_tree(self)
