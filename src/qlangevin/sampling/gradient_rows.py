"""A few rows of each gradient, kept now and then for `SGLD.diagnose`: a sampler that steps in backward leaves no gradients.

To keep rows is one copy of at most a few thousand numbers, before steps 1, 101, 201, ... and the first one after a state was
loaded, which has none. What they mean is computed only when somebody asks.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["EVERY", "RowSample", "is_kept", "keep_rows", "some_rows"]

EVERY = 100  # steps
KEPT = 4096  # numbers of a gradient
MEASURED = 16384  # weights of a parameter that `diagnose` measures


class RowSample:
    """Rows of a parameter (slices along dim 0; elements of a vector) and their gradient."""

    def __init__(self, rows: slice, gradient: Tensor) -> None:
        self.rows, self.gradient = rows, gradient


def is_kept(step: int) -> bool:
    """Return True if rows of the gradients of this step are kept."""
    return step % EVERY == 1


def some_rows(shape: torch.Size, most: int) -> slice:
    """Return rows that hold at most this many numbers, but at least one row: evenly spaced, of a vector the first.

    Rows and runs of a vector keep blocks whole.
    """
    count = shape[0] if shape else 1
    size = max(1, shape.numel() // max(1, count))
    wanted = max(1, most // size)
    if len(shape) < 2:
        return slice(0, min(count, wanted))
    return slice(0, None, max(1, -(-count // wanted)))


def keep_rows(gradient: Tensor) -> RowSample:
    """Return a copy of some rows of a gradient, made on its device without waiting for it."""
    rows = some_rows(gradient.shape, KEPT)
    return RowSample(rows, as_rows(gradient.detach())[rows].clone())


def as_rows(t: Tensor) -> Tensor:
    """Return a tensor that has rows: a number is a vector of one element."""
    return t if t.dim() else t.reshape(1)
