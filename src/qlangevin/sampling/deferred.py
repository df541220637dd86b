"""A step of many parameters that the host does not wait for: which can take it, and the calls it consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from .._dtensor import local
from ..quantization.backend import Kernels, TensorStep, is_deferred
from .device_counts import SamplerCounts
from .host_copy import has_no_numbers
from .kernel_step import readable_gradient, step_by_kernels, step_kernels
from .settings import StepSettings

__all__ = ["can_be_deferred", "find_deferred", "step_deferred"]


def can_be_deferred(p: Tensor, theta: Tensor, gradient: Tensor | None, settings: StepSettings) -> bool:
    """Return True if kernels that the host need not wait for can step a parameter. Shards wait for each other.

    Without a gradient: if they can with one of the parameter's own kind.
    """
    if local(p) is not p:
        return False
    kernels = step_kernels(theta, gradient, settings)
    return kernels is not None and kernels.deferred


def find_deferred(
    gradients: Mapping[Tensor, Tensor], theta_of: Callable[[Tensor], Tensor], settings: StepSettings
) -> dict[Tensor, Tensor]:
    """Return those parameters that `can_be_deferred`, and their gradients."""
    on_cpu = is_deferred("cpu")  # asked once: most samplers are on the CPU, where it is False
    return {
        p: g for p, g in gradients.items() if (on_cpu or not p.is_cpu) and can_be_deferred(p, theta_of(p), g, settings)
    }


def step_deferred(plans: Sequence[tuple[Mapping[Tensor, TensorStep], StepSettings]], counts: SamplerCounts) -> None:
    """Step parameters in place, and launch as little as possible for it.

    On each device that is one call of `begin_step` for all parameters, then one of `sgld` for each group. If a gradient is not
    finite, the kernels change no parameter; `SamplerCounts.failed` will know.
    """
    ready = [({p: _make_ready(t, settings) for p, t in some.items()}, settings) for some, settings in plans]
    everyone = {p: t for some, _ in ready for p, t in some.items()}
    if any(has_no_numbers(t.theta) for t in everyone.values()):
        return
    counts.begin({p: t.gradient for p, t in everyone.items()})
    for some, settings in ready:
        for device in dict.fromkeys(p.device for p in some):
            here = {p: t for p, t in some.items() if p.device == device}
            kernels = _kernels_of(next(iter(here.values())), settings)
            step_by_kernels(kernels, [*here.values()], settings, counts.counters([*here]))


def _make_ready(t: TensorStep, settings: StepSettings) -> TensorStep:
    """Return the tensors with a gradient that kernels read: the same is looked at and then used."""
    return t._replace(gradient=readable_gradient(t.theta, t.gradient, _kernels_of(t, settings).floats))


def _kernels_of(t: TensorStep, settings: StepSettings) -> Kernels:
    kernels = step_kernels(t.theta, t.gradient, settings)
    assert kernels is not None  # as `can_be_deferred` has found
    return kernels
