"""The Gaussian prior of a parameter group, given by its standard deviation or as weight decay.

λ = 1 / (σ² N)    weight decay of the mean loss for the prior N(0, σ²) and N data
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

__all__ = ["resolve_prior", "weight_decay_of"]


def weight_decay_of(prior_std: Any, num_data: Any) -> float:
    """Return λ = 1 / (σ² N); raise ValueError for a σ that is not positive and finite."""
    is_number = isinstance(prior_std, numbers.Real) and not isinstance(prior_std, bool)
    if not (is_number and 0 < prior_std < math.inf):
        raise ValueError(
            f"prior_std must be the standard deviation of the prior, positive and finite, got {prior_std!r}; for a flat prior "
            "leave it out"
        )
    return 1 / (float(prior_std) ** 2 * float(num_data))


def resolve_prior(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``weight_decay`` of a group, and ``prior_std`` if it was given, from its settings and the sampler's defaults.

    A group's own ``prior_std`` or ``weight_decay`` comes before either of the defaults; both in one place are an error.
    """
    own = {name: given[name] for name in ("prior_std", "weight_decay") if given.get(name) is not None}
    if len(own) == 2:
        raise ValueError(
            f"prior_std={own['prior_std']!r} and weight_decay={own['weight_decay']!r} are two names of one prior; give one: "
            "weight_decay = 1 / (prior_std² num_data)"
        )
    std = own.get("prior_std") if own else defaults.get("prior_std")
    if std is None:
        hides = {"prior_std": None} if "prior_std" in defaults else {}  # torch fills in the defaults that a group lacks
        return {"weight_decay": own.get("weight_decay", defaults.get("weight_decay", 0.0))} | hides
    return {"prior_std": std, "weight_decay": weight_decay_of(std, given.get("num_data", defaults.get("num_data")))}
