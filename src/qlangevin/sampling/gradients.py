"""Gradients before a step: a search for numbers that are not finite, and clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dtensor import sum_over_shards
from ..quantization.backend import Kernels, kernels_for
from .host_copy import has_no_numbers

__all__ = ["clip_to_norm", "first_not_finite"]


def first_not_finite(tensors: list[Tensor]) -> int:
    """Return the index of the first tensor that holds an infinity or a NaN, or -1."""
    fast: dict[tuple[Kernels, torch.device | None], list[int]] = {}
    slow = []
    for i, t in enumerate(tensors):
        if has_no_numbers(t):
            continue
        kernels = kernels_for(t) if t.is_contiguous() else None
        if kernels is None or t.dtype not in kernels.floats:
            slow.append(i)
        else:
            fast.setdefault((kernels, None if t.is_cpu else t.device), []).append(i)
    bad = [i for i in slow if not bool(tensors[i].isfinite().all())][:1]
    for (kernels, _), some in fast.items():
        found = kernels.first_not_finite([tensors[i] for i in some])
        bad += [some[found]] if found >= 0 else []
    return min(bad, default=-1)


def clip_to_norm(gradient: Tensor, p: Tensor, most: float, *, wait: bool = True) -> Tensor:
    """Return g · min(1, most / ‖g‖) of a parameter's gradient; the norm is that of all its shards.

    Without waiting the norm stays on its device, and a gradient that is not finite gets a NaN.
    """
    square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    if not wait:
        norm = square.sqrt()
        factor = torch.where(norm <= most, 1.0, most / norm).float()
        return (gradient.float() * factor).to(gradient.dtype)  # as torch multiplies by a number
    size = float(sum_over_shards(square, p)) ** 0.5
    return gradient if size <= most else gradient * (most / size)
