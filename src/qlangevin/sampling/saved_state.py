"""Saved states of a sampler: checked before they are loaded, and made fit to be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .._dtensor import local

__all__ = ["check_states", "without_private"]

PRIVATE = ("version",)  # torch's version of the weights counts the writes of one process


def without_private(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter without what means nothing in another process."""
    return {name: value for name, value in entry.items() if name not in PRIVATE}


def check_states(state_dict: Mapping[str, Any], params: Sequence[Tensor]) -> dict[Tensor, dict[str, Any]]:
    """Return the saved states of parameters; raise ValueError for one that is no state, or is that of another shape."""
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    for state in state_dict["state"].values():
        if not isinstance(state, dict):
            raise ValueError(f"the saved state of a parameter must be a dict, got {type(state).__name__}")
    pairs = zip(saved, params, strict=False)  # torch refuses another number of parameters
    states = {p: state_dict["state"].get(i, {}) for i, p in pairs}
    for p, state in states.items():
        for name in ("accumulator", "gradient"):
            shape = tuple(state[name].shape) if name in state else tuple(local(p).shape)
            if shape != tuple(local(p).shape):
                raise ValueError(f"the saved {name} has shape {shape}, its parameter {tuple(local(p).shape)}")
    return states
