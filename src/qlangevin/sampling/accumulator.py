"""The accumulator of a parameter: a second copy of its weights, which takes the updates; the parameter is rounded from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..quantization import operators, random
from ..quantization.backend import Kernels
from ..quantization.formats import FP32, parse
from ..quantization.qtensor import decoded_as
from ..quantization.random import Key
from .settings import StepSettings
from .update import quantize_for

__all__ = ["begin_accumulator", "may_be_overwritten", "renew_accumulator", "weights_differ"]


def begin_accumulator(weights: Tensor, settings: StepSettings, key: Key) -> Tensor:
    """Return a copy of a parameter's weights in the accumulator's format."""
    values = _values(weights)
    return quantize_for(random.ROUNDING, values, settings.accumulator, settings.noise_free_rounding, key).clone()


def may_be_overwritten(p: Tensor, state: Mapping[str, Any]) -> bool:
    """Return whether other code has written into a parameter since its last step.

    Writing raises torch's version counter, but may have put back the same weights, as loading a checkpoint does.
    """
    return bool(state.get("version", p._version) != p._version)


def weights_differ(weights: Tensor, accumulator: Tensor, settings: StepSettings) -> Tensor:
    """Return, on their device, whether weights are other ones than those rounded from the accumulator.

    These are within two gaps of it.
    """
    name, values = settings.weights_format(weights), _values(weights)
    if name is None:
        return torch.zeros((), dtype=torch.bool, device=values.device)
    format = parse(name)
    distance = (values - accumulator.clamp(format.low, format.high)).abs()
    return (distance > 2 * format.gap(values)).any()


def renew_accumulator(
    kernels: Kernels, weights: Tensor, accumulator: Tensor, settings: StepSettings, key: Key, step: Tensor
) -> None:
    """Begin the accumulator anew, in place and without waiting, if the weights are not those rounded from it.

    ``step`` is the number of steps taken, on the device.
    """
    format, fresh = parse(str(settings.accumulator)), _values(weights)
    if format != FP32:
        fresh = kernels.quantize(fresh, format, settings.noise_free_rounding, key, random.ROUNDING, step=step)
    accumulator.copy_(torch.where(weights_differ(weights, accumulator, settings), fresh, accumulator))


def _values(weights: Tensor) -> Tensor:
    return decoded_as(weights, operators.working_dtype(weights.dtype)).contiguous()
