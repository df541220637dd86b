"""What users give, checked, and what differs, in words: the same sentences everywhere."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["differences", "fraction", "number", "whole"]


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """An integer, NumPy's too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ValueError(f"{name} must be an integer, at least {least}, got {value!r}")
    if most is not None and int(value) > most:
        raise ValueError(f"{name} must be at most {most}, got {value!r}")
    return int(value)


def number(name: str, value: Any, most: float = sys.float_info.max) -> float:
    """A finite number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= most:
        kind = "a fraction, between 0 and 1" if most == 1 else "a finite number that is not negative"
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    return float(value)


def fraction(name: str, value: Any) -> float:
    return number(name, value, most=1)


def differences(there: Any, here: Any, where: str = "") -> list[str]:
    """What differs between two sets of settings, each with its name and both values."""
    if there == here:
        return []
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        names = [*there, *(name for name in here if name not in there)]
        each = [(f"{where}.{n}" if where else str(n), there.get(n, "absent"), here.get(n, "absent")) for n in names]
        return [line for n, a, b in each for line in differences(a, b, n)]
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        pairs = enumerate(zip(there, here, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    return [f"{where} is {there!r} there and {here!r} here"]
