"""One step of many tensors, in place, on either of two paths that agree bit for bit.

`update` has a step in plain PyTorch, which is the specification; `kernel_step` has the fused kernels of the tensors' device.
Plain SGLD of plain tensors passes through the operator ``qlangevin::sgld_``, which is opaque to `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..quantization import operators, random
from ..quantization.backend import Kernels, Moments, TensorStep
from ..quantization.qtensor import QTensor, decoded_as
from .host_copy import has_no_numbers
from .kernel_step import check_shape, step_by_kernels, step_kernels
from .masks import unpack_mask
from .preconditioner import gain, next_moments
from .settings import StepSettings, settings_from_text
from .update import Beside, quantize_for, round_gradient, update, update_underdamped

__all__ = ["read_beside", "sgld_op", "step_tensors"]


def step_tensors(tensors: Sequence[TensorStep], settings: StepSettings) -> None:
    """Step plain and packed tensors in place, all with an accumulator or all without."""
    plain = [t for t in tensors if not isinstance(t.theta, QTensor) and t.is_plain]
    if plain:
        sgld_op(
            [t.theta for t in plain],
            [t.gradient for t in plain],
            [t.accumulator for t in plain if t.accumulator is not None],
            [number for t in plain for number in operators.key_bits(t.key)],
            settings.text,
        )
    if len(plain) < len(tensors):
        _step_each([t for t in tensors if isinstance(t.theta, QTensor) or not t.is_plain], settings)


@operators.operator("sgld_", mutates=("thetas", "accumulators"))
def sgld_op(
    thetas: list[Tensor], gradients: list[Tensor], accumulators: list[Tensor], keys: list[int], settings: str
) -> None:
    """Step plain tensors in place. There is an accumulator for each or for none; a key is three numbers.

    ``settings`` is the text of `StepSettings`: schemas know no records, and a step has a dozen settings.
    """
    tensors = []
    for i, (theta, gradient) in enumerate(zip(thetas, gradients, strict=True)):
        key = operators.key_of(*keys[3 * i : 3 * i + 3])
        tensors.append(TensorStep(theta, gradient, key, accumulators[i] if accumulators else None))
    _step_each(tensors, settings_from_text(settings))


@operators.fake("sgld_")
def _(thetas: list[Tensor], *_: Any) -> None:
    return None


def _step_each(tensors: Sequence[TensorStep], settings: StepSettings) -> None:
    """Step tensors in place: by the kernels where they can, by `update` elsewhere."""
    fused: dict[Kernels, list[TensorStep]] = {}
    for t in tensors:
        if has_no_numbers(t.theta):
            check_shape(t.theta, t.gradient)
            continue
        kernels = step_kernels(t.theta, t.gradient, settings)
        if kernels is not None:
            fused.setdefault(kernels, []).append(t)
        else:
            _step_by_pytorch(t, settings)
    for kernels, some in fused.items():
        step_by_kernels(kernels, some, settings)


def _step_by_pytorch(t: TensorStep, settings: StepSettings) -> None:
    """Step one tensor in place: θ, or with an accumulator a the update of a, and then θ = Q_W(a)."""
    format = settings.weights_format(t.theta)
    target, grid = (t.theta, format) if t.accumulator is None else (t.accumulator, settings.accumulator)
    beside = read_beside(t, settings)
    if t.velocity is None:
        target.copy_(update(target, t.gradient, settings, grid, t.key, beside))
    else:
        formats, keys = (grid, settings.velocity_format(t.theta)), (t.key, t.velocity.key)
        moved, velocity = update_underdamped(
            target,
            t.velocity.values,
            t.gradient,
            settings,
            settings.underdamped(t.velocity.unit),
            formats,
            keys,
            beside,
        )
        target.copy_(moved)
        t.velocity.values.copy_(velocity)
    if t.moments is not None:
        _count_gradient(t, t.moments, settings)
    if t.accumulator is not None:
        t.theta.copy_(quantize_for(random.WEIGHT, t.accumulator, format, settings.noise_free_rounding, t.key))
    if isinstance(t.theta, QTensor):
        torch.autograd.graph.increment_version(t.theta)  # a step on codes is a write of its own, on either path


def read_beside(t: TensorStep, settings: StepSettings) -> Beside:
    """Return what a step reads beside weights and gradient as numbers."""
    dtype, rms = operators.working_dtype(t.theta.dtype), settings.rms
    return Beside(
        center=None if t.center is None else decoded_as(t.center, dtype),
        gain=None
        if t.moments is None or rms is None
        else gain(decoded_as(t.moments.values, dtype), t.moments.scale, rms),
        moving=None if t.mask is None else unpack_mask(t.mask, t.theta.shape),
    )


def _count_gradient(t: TensorStep, moments: Moments, settings: StepSettings) -> None:
    """Take a gradient into the running mean of squares, unless that is frozen."""
    rms = settings.rms
    if rms is None or rms.is_frozen(t.key.step):
        return
    g = round_gradient(t.theta, t.gradient, settings, t.key)
    moments.values.copy_(next_moments(decoded_as(moments.values, g.dtype), g, moments.scale, rms, t.key))
