"""Checks of parameters before a step, so that a refused step has changed nothing."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .._dtensor import check_shard, first_anywhere, local
from ..quantization import operators
from ..quantization.formats import FP8_E4M3, FP32, BlockFloat, FixedPoint, Float, check_holds, parse
from ..quantization.qtensor import QTensor, decoded
from .gradients import first_not_finite
from .replacing import check_not_replaced
from .settings import StepSettings

__all__ = ["check_accumulator", "check_gradient", "check_parameter", "first_not_a_number"]


def check_parameter(p: Tensor, settings: StepSettings) -> None:
    """Refuse a parameter that its model no longer has, and formats that it, its accumulator or its shard cannot hold."""
    check_not_replaced(p)
    if not p.requires_grad and p.grad is None:
        return  # it is frozen, and will not be stepped
    part = local(p)
    _check_dtype(part.dtype, settings.weights, settings.accumulator)
    if settings.accumulator and (settings.weights or isinstance(part, QTensor)):
        _check_finer(str(settings.weights_format(part)), settings.accumulator)
    if isinstance(part, QTensor):
        if part.is_view:
            raise ValueError("it is a view of a packed tensor; only all of it can be stepped")
        if settings.weights is not None and settings.weights != str(part.format):
            raise ValueError(
                f"it is packed as {part.format}, but weights={settings.weights!r}; leave weights out, or unpack it"
            )
    if part is not p:
        check_shard(p, parse(settings.weights_format(part) or "fp32"))


def check_gradient(p: Tensor, gradient: Tensor) -> None:
    """Refuse a gradient that is not dense and real, or not on the device of its parameter."""
    if gradient.layout != torch.strided or gradient.is_complex():
        kind = "complex" if gradient.is_complex() else "sparse"
        raise TypeError(f"has a {kind} gradient; SGLD needs dense real ones")
    if p.is_cpu and gradient.is_cpu:
        return  # faster than to compare devices
    home = local(p).device
    if gradient.device != home:
        raise ValueError(f"is on {home}, its gradient on {gradient.device}; move the gradient to {home}")


def check_accumulator(p: Tensor, accumulator: Tensor, name: str) -> None:
    """Refuse an accumulator that is not on the device of its parameter."""
    home = local(p).device
    if accumulator.device != home:
        raise ValueError(
            f"{name} is on {home}, its accumulator on {accumulator.device}: the model was moved after the sampler was made. Move "
            "the accumulators after it with sampler.load_state_dict(sampler.state_dict()), or move the model first"
        )


@lru_cache(maxsize=1024)
def _check_dtype(dtype: torch.dtype, weights: str | None, accumulator: str | None) -> None:
    check_holds(dtype, parse(weights) if weights else FP32 if dtype == torch.float32 else FP8_E4M3)
    if accumulator:
        check_holds(operators.working_dtype(dtype), parse(accumulator))


@lru_cache(maxsize=1024)
def _check_finer(weights: str, accumulator: str) -> None:
    """Refuse an accumulator of the same kind as the weights that is coarser than they are."""
    grid, steps = parse(weights), parse(accumulator)
    if isinstance(grid, FixedPoint) and isinstance(steps, FixedPoint):
        coarser = steps.frac < grid.frac
    elif isinstance(grid, Float) and isinstance(steps, Float):
        coarser = steps.man < grid.man
    else:
        coarser = isinstance(grid, BlockFloat) and isinstance(steps, BlockFloat) and steps.bits < grid.bits
    if coarser:
        raise ValueError(
            f"accumulator={accumulator!r} is coarser than weights={weights!r}: it takes the steps, so that the weights' last bits"
            " would say nothing. Leave the accumulator out, or take a finer one, such as 'fp32'"
        )


def first_not_a_number(params: list[Tensor]) -> int:
    """Return the index of the first parameter that holds an infinity or a NaN, or -1."""
    parts = (local(p) for p in params)
    bad = [i for i, part in enumerate(parts) if not part.is_meta and first_not_finite([decoded(part.detach())]) >= 0]
    return first_anywhere(min(bad, default=-1), params)
