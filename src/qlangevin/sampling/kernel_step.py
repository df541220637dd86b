"""A step by the fused kernels of a device: which tensors they take, and how these are handed to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..quantization.backend import Kernels, TensorStep, kernels_for
from ..quantization.codes import pack_codes
from ..quantization.formats import parse
from ..quantization.qtensor import QTensor, one_code_a_byte
from .settings import StepSettings

__all__ = ["Counters", "check_shape", "readable_gradient", "step_by_kernels", "step_kernels"]


class Counters(NamedTuple):
    """Step numbers on a device, and the flag that turns a step into nothing; see `Kernels.begin_step`."""

    slots: Sequence[int]
    counts: Tensor
    flags: Tensor

    def pick(self, chosen: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of `Kernels.sgld` for some of the tensors."""
        return {"slots": [self.slots[i] for i in chosen], "counts": self.counts, "flags": self.flags}


def step_kernels(theta: Tensor, gradient: Tensor | None, settings: StepSettings) -> Kernels | None:
    """Return the kernels that can step a tensor, with a gradient or with any; None if `update` has to."""
    if settings.algorithm == "paper" and settings.rounding == "corrected":
        return None
    memory = theta.codes if isinstance(theta, QTensor) else theta
    kernels = kernels_for(memory) if gradient is None else kernels_for(memory, gradient)
    if kernels is None or theta.dtype == torch.float64 or not _can_take(theta, settings):
        return None
    return kernels if memory is not theta or theta.dtype in kernels.floats else None


def _can_take(theta: Tensor, settings: StepSettings) -> bool:
    """Return False for velocities or moments of which two share a byte: kernels write one code an element."""
    if settings.is_plain:
        return True
    formats = [settings.velocity_format(theta)] if settings.friction is not None else []
    formats += [str(settings.rms.format)] if settings.rms is not None else []
    return all(name is None or parse(name).storage_bits > 4 for name in formats)


def step_by_kernels(
    kernels: Kernels, tensors: Sequence[TensorStep], s: StepSettings, counters: Counters | None = None
) -> None:
    """Step tensors of one device in place, in one call for each format that is not that of the group."""
    gradients, accumulator = (parse(f) if f else None for f in (s.gradients, s.accumulator))
    calls: dict[str | None, list[int]] = {}
    for i, t in enumerate(tensors):
        own = t.theta.dtype == torch.float32 or isinstance(t.theta, QTensor)
        calls.setdefault(s.weights if own else s.weights_format(t.theta), []).append(i)
    dynamics = {} if s.is_plain else {"dynamics": s}
    for weights, chosen in calls.items():
        some = [tensors[i] for i in chosen]
        readable = [_make_readable(t, kernels.floats) for t in some]
        on_device = {} if counters is None else counters.pick(chosen)
        kernels.sgld(
            readable, weights=parse(weights) if weights else None, gradients=gradients, accumulator=accumulator,
            rounding=s.rounding, lr=s.lr, weight_decay=s.weight_decay, variance=s.variance, maximize=s.maximize, **on_device,
            **dynamics,
        )  # fmt: skip
        for t, stepped in zip(some, readable, strict=True):
            _write_back(t.theta, stepped.theta)
            torch.autograd.graph.increment_version(t.theta)  # autograd does not see what the kernels write


def _make_readable(t: TensorStep, floats: frozenset[torch.dtype]) -> TensorStep:
    """Return the tensors as the kernels read them: contiguous, one code to a byte at most, of a dtype that they take."""
    gradient = readable_gradient(t.theta, t.gradient, floats)
    theta = one_code_a_byte(t.theta) if isinstance(t.theta, QTensor) else t.theta.contiguous()
    center = one_code_a_byte(t.center) if isinstance(t.center, QTensor) else t.center
    if center is not None and not isinstance(center, QTensor) and center.dtype not in floats:
        center = center.to(torch.float32)
    if theta is t.theta and gradient is t.gradient and center is t.center:
        return t
    return t._replace(theta=theta, gradient=gradient, center=center)


def readable_gradient(theta: Tensor, gradient: Tensor, floats: frozenset[torch.dtype]) -> Tensor:
    """Return the gradient of a tensor as the kernels read it: contiguous, and float32 if they do not take its dtype."""
    check_shape(theta, gradient)
    gradient = (gradient if gradient.dtype in floats else gradient.to(torch.float32)).contiguous()
    return gradient.resolve_neg() if gradient.is_neg() else gradient  # conj().imag holds its negative in memory


def _write_back(theta: Tensor, stepped: Tensor) -> None:
    """Write what the kernels have stepped into the tensor that it stands for, if it is not that one."""
    if stepped is theta:
        return
    if isinstance(theta, QTensor) and isinstance(stepped, QTensor):
        theta.codes.copy_(pack_codes(stepped.codes, theta.format))  # exponents are shared
    else:
        theta.copy_(stepped)


def check_shape(theta: Tensor, gradient: Tensor) -> None:
    """Raise ValueError for a gradient of another shape than its tensor."""
    if gradient.shape != theta.shape:
        raise ValueError(f"the gradient must have theta's shape, {tuple(theta.shape)}, got {tuple(gradient.shape)}")
