"""Stepping a parameter as soon as backward has its gradient: hooks on parameters, and the sampler they act for."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor

__all__ = ["attach", "taken"]


class Sampler(Protocol):
    def step_one(self, p: Tensor) -> None: ...


class InBackward:
    """The hook on a parameter; it does not keep the sampler alive."""

    def __init__(self, sampler: Sampler, tensor: int) -> None:
        self.sampler, self.tensor = weakref.ref(sampler), tensor

    def __call__(self, p: Tensor) -> None:
        sampler = self.sampler()
        if sampler is not None:
            sampler.step_one(p)


def attach(p: Tensor, sampler: Sampler) -> None:
    """Have a sampler step a parameter in backward, if it does not do so already."""
    hooks = _hooks(p)
    if any(hook.sampler() is sampler and hook.tensor == p._cdata for hook in hooks.values()):
        return
    for key in [key for key, hook in hooks.items() if hook.sampler() is None]:
        del p._post_accumulate_grad_hooks[key]
    if any(hook.sampler() is sampler for hook in hooks.values()):
        # The model was moved: its parameters are other tensors inside, which have no hooks, whatever is written outside.
        p._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    p.register_post_accumulate_grad_hook(InBackward(sampler, p._cdata))


def taken(p: Tensor, sampler: Sampler) -> bool:
    """Whether another sampler steps a parameter in backward."""
    return any(hook.sampler() not in (None, sampler) for hook in _hooks(p).values())


def _hooks(p: Tensor) -> dict[int, InBackward]:
    hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
    return {key: hook for key, hook in hooks.items() if isinstance(hook, InBackward)}
