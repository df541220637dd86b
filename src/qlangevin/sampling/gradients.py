"""Gradients before a step: a search for numbers that are not finite, and clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from .._dtensor import sum_over_shards

__all__ = ["clip_to_norm", "first_not_finite"]


def first_not_finite(tensors: list[Tensor]) -> int:
    """Return the index of the first tensor that holds an infinity or a NaN, or -1."""
    fast = [
        i for i, t in enumerate(tensors) if t.dtype == torch.float32 and t.is_contiguous() and native.enabled_for(t)
    ]
    found = native.first_not_finite([tensors[i] for i in fast]) if fast else -1
    bad = [fast[found]] if found >= 0 else []
    if len(fast) < len(tensors):
        slow = sorted(set(range(len(tensors))) - set(fast))
        bad += [i for i in slow if not bool(tensors[i].isfinite().all())][:1]
    return min(bad, default=-1)


def clip_to_norm(gradient: Tensor, p: Tensor, most: float) -> Tensor:
    """Return g · min(1, most / ‖g‖) of a parameter's gradient; the norm is that of all its shards."""
    square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    norm = float(sum_over_shards(square, p)) ** 0.5
    return gradient if norm <= most else gradient * (most / norm)
