"""How samples were drawn, in words and numbers: settings of a sampler and of a schedule, and how far they are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..sampling.schedules import Schedule

__all__ = ["settings_of", "steps_of"]


def settings_of(sampler: Optimizer | None, schedule: LRScheduler | None, ranks: int = 1) -> dict[str, Any]:
    """What there is to be known of where samples come from, as JSON has it; how many ranks, if there were several."""
    groups = [_group(group) for group in sampler.param_groups] if sampler is not None else []
    known: dict[str, Any] = {
        "seed": next((group["seed"] for group in groups if "seed" in group), None),
        "sampler": None if sampler is None else {"class": type(sampler).__name__, "groups": groups},
        "schedule": None,
    }
    if schedule is not None:
        kind = {"schedule": type(schedule).__name__}
        known["schedule"] = schedule.settings() if isinstance(schedule, Schedule) else kind
    known |= {"ranks": ranks} if ranks > 1 else {}
    return dict(json.loads(json.dumps(known)))  # tuples are lists from here on, as they will be when read


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group before any schedule changed it."""
    found: dict[str, Any] = {"parameters": len(group["params"])}
    for name, value in group.items():
        if name in ("params", "param_names") or name.startswith("initial_"):
            continue
        if name == "stream" and value == 0:
            continue  # goes without saying, as in stores of before there were streams
        value = group.get(f"initial_{name}", value)
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        plain = value is None or isinstance(value, (bool, int, str, list, tuple))
        plain |= isinstance(value, float) and math.isfinite(value)
        found[name] = value if plain else str(value)
    return found


def steps_of(sampler: Optimizer) -> int:
    """How many steps a sampler has made."""
    return max((int(state["step"]) for state in sampler.state.values() if "step" in state), default=0)
