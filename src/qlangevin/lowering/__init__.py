"""Low-precision activations and errors for any module: Algorithm 3 of the paper."""

from __future__ import annotations

from .function_table import FUNCTIONS
from .layers import (
    LAYERS,
    Quantize,
    check_state,
    is_layer,
    load_state_dict,
    lower,
    set_replica,
    settings,
    state_dict,
    unlower,
)
from .summary import summary

__all__ = [
    "FUNCTIONS",
    "LAYERS",
    "Quantize",
    "check_state",
    "is_layer",
    "load_state_dict",
    "lower",
    "set_replica",
    "settings",
    "state_dict",
    "summary",
    "unlower",
]
