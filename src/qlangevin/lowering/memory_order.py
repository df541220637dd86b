"""Quantization of tensors in the order of their memory, whatever the order of their dims.

A channels-last activation fills its memory without gaps, but not in the order of its dims. It is quantized as it lies there,
without a copy, and its random numbers are drawn in that order too. An order is a permutation of dims that makes a tensor
contiguous; () stands for a tensor that already is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..quantization import operators
from ..quantization.backend import kernels_for
from ..quantization.formats import Format, fit_dtype, parse
from ..quantization.random import Key

__all__ = ["block_order", "memory_order", "quantize_in_memory_order", "reorder_dims", "restore_dims"]


def memory_order(x: Tensor) -> tuple[int, ...] | None:
    """Return the permutation of dims that makes x contiguous without a copy, () if it already is, None if there is none."""
    if x.is_contiguous():
        return ()
    strides = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda d: (-strides[d], d)))
    return order if x.permute(order).is_contiguous() else None


def block_order(x: Tensor, format: Format) -> tuple[int, ...] | None:
    """Return `memory_order` if x has the same blocks in it, else None.

    Blocks that are examples need the first dim first, groups along the last dim need that one last.
    """
    order = memory_order(x)
    return order if not order or format.keeps_blocks(order) else None


def reorder_dims(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return a view of x with its dims in an order."""
    return x.permute(order) if order else x


def restore_dims(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return a view that undoes `reorder_dims`."""
    return x.permute(sorted(range(len(order)), key=order.__getitem__)) if order else x


def quantize_in_memory_order(
    x: Tensor, format: str, rounding: str, key: Key, purpose: int, *, overwrite: bool = False,
    positive: Tensor | None = None, step: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x on a grid, in a new tensor of the same strides or, with ``overwrite``, in x itself.

    ``positive`` holds int8 codes in the `block_order` of x: the result is zero where they are zero or less. ``step``, on the
    device, takes the place of that of the key.
    """
    parsed = fit_dtype(parse(format), x.dtype)
    order, out = block_order(x, parsed), x if overwrite else torch.empty_like(x)
    source, target = (x, out) if order is None else (reorder_dims(x, order), reorder_dims(out, order))
    kernels = kernels_for(x)
    if kernels is None or x.dtype not in kernels.floats:
        key = key if step is None else replace(key, step=int(step))
        target.copy_(operators.quantize_op(source, format, rounding, *operators.key_bits(key), purpose))
        return out
    if order is None:
        target.copy_(kernels.quantize(source.contiguous(), parsed, rounding, key, purpose, step=step))
    else:
        kernels.quantize(source, parsed, rounding, key, purpose, out=target, positive=positive, step=step)
    return out
