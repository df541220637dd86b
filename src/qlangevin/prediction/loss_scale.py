"""A test of a loss: is it the mean over the batch, as `SGLD` needs it, or the sum?

A batch in which every example stands twice has the same mean loss, and twice the sum. So the ratio of gradient norms

    r = |∇ loss(batch, batch)| / |∇ loss(batch)|

is 1 for a mean and 2 for a sum, whatever the model, the data or the units of the loss. From gradients of training alone nobody
can tell: a sum over B examples is the mean of another loss, B times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import lowering
from .._warnings import warn
from .batches import is_several, list_tensors
from .ensemble import evaluation_mode

__all__ = ["check_loss_scale"]

M = TypeVar("M", bound=nn.Module)
MOST = 1.5  # between a mean and a sum: rounding of lowered layers, or a penalty in the loss, move the ratio by less


def check_loss_scale(loss_fn: Callable[[M, Any], Tensor], model: M, batch: Any) -> float:
    """Return |∇ loss(batch twice)| / |∇ loss(batch)|: 1 for a mean over the batch, 2 for a sum, of which it warns.

    Nothing changes: weights, gradients, statistics of batch normalization and random generators are as before. Dropout is off
    meanwhile. ``check_loss_scale(lambda model, batch: model(**batch).loss, model, batch)``

    Args:
        loss_fn: computes the loss of the model for a batch.
        model: the model that is sampled.
        batch: a tensor, or tuples, lists and dicts of tensors whose first dim is the examples'.
    """
    size = _count_examples(batch)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("model must have a parameter that requires gradients, got none")
    devices, counts = [p.device for p in parameters if p.is_cuda], lowering.state_dict(model)
    try:
        with evaluation_mode(model), torch.random.fork_rng(devices), torch.enable_grad():
            once, twice = (_gradient_norm(loss_fn(model, x), parameters) for x in (batch, _repeat(batch, size)))
    finally:
        lowering.load_state_dict(model, counts)  # or the chain would go on with other random bits
    if once == 0:
        raise ValueError("the gradient of the loss is zero for this batch; give another batch, or other weights")
    ratio = twice / once
    if ratio > MOST:
        warn(
            f"the loss looks like a sum over the batch: its gradient grows {ratio:.3g} times when every example stands twice in "
            "the batch. SGLD needs the mean over what num_data counts, or each example counts as often as a batch has examples; "
            f"divide the loss by the number of examples, {size} in this batch"
        )
    return ratio


def _gradient_norm(loss: Any, parameters: list[nn.Parameter]) -> float:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"loss_fn must return a loss to differentiate, a tensor of one number, got {kind}")
    # No hook that steps in backward runs: gradients are returned, and not accumulated.
    gradients = torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True)
    norms = [torch.linalg.vector_norm(g.detach().double()) for g in gradients if g is not None]
    norm = float(torch.stack([n.cpu() for n in norms]).norm()) if norms else 0.0
    if norm != norm or norm == float("inf"):
        raise FloatingPointError("the gradient of the loss is not finite for this batch")
    return norm


def _count_examples(batch: Any) -> int:
    sizes = [t.shape[0] for t in list_tensors(batch) if t.dim()]
    if not sizes or not sizes[0]:
        raise ValueError(f"batch must hold tensors whose first dim is the examples', got {type(batch).__name__}")
    return sizes[0]


def _repeat(x: Any, size: int) -> Any:
    """Return a batch in which every example stands twice; tensors that are not of its size, such as masks, stay."""
    if isinstance(x, Tensor):
        return torch.cat([x, x]) if x.dim() and x.shape[0] == size else x
    if isinstance(x, Mapping):
        return {name: _repeat(value, size) for name, value in x.items()}
    if is_several(x):
        parts = [_repeat(part, size) for part in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x
