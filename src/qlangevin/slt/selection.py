"""The weights that a chain moves: all of a model, or parts of it, chosen by patterns of names and by masks.

The learning coefficient of a part, the others held at w*, is its refined learning coefficient (Wang et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["FULL", "Masks", "Part", "select_parts"]

FULL = "full"  # the name of the part that is all of the model
Selection: TypeAlias = str | Sequence[str] | Mapping[str, Any]
Masks: TypeAlias = Mapping[str, Selection]


@dataclass(frozen=True)
class Part:
    """Parameters that move, by name; with a mask, only its weights."""

    name: str
    masks: Mapping[str, Tensor | None]

    def size(self, params: Mapping[str, Tensor]) -> int:
        """Return the number of weights that move."""
        return sum(params[n].numel() if m is None else int(m.sum()) for n, m in self.masks.items())


def select_parts(model: nn.Module, masks: Masks | None) -> list[Part]:
    """Return the parts of a model that are asked for; by default one, all parameters that require gradients.

    ``masks`` names each part, and says what moves: a pattern of parameter names ("transformer.h.0.*"), several of them, or a
    mapping from patterns to masks: True for all of a parameter, a tensor of bool, or an index of its weights
    (``{"*.c_attn.weight": (slice(None), slice(0, 16))}``).
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError("the model has no parameters that require gradients; call model.requires_grad_(True)")
    for name, p in params.items():
        if p.is_meta or p.is_inference():
            kind = "is on the meta device" if p.is_meta else "was made in inference mode"
            raise ValueError(f"{name!r} {kind}, and cannot move; make or load the model with weights of its own")
    if masks is None:
        return [Part(FULL, dict.fromkeys(params))]
    if not isinstance(masks, Mapping) or not masks:
        raise TypeError(f"masks must map names of parts to patterns, such as {{'layer 0': 'h.0.*'}}, got {masks!r}")
    return [_select(name, selection, params) for name, selection in masks.items()]


def _select(part: str, selection: Selection, params: Mapping[str, Tensor]) -> Part:
    patterns: Mapping[str, Any]
    if isinstance(selection, Mapping):
        patterns = selection
    else:
        patterns = dict.fromkeys([selection] if isinstance(selection, str) else selection, True)
    found: dict[str, Tensor | None] = {}
    for pattern, which in patterns.items():
        names = [name for name in params if fnmatchcase(name, pattern)]
        if not names:
            known = ", ".join(list(params)[:6])
            raise ValueError(f"mask {part!r}: the pattern {pattern!r} fits no parameter; they are named {known}, ...")
        for name in names:
            found[name] = _join(found, name, _read_mask(part, name, which, params[name]))
    ordered = {name: found[name] for name in params if name in found}
    if not any(mask is None or bool(mask.any()) for mask in ordered.values()):
        raise ValueError(f"mask {part!r} selects no weight; it must be True for at least one")
    kept = {name: mask for name, mask in ordered.items() if mask is None or bool(mask.any())}
    return Part(part, {name: None if mask is None or bool(mask.all()) else mask for name, mask in kept.items()})


def _join(found: Mapping[str, Tensor | None], name: str, mask: Tensor | None) -> Tensor | None:
    """Return the union of a mask with what was found before; None is all of a parameter."""
    if name not in found or mask is None:
        return mask
    before = found[name]
    return None if before is None else before | mask


def _read_mask(part: str, name: str, which: Any, p: Tensor) -> Tensor | None:
    if which is True or which is None:
        return None
    mask = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
    if isinstance(which, Tensor) and which.dtype == torch.bool:
        if which.shape != p.shape:
            raise ValueError(
                f"mask {part!r}: {name} has shape {tuple(p.shape)}, its mask {tuple(which.shape)}; they must be equal"
            )
        return which.to(p.device)
    try:
        mask[which] = True
    except (IndexError, TypeError) as error:
        raise ValueError(
            f"mask {part!r}: {which!r} is no index of {name}, of shape {tuple(p.shape)}: {error}"
        ) from None
    return mask
