"""When to collect: moments evenly spaced over a part of a run, in integers, so that nothing drifts."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any

from .._validate import check_fraction, check_integer

__all__ = ["after_burn_in", "part_of", "spread"]


def after_burn_in(total_steps: int, samples: int, burn_in: float) -> dict[str, Any]:
    """The checked arguments that most schedules share, and the moments they mean."""
    total_steps, samples = check_integer("total_steps", total_steps, 1), check_integer("samples", samples, 0)
    burn_in = check_fraction("burn_in", burn_in)
    begin = part_of(burn_in, total_steps)
    if samples > total_steps - begin:
        raise ValueError(
            f"samples must be at most {total_steps - begin}, the steps that burn_in={burn_in} leaves of {total_steps}, "
            f"got {samples}"
        )
    moments = spread(begin, total_steps, samples)
    return {"moments": moments, "total_steps": total_steps, "samples": samples, "burn_in": burn_in}


def spread(begin: int, end: int, count: int) -> list[int]:
    """That many integers, evenly spaced over those after ``begin``; the last is ``end``."""
    return [begin + i * (end - begin) // count for i in range(1, count + 1)]


@lru_cache(maxsize=64)
def part_of(share: float, steps: int) -> int:
    """The first step that has reached a fraction of all. A fraction is the simple one it was meant as: 1/3, not 1/3 - 2e-17."""
    return math.ceil(Fraction(share).limit_denominator(10**9) * steps)
