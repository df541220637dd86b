"""The methods that the demo compares: settings of one sampler."""

from __future__ import annotations

from dataclasses import dataclass

from ...quantization.operators import Rounding

__all__ = ["CORRECTED", "FULL", "NAIVE", "SAMPLERS", "Method"]


@dataclass(frozen=True)
class Method:
    """A precision and a rounding."""

    name: str
    low_precision: bool
    rounding: Rounding
    colour: str


FULL = Method("FP32", low_precision=False, rounding="corrected", colour="#7a7a7a")
NAIVE = Method("naive 8-bit", low_precision=True, rounding="stochastic", colour="#d55e00")
CORRECTED = Method("corrected 8-bit", low_precision=True, rounding="corrected", colour="#009e73")
SAMPLERS = (FULL, NAIVE, CORRECTED)
