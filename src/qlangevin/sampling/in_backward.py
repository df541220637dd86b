"""Hooks that have a sampler step a parameter as soon as autograd has its gradient."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor

__all__ = ["attach_hook", "has_hook_of_another"]


class Sampler(Protocol):
    def step_one(self, p: Tensor) -> None: ...


class StepHook:
    """The hook of a sampler on a parameter; it does not keep the sampler alive."""

    def __init__(self, sampler: Sampler, tensor: int) -> None:
        self.sampler, self.tensor = weakref.ref(sampler), tensor

    def __call__(self, p: Tensor) -> None:
        sampler = self.sampler()
        if sampler is not None:
            sampler.step_one(p)


def attach_hook(p: Tensor, sampler: Sampler) -> None:
    """Have a sampler step a parameter in backward, if it does not do so already."""
    hooks = _step_hooks(p)
    if any(hook.sampler() is sampler and hook.tensor == p._cdata for hook in hooks.values()):
        return
    for key in [key for key, hook in hooks.items() if hook.sampler() is None]:
        del p._post_accumulate_grad_hooks[key]
    if any(hook.sampler() is sampler for hook in hooks.values()):
        # The model was moved: p wraps another C++ tensor, which calls no hooks though the Python attribute lists them.
        p._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    p.register_post_accumulate_grad_hook(StepHook(sampler, p._cdata))


def has_hook_of_another(p: Tensor, sampler: Sampler) -> bool:
    """Return whether another sampler steps a parameter in backward."""
    return any(hook.sampler() not in (None, sampler) for hook in _step_hooks(p).values())


def _step_hooks(p: Tensor) -> dict[int, StepHook]:
    hooks = getattr(p, "_post_accumulate_grad_hooks", None)
    return {key: hook for key, hook in hooks.items() if isinstance(hook, StepHook)} if hooks else {}
