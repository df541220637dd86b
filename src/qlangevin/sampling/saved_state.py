"""Saved states of a sampler: tensors as plain ones, checked before they are loaded, and put back as they were kept.

What a state keeps as codes is saved as two entries, ``NAME.codes`` and ``NAME.exponents``; its format is in the settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._dtensor import local
from ..quantization import operators
from ..quantization.formats import parse
from ..quantization.qtensor import QTensor
from .beside import KEPT

__all__ = ["check_states", "from_saved", "split_saved", "to_saved"]

PRIVATE = ("version",)  # torch's version of the weights counts the writes of one process
LIKE_WEIGHTS = ("accumulator", "gradient", "center", "moments", "velocity")  # one number for each weight
CODES, EXPONENTS, FORMAT = ".codes", ".exponents", ".format"


def to_saved(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter without what means nothing in another process, codes as plain tensors."""
    saved: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, QTensor):
            saved |= {f"{name}{CODES}": value.codes, f"{name}{FORMAT}": str(value.format)}
            saved |= {} if value.exponents is None else {f"{name}{EXPONENTS}": value.exponents}
        elif name not in PRIVATE:
            saved[name] = float(value) if name == "moments_scale" else value  # it may be on a device
    return saved


def split_saved(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state without the entries that torch would cast to the parameter's dtype: those of `from_saved`."""
    rest = {i: {k: v for k, v in state.items() if not _is_kept(k)} for i, state in state_dict["state"].items()}
    return {**state_dict, "state": rest}


def _is_kept(name: str) -> bool:
    return name.partition(".")[0] in (*KEPT, "accumulator")


def from_saved(state: dict[str, Any], saved: Mapping[str, Any], p: Tensor) -> bool:
    """Put saved tensors into a state as a sampler keeps them: copies of their own, on the parameter's device.

    Return True if there are any.
    """
    part, kept = local(p), [name for name in saved if _is_kept(name)]
    moved = {n: saved[n].detach().to(part.device, copy=True).contiguous() for n in kept if isinstance(saved[n], Tensor)}
    for name, t in moved.items():
        owner, _, piece = name.partition(".")
        if not piece:
            state[owner] = t.to(operators.working_dtype(p.dtype)) if owner == "accumulator" else t
        elif f".{piece}" == CODES:
            format, exponents = parse(saved[f"{owner}{FORMAT}"]), moved.get(f"{owner}{EXPONENTS}")
            state[owner] = QTensor(t, exponents, format, part.shape, torch.float32)
    return bool(kept)


def check_states(state_dict: Mapping[str, Any], params: Sequence[Tensor]) -> dict[Tensor, dict[str, Any]]:
    """Return the saved states of parameters; raise ValueError for one that is no state, or is that of another shape."""
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    for state in state_dict["state"].values():
        if not isinstance(state, dict):
            raise ValueError(f"the saved state of a parameter must be a dict, got {type(state).__name__}")
    pairs = zip(saved, params, strict=False)  # torch refuses another number of parameters
    states = {p: state_dict["state"].get(i, {}) for i, p in pairs}
    for p, state in states.items():
        _check_state(state, local(p).shape)
    return states


def _check_state(state: Mapping[str, Any], shape: torch.Size) -> None:
    for name in LIKE_WEIGHTS:
        if name in state and tuple(state[name].shape) != tuple(shape):
            raise ValueError(f"the saved {name} has shape {tuple(state[name].shape)}, its parameter {tuple(shape)}")
        if f"{name}{CODES}" in state:
            codes, exponents = state[f"{name}{CODES}"], state.get(f"{name}{EXPONENTS}")
            try:
                QTensor(codes, exponents, parse(state.get(f"{name}{FORMAT}", "")), shape, torch.float32)
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"the saved {name} is damaged: {error}") from None
    if "mask" in state and tuple(state["mask"].shape) != (-(-shape.numel() // 8),):
        raise ValueError(f"the saved mask is not one of a parameter of shape {tuple(shape)}")
