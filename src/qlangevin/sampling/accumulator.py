"""The accumulator of a parameter: a second copy of its weights, which takes the updates; the parameter is rounded from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._dtensor import local
from ..quantization import operators, random
from ..quantization.formats import parse
from ..quantization.qtensor import decoded
from ..quantization.random import Key
from .step import StepSettings, quantize_for

__all__ = ["begin_accumulator", "was_overwritten"]


def begin_accumulator(p: Tensor, settings: StepSettings, key: Key) -> Tensor:
    """Return a copy of a parameter's weights in the accumulator's format."""
    values = decoded(local(p)).to(operators.working_dtype(p.dtype)).contiguous()
    return quantize_for(random.ROUNDING, values, settings.accumulator, settings.noise_free_rounding, key).clone()


def was_overwritten(p: Tensor, state: Mapping[str, Any], settings: StepSettings) -> bool:
    """Return whether other code has written weights into a parameter that its accumulator does not stand for.

    Writing raises torch's version counter, but may have put back the same weights, as loading a checkpoint does. Weights
    rounded from the accumulator are within two gaps of it.
    """
    if state.get("version", p._version) == p._version:
        return False
    name = settings.weights_format(local(p))
    if name is None:
        return False
    format, weights = parse(name), decoded(local(p)).to(operators.working_dtype(p.dtype))
    distance = (weights - state["accumulator"].clamp(format.low, format.high)).abs()
    return bool((distance > 2 * format.gap(weights)).any())
