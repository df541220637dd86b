"""Other tensors in the places of a model's parameters, and optimizers that still hold the old ones.

An optimizer keeps the tensors it was made for. Once the model holds others, its steps would change nothing that the model
computes with. So a replaced tensor is marked, and every optimizer that holds a marked one refuses to step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

__all__ = ["check_not_replaced", "mark_replaced", "refer_to_parameters", "replace_parameters"]

M = TypeVar("M", bound=nn.Module)
MARK = "_qlangevin_replaced_by"
CHECKS = "checks_parameters"  # an optimizer's own attribute: its step calls `check_not_replaced`


def replace_parameters(model: M, new: Mapping[int, nn.Parameter], by: str) -> M:
    """Put new parameters, by the id of the old, in all places the old ones have: tied weights stay tied.

    ``by`` names the function that did it, for messages.
    """
    old = refer_to_parameters(model)
    places = [
        (module, name, p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in new
    ]
    for module, name, p in places:
        setattr(module, name, new[id(p)])
    mark_replaced(old, model, by)
    return model


def refer_to_parameters(model: nn.Module) -> list[weakref.ref[nn.Parameter]]:
    """Return references that do not keep the parameters alive."""
    return [weakref.ref(p) for p in model.parameters()]


def mark_replaced(old: Iterable[weakref.ref[nn.Parameter]], model: nn.Module, by: str) -> None:
    """Mark those of the old parameters that the model no longer has."""
    now = {id(p) for p in model.parameters()}
    for p in (p for reference in old if (p := reference()) is not None and id(p) not in now):
        setattr(p, MARK, by)
        _check_every_optimizer()


def check_not_replaced(p: Tensor) -> None:
    """Raise ValueError for a marked parameter."""
    if (by := getattr(p, MARK, None)) is not None:
        raise ValueError(
            f"{by}(model) has put another tensor in its place, so steps of this one would be lost; "
            f"after {by} make a new optimizer or sampler of model.parameters()"
        )


@cache
def _check_every_optimizer() -> None:
    """Have torch check the parameters of any optimizer before each step, from the first mark in this process on.

    No other way leads to optimizers that are not ours: a training loop that kept its AdamW would run on and learn nothing.
    """
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() and getattr(optimizer, CHECKS, False):
        return  # a walk through the groups would have the graph depend on lr
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            try:
                check_not_replaced(p)
            except ValueError as error:
                name = repr(group["param_names"][i]) if "param_names" in group else f"{i} (shape {tuple(p.shape)})"
                raise ValueError(f"{type(optimizer).__name__} cannot step: parameter {name}: {error}") from None
