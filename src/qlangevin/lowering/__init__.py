"""Low-precision activations and errors for any module: Algorithm 3 of the paper."""

from __future__ import annotations

from .layers import (
    LAYERS,
    Quantize,
    check_state,
    load_state_dict,
    lower,
    set_replica,
    settings,
    state_dict,
    unlower,
)

__all__ = [
    "LAYERS",
    "Quantize",
    "check_state",
    "load_state_dict",
    "lower",
    "set_replica",
    "settings",
    "state_dict",
    "unlower",
]
