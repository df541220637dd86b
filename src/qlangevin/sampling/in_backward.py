"""Parameters that a sampler steps as soon as autograd has their gradient: the hooks, and the passes that make up one step.

One step is ``accumulate`` backward passes. A parameter that has had them has stepped, and until ``step()`` or ``zero_grad()``
ends the step one more gradient is an error: it would take a second step, with noise of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, Protocol

from torch import Tensor

from .._dtensor import local
from .._validate import check_integer, check_number
from .._warnings import warn_once

__all__ = [
    "Options", "attach_hook", "drop_passes", "has_hook_of_another", "read_options", "refuse_pass", "total_gradient",
    "warn_of_passes",
]  # fmt: skip


class Options(NamedTuple):
    """Settings of a parameter group that steps in backward; a group has those that are not the default."""

    accumulate: int = 1
    max_grad_norm: float | None = None

    def to_group(self) -> dict[str, Any]:
        """Return the settings that are not the default."""
        return {k: v for k, v in self._asdict().items() if v != self._field_defaults[k]}


def read_options(group: Mapping[str, Any], step_in_backward: bool) -> Options:
    """Return the options of a group; raise ValueError if one is out of range or goes without ``step_in_backward``."""
    return _check_options(step_in_backward, *(group.get(name, d) for name, d in Options._field_defaults.items()))


@lru_cache(maxsize=64, typed=True)  # asked for at each gradient; typed: True is not 1
def _check_options(step_in_backward: bool, accumulate: Any, max_grad_norm: Any) -> Options:
    accumulate = check_integer("accumulate", accumulate, 1)
    if max_grad_norm is not None and not check_number("max_grad_norm", max_grad_norm) > 0:
        raise ValueError(f"max_grad_norm must be positive, got {max_grad_norm!r}; None does not clip")
    if not step_in_backward and accumulate > 1:
        raise ValueError(
            f"accumulate={accumulate} goes with step_in_backward=True; else gradients add up until step() is called"
        )
    if not step_in_backward and max_grad_norm is not None:
        raise ValueError(
            f"max_grad_norm={max_grad_norm} goes with step_in_backward=True; else call "
            f"torch.nn.utils.clip_grad_norm_(model.parameters(), {max_grad_norm}) before step()"
        )
    return Options(accumulate, None if max_grad_norm is None else float(max_grad_norm))


# ---- the passes of one step: state["gradient"] is the sum of the gradients of state["passes"] of them


def total_gradient(p: Tensor, state: Mapping[str, Any]) -> Tensor | None:
    """Return the gradient that has just arrived, added to those of earlier passes; None if there is none."""
    waiting = state.get("gradient")
    if p.grad is None:
        return waiting
    return local(p.grad) if waiting is None else waiting + local(p.grad)


def drop_passes(state: dict[str, Any]) -> None:
    """Forget the passes that a parameter has had, and their gradients."""
    for name in ("gradient", "passes"):
        state.pop(name, None)


def refuse_pass(name: str, accumulate: int) -> NoReturn:
    """Raise RuntimeError for a gradient of a parameter that has stepped already."""
    passes = "backward pass" if accumulate == 1 else f"{accumulate} backward passes"
    raise RuntimeError(
        f"{name} has stepped already, and was not changed by this backward pass: it would have taken a second step, with noise "
        f"of its own. Call step() or zero_grad() of the sampler after each {passes}; to step once on the gradients of k passes, "
        "make it with accumulate=k. A weight that checkpointed regions share has one gradient in a backward pass only if they "
        "have use_reentrant=False"
    )


def warn_of_passes(given: set[str], what: str, passes: int, accumulate: int, name: str, stacklevel: int) -> None:
    """Warn, once, of a step that ends before all of its backward passes have come."""
    of = f"{passes} of accumulate={accumulate} backward passes"
    warn_once(given, what, f"{what} the gradient of {name} after {of}; call step() after all of them", stacklevel)


# ---- hooks


class Sampler(Protocol):
    def step_one(self, p: Tensor) -> None: ...


_one_at_a_time = threading.RLock()  # autograd has a thread for each GPU


class StepHook:
    """The hook of a sampler on a parameter; it does not keep the sampler alive."""

    def __init__(self, sampler: Sampler, tensor: int) -> None:
        self.sampler, self.tensor = weakref.ref(sampler), tensor

    def __call__(self, p: Tensor) -> None:
        sampler = self.sampler()
        if sampler is not None:
            with _one_at_a_time:
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
