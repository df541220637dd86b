"""Centres and masks as users give them: for all parameters, or in a group of their own; assigned to parameters, and checked.

They are a sequence in the order of the parameters, or a mapping by name or by parameter, which need not have all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor

from .._dtensor import local
from .localization import keep_center
from .masks import pack_mask
from .settings import StepSettings

__all__ = ["BESIDE", "Center", "Given", "has_unused_center", "spread_over_groups", "take_from_group"]

Given: TypeAlias = Sequence[Tensor] | Mapping[Any, Tensor]
Center: TypeAlias = Literal["initial"] | Given
BESIDE = ("center", "center_format", "mask")
_TENSORS = ("center", "mask")  # those that each parameter has its own of


def spread_over_groups(params: Any, given: Mapping[str, Any]) -> Any:
    """Return parameters as groups, each with its part of the centres and masks; what a group has of its own comes first.

    What torch refuses is returned as it is.
    """
    if isinstance(params, Tensor) or not isinstance(params, Iterable) or not (listed := list(params)):
        return params if isinstance(params, Tensor) or not isinstance(params, Iterable) else []
    groups: list[dict[str, Any]] = [dict(g) for g in listed] if isinstance(listed[0], dict) else [{"params": listed}]
    for group in groups:
        group["params"] = _as_list(group["params"])
    everyone = [pair for group in groups for pair in _pairs(group)]
    found = {name: _assign(name, given.get(name), everyone) for name in _TENSORS}
    for group in groups:
        for name in _TENSORS:
            if name not in group and found[name] is not None:
                group[name] = [_look_up(found[name], p) for _, p in _pairs(group)]
        group.setdefault("center_format", given.get("center_format"))
    return groups


def take_from_group(
    group: dict[str, Any], settings: StepSettings
) -> tuple[dict[str, Any], dict[Tensor, dict[str, Any]]]:
    """Return a group without centres and masks, and these for each of its parameters; raise if one does not fit."""
    rest = {name: value for name, value in group.items() if name not in BESIDE}
    rest["params"] = _as_list(group["params"])
    pairs, format = _pairs(rest), group.get("center_format")
    found = {name: _assign(name, group.get(name), pairs) for name in _TENSORS}
    each: dict[Tensor, dict[str, Any]] = {}
    for i, (name, p) in enumerate(pairs):
        mine = {kind: some[p] for kind, some in found.items() if some is not None and some.get(p) is not None}
        each[p] = {**mine, "center_format": format}
        try:
            _check(p, each[p], settings)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{f'parameter {name!r}' if name else f'parameter {i} of the group'}: {error}") from None
    masked = any("mask" in mine for mine in each.values())
    return {**rest, "masked": masked} if masked else rest, each


def _check(p: Tensor, mine: Mapping[str, Any], settings: StepSettings) -> None:
    part = local(p)
    if "mask" in mine:
        pack_mask(mine["mask"], part.shape, part.device)
    if part.is_meta or (mine["center_format"] is None and "center" not in mine):
        return
    keep_center(mine.get("center", "initial"), part, settings, mine["center_format"])


def has_unused_center(group: Mapping[str, Any], settings: StepSettings) -> bool:
    """Return True if a group has a centre, or a format for it, that no localization and no box uses."""
    center = group.get("center")
    given = group.get("center_format") is not None or not (center is None or isinstance(center, str))
    return given and not settings.needs_center


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _pairs(group: Mapping[str, Any]) -> list[tuple[str | None, Tensor]]:
    return [p if isinstance(p, tuple) else (None, p) for p in group["params"]]


def _look_up(found: Mapping[Tensor, Any] | None, p: Tensor) -> Any:
    return None if found is None else found.get(p)


def _assign(kind: str, given: Any, pairs: Sequence[tuple[str | None, Tensor]]) -> dict[Tensor, Any] | None:
    """Return what each parameter gets; None if nothing is given."""
    if given is None or (isinstance(given, str) and given == "initial"):
        return None
    if isinstance(given, Mapping):
        return _assign_by_key(kind, given, pairs)
    if isinstance(given, Tensor) and len(pairs) == 1:
        given = [given]
    if isinstance(given, (str, Tensor)) or not isinstance(given, Iterable):
        known = "'initial', " if kind == "center" else ""
        got = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
        raise TypeError(f"{kind} must be {known}a sequence with a tensor for each parameter, or a mapping, got {got}")
    each = list(given)
    if len(each) != len(pairs):
        raise ValueError(f"{kind} must have a tensor for each of the {len(pairs)} parameters, got {len(each)}")
    return {p: tensor for (_, p), tensor in zip(pairs, each, strict=True)}


def _assign_by_key(
    kind: str, given: Mapping[Any, Any], pairs: Sequence[tuple[str | None, Tensor]]
) -> dict[Tensor, Any]:
    by_tensor = {id(key): value for key, value in given.items() if isinstance(key, Tensor)}
    by_name = {key: value for key, value in given.items() if isinstance(key, str)}
    found = {}
    for name, p in pairs:
        if id(p) in by_tensor:
            found[p] = by_tensor.pop(id(p))
        elif name in by_name:
            found[p] = by_name.pop(name)
    if by_tensor or by_name:
        odd = next(iter(by_name), "a tensor that is no parameter")
        hint = "; give names with named parameters: SGLD(model.named_parameters(), ...)" if by_name else ""
        raise ValueError(f"{kind} has an entry for {odd!r}, which the sampler does not have{hint}")
    return found
