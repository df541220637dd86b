"""Number formats by name: fixed point, block floating point, floating point.

A format knows its grid, that is the gap Δ between neighbouring numbers at a given place and the range ``low .. high``, its
codes, and how Q^vc is drawn on it; see `Format` for all of it. `rounding` has the quantizers for any format.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any, cast

import torch

from .block_float import BlockFloat
from .fixed_point import FixedPoint
from .floating_point import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, Float
from .format_base import FLOAT32_MAX, DtypeLimits, Format, GridKind, KernelGrid, binade, power_of_two

__all__ = [
    "BF16",
    "FLOAT32_MAX",
    "FORMATS",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "BlockFloat",
    "FixedPoint",
    "Float",
    "Format",
    "GridKind",
    "KernelGrid",
    "binade",
    "check_format",
    "check_holds",
    "fit_dtype",
    "parse",
    "power_of_two",
]

FORMATS: tuple[type[Format], ...] = (FixedPoint, BlockFloat, Float)


def parse(name: str | Format) -> Format:
    """Return the format of a name such as ``"fixed8.3"``, ``"bfp8"``, ``"bfp8/32"``, ``"e4m3"`` or ``"fp8_e4m3"``."""
    if isinstance(name, str):
        return _parse_name(name)
    if isinstance(name, Format):
        return name
    raise TypeError(f"a format is a FixedPoint, BlockFloat, Float or a name such as 'bfp8', got {type(name).__name__}")


@lru_cache(maxsize=256)
def _parse_name(name: str) -> Format:
    for kind in FORMATS:
        if (format := kind.from_name(name)) is not None:
            return format
    raise ValueError(
        f"unknown format {name!r}; a format is written like fixed8.3 (8 bits, 3 of them fractional), bfp8, bfp8/tensor, "
        f"bfp8/32 (block floating point), e4m3 (floating point), or is one of {', '.join(Float.HARDWARE)}"
    )


def check_format(format: object) -> Format:
    """Return a format that comes from a file, made anew so that its fields are checked; raise ValueError if it is none."""
    if type(format) not in FORMATS:
        raise ValueError(f"a format is a FixedPoint, BlockFloat or Float, got {type(format).__name__}")
    known = cast(Any, format)
    try:
        return cast(Format, type(format)(**{field.name: getattr(known, field.name) for field in fields(known)}))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{type(format).__name__} has fields that no format has: {error}") from error


@lru_cache(maxsize=1024)
def fit_dtype(format: Format, dtype: torch.dtype) -> Format:
    """Return the format that tensors of a dtype are rounded to: the given one, clipped to the numbers that the dtype holds.

    Block floating point clips the exponents of its blocks, others do not change. Raise TypeError or ValueError if the dtype
    still cannot hold every number exactly.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"expected a real floating-point tensor, got {dtype}; convert it with .float() first")
    limits = DtypeLimits.of(dtype)
    fitted = format.within(limits)
    digits, least, most = limits
    if fitted.digits > digits or fitted.min_gap_exponent < least or fitted.high > most:
        raise ValueError(
            f"{dtype} cannot hold every number of {format}: it has {digits} binary digits and goes from 2^{least} to "
            f"{most:.4g}, the format needs {format.digits}, from 2^{format.min_gap_exponent} to {format.high:.4g}; "
            f"use float32 tensors or {format.narrower}"
        )
    return fitted


def check_holds(dtype: torch.dtype, format: Format) -> None:
    """Raise TypeError or ValueError if a dtype cannot hold every number of the format, clipped to its range, exactly."""
    fit_dtype(format, dtype)
