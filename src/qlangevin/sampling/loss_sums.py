"""A look at the loss of a sampler's first backward pass: is it the sum over a batch, where the mean is needed?

Gradients do not tell: a sum over B examples is the mean of another loss, B times as large. The graph that autograd made of the
loss does, if the sum is the last thing that was computed: ``cross_entropy(..., reduction="sum")``, ``losses.sum()`` of losses
without reduction, ``((outputs - targets) ** 2).sum()``, and sums of these with other terms. What is multiplied or divided
afterwards may be a mean, and is not judged; nor is a batch of one example.

A hook on each parameter runs with the first gradient, finds the loss in the call of ``backward``, and removes all hooks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from .._warnings import warn_once

__all__ = ["FirstBackward", "count_summed", "warn_of_sum"]

NONE, SUM = 0, 2  # of PyTorch's reductions; 1 is the mean
# Nodes whose numbers are those of their input, once each: they neither scale a loss nor move examples to another dim.
PASSED = ("Neg", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Clone", "Alias", "ToCopy", "LogSoftmax", "Slice")
BACKWARD: CodeType | None = getattr(torch.autograd.backward, "__code__", None)


class Watching(Protocol):
    """Attributes of a sampler that are needed here."""

    param_groups: list[dict[str, Any]]

    @property
    def warned(self) -> set[str]: ...


class FirstBackward:
    """Hooks of a sampler on its parameters, until the first backward pass; they do not keep the sampler alive."""

    def __init__(self, sampler: Watching) -> None:
        self.handles: list[Any] = []
        self.sampler = weakref.ref(sampler, self._remove_hooks)

    def attach(self, p: Tensor) -> None:
        """Look at the loss when this parameter gets a gradient."""
        if BACKWARD is not None and p.requires_grad and p.is_leaf:
            self.handles.append(p.register_post_accumulate_grad_hook(self))

    def _remove_hooks(self, _: object = None) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def __call__(self, p: Tensor) -> None:
        self._remove_hooks()
        sampler, loss = self.sampler(), _find_loss()
        if sampler is not None and loss is not None:
            warn_of_sum(sampler, loss, stacklevel=6)


def warn_of_sum(sampler: Watching, loss: Tensor, divided_by: float = 1, stacklevel: int = 2) -> None:
    """Warn, once for a sampler, if its loss is a sum over a batch; ``divided_by`` is a number that is not the user's."""
    noisy = [float(group["num_data"]) for group in sampler.param_groups if group["temperature"]]
    terms = count_summed(loss, divided_by)
    if terms < 2 or max(noisy, default=0) < terms:  # num_data=1 makes a sum over all data right
        return
    warn_once(
        sampler.warned,
        "sum",
        f"the loss is a sum over {terms} examples or more, and must be the mean over what num_data={max(noisy):g} counts: each "
        f"of them would count {terms} times, as at a temperature of 1/{terms}. Take reduction='mean', or divide by their number. "
        "(If these are the parts of one example, such as the tokens of a text that num_data counts as one, all is well)",
        stacklevel,
    )


def count_summed(loss: Tensor, divided_by: float = 1) -> int:
    """Return the length of the first dim that a loss was summed over as a last step; 0 if it was not, or that is not known."""
    node = loss.grad_fn
    if loss.numel() != 1 or node is None:
        return 0
    if _kind(node) == "Div" and _divisor(node) == divided_by:
        node = _inputs(node)[0]
    return _count_summed(node)


def _count_summed(node: Any) -> int:
    node = _skip_passed(node)
    if node is None:
        return 0
    if getattr(node, "_saved_reduction", None) == SUM:
        return _count_rows(_inputs(node)[0])
    if _kind(node) == "Add" and getattr(node, "_saved_alpha", 1) == 1:
        return max(map(_count_summed, _inputs(node)))
    if _kind(node) == "Sum" and _shape(node) == ():
        terms = _skip_passed(_inputs(node)[0])
        if terms is not None and (getattr(terms, "_saved_reduction", None) == NONE or _is_squared_error(terms)):
            return _count_rows(_inputs(terms)[0])
    return 0


def _is_squared_error(node: Any) -> bool:
    return (
        _kind(node) == "Pow"
        and getattr(node, "_saved_exponent", None) == 2
        and _kind(_inputs(node)[0]) == "Sub"
        and not any(_kind(each) == "AccumulateGrad" for each in _inputs(_inputs(node)[0]))  # a penalty on weights
    )


def _count_rows(node: Any) -> int:
    """Return the length of the first dim of what a loss was computed from; 0 if that may be no batch."""
    shapes = []
    while _kind(node) in PASSED:
        shapes.append(_shape(node))
        node = _inputs(node)[0]
    if node is None or _kind(node) in ("AccumulateGrad", "Select", "Unsqueeze", "Transpose", "Permute", "T"):
        return 0  # weights, and shapes whose first dim may be something else
    # Numbers in one dim may be the outputs of one example; tokens may be those of one text, of shape (1, tokens, words).
    return min((shape[0] for shape in [*shapes, _shape(node)] if len(shape) > 1), default=0)


def _skip_passed(node: Any) -> Any:
    while node is not None and _kind(node) in PASSED:
        node = _inputs(node)[0]
    return node


def _kind(node: Any) -> str:
    """Return the name of the operation that a node differentiates: "Add" of "AddBackward0"."""
    return "" if node is None else str(node.name()).rpartition("::")[2].partition("Backward")[0]


def _inputs(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions] or [None]


def _shape(node: Any) -> tuple[int, ...]:
    """Return the shape of the first result of a node; autograd frees the results themselves before leaves are reached."""
    metadata = getattr(node, "_input_metadata", ())
    return tuple(int(size) for size in metadata[0].shape) if metadata else ()


def _divisor(node: Any) -> float | None:
    try:
        return float(node._saved_other)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it was freed, or is no number
        return None


def _find_loss() -> Tensor | None:
    """Return the tensor that ``backward`` is called of; None if it is not one alone, or is given a gradient of its own."""
    running = [frame for frame in map(_outermost_backward, sys._current_frames().values()) if frame is not None]
    if len(running) != 1:  # a GPU's gradients come in another thread, so with two calls nobody knows which it is
        return None
    tensors, given = (running[0].f_locals.get(name) for name in ("tensors", "grad_tensors"))
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    weights = [given] if isinstance(given, Tensor) else given or ()
    if not isinstance(tensors, Iterable) or any(each is not None for each in weights):
        return None
    losses = list(tensors)
    return losses[0] if len(losses) == 1 and isinstance(losses[0], Tensor) else None


def _outermost_backward(frame: FrameType | None) -> FrameType | None:
    found = None
    while frame is not None:
        if frame.f_code is BACKWARD:
            found = frame
        frame = frame.f_back
    return found
