"""Checks of arguments, with one wording for each kind of mistake."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["check_choice", "check_flag", "check_fraction", "check_integer", "check_number", "describe_differences"]


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return an integer, also NumPy's, as an int; raise ValueError if it is none or out of range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ValueError(f"{name} must be an integer, at least {least}, got {value!r}")
    if most is not None and int(value) > most:
        raise ValueError(f"{name} must be at most {most}, got {value!r}")
    return int(value)


def check_number(name: str, value: Any, most: float = sys.float_info.max) -> float:
    """Return a finite number that is not negative as a float; raise ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= most:
        kind = "a fraction, between 0 and 1" if most == 1 else "a finite number that is not negative"
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    return float(value)


def check_fraction(name: str, value: Any) -> float:
    """Return a number between 0 and 1 as a float; raise ValueError for anything else."""
    return check_number(name, value, most=1)


def check_flag(name: str, value: Any) -> bool:
    """Return True or False, also NumPy's, as a bool; raise ValueError for anything else: to Python "no" is true."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ValueError if a word is not one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def describe_differences(
    there: Any, here: Any, where: str = "", sides: tuple[str, str] = ("there", "here")
) -> list[str]:
    """Return one line for each setting that differs: its name, and both values with the side each is from."""
    if there == here:
        return []
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        names = [*there, *(name for name in here if name not in there)]
        each = [(f"{where}.{n}" if where else str(n), there.get(n, "absent"), here.get(n, "absent")) for n in names]
        return [line for n, a, b in each for line in describe_differences(a, b, n, sides)]
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        pairs = enumerate(zip(there, here, strict=True))
        return [line for i, (a, b) in pairs for line in describe_differences(a, b, f"{where}[{i}]", sides)]
    return [f"{where} is {there!r} {sides[0]} and {here!r} {sides[1]}"]
