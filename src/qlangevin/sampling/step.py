"""One step of Langevin dynamics: the update as a pure function of tensors, and the driver that steps many.

`step_tensors` runs on two paths that agree bit for bit: `update` in plain PyTorch, which is the specification, and the fused
kernels of the tensors' device. Plain tensors pass through the operator ``qlangevin::sgld_``, which is opaque to `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..quantization import operators, random
from ..quantization.backend import Kernels, TensorStep
from ..quantization.formats import parse
from ..quantization.laws import Mean
from ..quantization.operators import Rounding
from ..quantization.qtensor import QTensor, decoded_as
from ..quantization.random import Key
from .host_copy import has_no_numbers
from .kernel_step import check_shape, step_by_kernels, step_kernels
from .settings import StepSettings, settings_from_text

__all__ = ["quantize_for", "sgld_op", "step_tensors", "update"]


def quantize_for(purpose: int, x: Tensor, format: str | None, rounding: Rounding, key: Key) -> Tensor:
    """Round x to a format with the bits that `random` has for a purpose; without a format return x itself."""
    if format is None:
        return x
    return cast(Tensor, operators.quantize_op(x, format, rounding, *operators.key_bits(key), purpose))


def update(theta: Tensor, gradient: Tensor, settings: StepSettings, format: str | None, key: Key) -> Tensor:
    """Return θ' on the grid of ``format`` (None: float64, no grid), as a new float32 or float64 tensor.

    With learning rate lr, weight decay λ, noise variance v and standard normal ξ

        δ  = -lr (Q_G(∇loss) + λ θ)
        θ' = Q^vc(θ + δ, v)             rounding="corrected"    VC SGLDLP-L, Algorithms 1 and 4
             Q^s(θ + (δ + sqrt(v) ξ))   rounding="stochastic"   naive SGLDLP-L
             Q^d(θ + (δ + sqrt(v) ξ))   rounding="nearest"

    The drift δ is never added to θ in float32 before θ is rounded: there it would lose its digits, or all of itself.
    """
    check_shape(theta, gradient)
    dtype = operators.working_dtype(theta.dtype)
    theta, gradient = decoded_as(theta, dtype), gradient.to(dtype)
    g = quantize_for(random.GRADIENT, gradient, settings.gradients, "stochastic", key)
    g = -g if settings.maximize else g
    drift = -settings.lr * (g + settings.weight_decay * theta)
    variance = torch.full((), settings.variance, dtype=dtype, device=theta.device)
    if settings.rounding == "corrected" and format is not None:
        return operators.draw(Mean(theta, drift), variance, parse(format), key, settings.algorithm)
    if settings.variance > 0:
        xi = random.normal(key, theta.numel(), device=theta.device).to(dtype).view(theta.shape)
        drift = drift + random.root(variance) * xi
    if format is None or settings.rounding == "nearest":
        return quantize_for(random.ROUNDING, theta + drift, format, "nearest", key)
    return operators.draw(Mean(theta, drift), torch.zeros_like(variance), parse(format), key)


def step_tensors(tensors: Sequence[TensorStep], settings: StepSettings) -> None:
    """Step plain and packed tensors in place, all with an accumulator or all without."""
    plain = [t for t in tensors if not isinstance(t.theta, QTensor)]
    if plain:
        sgld_op(
            [t.theta for t in plain],
            [t.gradient for t in plain],
            [t.accumulator for t in plain if t.accumulator is not None],
            [number for t in plain for number in operators.key_bits(t.key)],
            settings.text,
        )
    if len(plain) < len(tensors):
        _step_each([t for t in tensors if isinstance(t.theta, QTensor)], settings)


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
    if t.accumulator is None:
        t.theta.copy_(update(t.theta, t.gradient, settings, format, t.key))
    else:
        t.accumulator.copy_(update(t.accumulator, t.gradient, settings, settings.accumulator, t.key))
        t.theta.copy_(quantize_for(random.WEIGHT, t.accumulator, format, settings.noise_free_rounding, t.key))
    if isinstance(t.theta, QTensor):
        torch.autograd.graph.increment_version(t.theta)  # a step on codes is a write of its own, on either path
