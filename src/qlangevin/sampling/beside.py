"""Tensors that a sampler keeps for a parameter beside its weights: centre, mask, moments and velocity, in its state.

center      w0 of the localization and of the box, see `localization`
mask        bits of the weights that move, see `masks`
moments     V of the preconditioner, begun with the first gradient, and its ``moments_scale``, see `preconditioner`: a number, or
            on the device of a parameter that the host does not wait for a float32 there
velocity    u of underdamped dynamics, begun at rest, and its ``velocity_unit``, see `underdamped`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._warnings import warn_once
from ..quantization.backend import Moments, TensorStep, Velocity
from ..quantization.formats import Format, parse
from ..quantization.operators import working_dtype
from ..quantization.qtensor import QTensor, decoded_as
from ..quantization.random import Key
from .localization import hold, into_box, keep_center
from .masks import cuts_blocks, pack_mask, unpack_mask
from .preconditioner import begin_moments, choose_scale, rescale, rescale_in_place
from .settings import StepSettings
from .underdamped import velocity_unit
from .update import round_gradient

__all__ = ["KEPT", "begin_beside", "begins_moments", "complete_step", "prepare_step", "rescale_moments"]

KEPT = ("center", "mask", "moments", "velocity")  # tensors in a parameter's state


def begin_beside(
    theta: Tensor, state: dict[str, Any], settings: StepSettings, given: Mapping[str, Any], warned: set[str]
) -> None:
    """Begin what a parameter needs from its first step on; ``given`` may have its center, center_format and mask."""
    format = settings.weights_format(theta)
    if given.get("mask") is not None and "mask" not in state:
        state["mask"] = pack_mask(given["mask"], theta.shape, theta.device)
        _warn_of_cut_blocks(unpack_mask(state["mask"], theta.shape), format, warned)
    if settings.needs_center and "center" not in state:
        center: str | Format | Tensor = given.get("center", "initial")
        state["center"] = keep_center(center, theta, settings, given.get("center_format"))
    if settings.friction is not None and "velocity" not in state:
        at_rest = torch.zeros(theta.shape, dtype=working_dtype(theta.dtype), device=theta.device)
        state["velocity"] = hold(at_rest, settings.velocity_format(theta))
        state["velocity_unit"] = velocity_unit(settings.temperature, settings.num_data)


def _warn_of_cut_blocks(mask: Tensor, format: str | None, warned: set[str]) -> None:
    if format is not None and cuts_blocks(mask, parse(format)):
        warn_once(
            warned,
            "mask",
            f"a mask cuts through blocks of {format}: when weights that move make the exponent of their block grow, those that "
            "should not move are rounded to the coarser grid, which keeps their mean but not their numbers. Zeros stay zeros. "
            "For the others take blocks that the mask does not cut ('bfp8/32', say), or fixed or floating point",
            stacklevel=7,
        )


def begins_moments(state: Mapping[str, Any], settings: StepSettings) -> bool:
    """Return True if the next step begins the moments of a preconditioner: the host has to look at its gradient."""
    return settings.preconditioner is not None and "moments" not in state


def prepare_step(
    t: TensorStep, state: dict[str, Any], settings: StepSettings, velocity_key: Key | None, late: bool = False
) -> TensorStep:
    """Return a step with all that the state keeps for it; the first one with a preconditioner begins its moments.

    ``late`` for a parameter that the host does not wait for.
    """
    moments = velocity = None
    if (rms := settings.rms) is not None:
        if "moments" not in state:
            scale = choose_scale(t.gradient, rms)
            g = round_gradient(t.theta, t.gradient, settings, t.key.at(0))
            state["moments"] = hold(begin_moments(g, scale, rms, t.key.at(0)), str(rms.format))
            state["moments_scale"] = scale
        if late and not isinstance(state["moments_scale"], Tensor):
            state["moments_scale"] = torch.full((), state["moments_scale"], device=t.theta.device)
        moments = Moments(state["moments"], state["moments_scale"])
    if settings.friction is not None and velocity_key is not None:
        velocity = Velocity(state["velocity"], state["velocity_unit"], velocity_key)
    center = state["center"] if settings.localization else None
    return t._replace(center=center, mask=state.get("mask"), moments=moments, velocity=velocity)


def complete_step(t: TensorStep, state: Mapping[str, Any], settings: StepSettings, clear: Tensor | None = None) -> None:
    """Move weights that a step took out of their box to its edge, and turn their velocities round.

    ``clear``, a bool on the device, is False if the step was turned into nothing.
    """
    if settings.box is None:
        return
    center = decoded_as(state["center"], working_dtype(t.theta.dtype))
    pairs = [(t.theta, settings.weights_format(t.theta))]
    if t.accumulator is not None:
        pairs.append((t.accumulator, settings.accumulator))
    for target, format in pairs:
        values = decoded_as(target, center.dtype)
        inside, hit = into_box(values, center, settings.box, format)
        if t.mask is not None:
            moving = unpack_mask(t.mask, values.shape)
            inside, hit = torch.where(moving, inside, values), hit & moving
        if clear is not None:
            inside, hit = torch.where(clear, inside, values), hit & clear
        target.copy_(inside)
    if isinstance(t.theta, QTensor):
        torch.autograd.graph.increment_version(t.theta)
    if t.velocity is not None:
        u = decoded_as(t.velocity.values, center.dtype)
        t.velocity.values.copy_(torch.where(hit, -u, u))


def rescale_moments(
    state: dict[str, Any], gradient: Tensor, settings: StepSettings, clear: Tensor | None = None
) -> None:
    """Take a smaller scale for moments that come, or with this gradient will come, near the end of their range.

    See `complete_step` for ``clear``.
    """
    if (rms := settings.rms) is None or "moments" not in state or state["moments"].is_meta:
        return
    if isinstance(state["moments_scale"], Tensor):
        rescale_in_place(state["moments"], gradient, state["moments_scale"], rms, clear)
        return
    if (found := rescale(state["moments"], gradient, state["moments_scale"], rms)) is not None:
        state["moments"].copy_(found[0])
        state["moments_scale"] = found[1]
