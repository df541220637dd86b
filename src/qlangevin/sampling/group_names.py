"""Names that a parameter group may have: those of settings, and of what torch and its users note in groups beside them.

torch itself takes any name, so that a setting with a typo would have no effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from .given import BESIDE
from .in_backward import Options
from .settings import SETTINGS

__all__ = ["check_names"]

SETTABLE = tuple(dict.fromkeys((*SETTINGS, "prior_std", *Options._fields, *BESIDE)))
NOTED = (
    "params", "param_names", "differentiable",  # by torch.optim.Optimizer
    "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum",  # by its schedulers, beside initial_lr
    "name", "group_name", "lr_scale",  # by users, Lightning and timm
)  # fmt: skip


def check_names(group: Mapping[str, Any], number: int) -> None:
    """Raise ValueError for a parameter group with a name that is neither a setting nor a note."""
    for name in map(str, group):
        if name not in SETTABLE and name not in NOTED and not name.startswith("initial_"):
            raise ValueError(f"parameter group {number}: unknown setting {name!r}; {_suggest(name)}")


def _suggest(name: str) -> str:
    if name == "step_in_backward":
        return "it holds for all groups: give it to the sampler"
    if near := difflib.get_close_matches(name, SETTABLE, n=1):
        return f"did you mean {near[0]!r}?"
    return f"settings of a group are {', '.join(SETTABLE)}"
