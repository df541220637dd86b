"""Places of parameters among the groups of an optimizer, and their names in messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["Group", "Places", "name_parameter"]

Group: TypeAlias = dict[str, Any]


class Places:
    """The places of parameters, found once and looked up anew when stale."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, int]] = {}

    def find(self, groups: Sequence[Group], p: Tensor) -> tuple[Group, int]:
        """Return the group of a parameter and its number there."""
        g, i = self._found.get(id(p), (0, 0))
        if not (g < len(groups) and i < len(groups[g]["params"])) or groups[g]["params"][i] is not p:
            everywhere = [(g, i, p) for g, group in enumerate(groups) for i, p in enumerate(group["params"])]
            self._found = {id(p): (g, i) for g, i, p in everywhere}
            g, i = self._found[id(p)]
        return groups[g], i


def name_parameter(groups: Sequence[Group], group: Group, i: int) -> str:
    """Return what messages call the i-th parameter of a group."""
    if names := group.get("param_names"):
        return f"parameter {names[i]!r}"
    where = next((f" of group {g}" for g, other in enumerate(groups) if g and other is group), "")
    return f"parameter {i}{where} (shape {tuple(group['params'][i].shape)})"
