"""ReLU of numbers on the grid of the activations, which stay there: codes and mask in one pass.

forward    y = max(x, 0)
backward   e_x = Q_E(e_y) · [y > 0]
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..quantization import random
from ..quantization.backend import Kernels
from ..quantization.formats import parse
from .memory_order import block_order, quantize_in_memory_order, reorder_dims
from .plain_tensors import (
    QuantizationSpec,
    apply_function,
    find_saving,
    has_overflowed,
    is_deferred,
    mark_on_grid,
    quantize_error,
)
from .saved_tensors import SavedAsCodes, SavedCodes
from .tensor_owners import only_autograd_holds

__all__ = ["relu_on_grid"]


def relu_on_grid(x: Tensor, spec: QuantizationSpec, kernels: Kernels, inplace: bool, producer: Hashable) -> Tensor:
    """Return relu(x) of x on the grid of the activations, where it stays; its backward applies Q_E."""
    saving = find_saving(x, spec, kernels)
    made: list[SavedCodes] = []
    y = apply_function(ReLUFunction, x, spec, kernels, inplace, saving, made)
    if saving is not None and made:  # only now: after a change in place autograd has just counted up the version of y
        saving.set_codes(y, made[0])
    mark_on_grid(y, spec.activations, spec.region)
    if saving is not None and kernels.deferred:
        saving.note_output(y, producer)
    return y


class ReLUFunction(torch.autograd.Function):
    """y = relu(x) and e_x = Q_E(e_y) · [y > 0], in one pass each.

    Saves the codes of y, which it shares with the layer that saves y as its input; y itself if it has no codes. Where y is NaN
    the error passes, but for deferred kernels, whose code of a NaN may be zero or less: then the layers that save y are NaN.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, spec: QuantizationSpec, kernels: Kernels, inplace: bool, saving: SavedAsCodes | None,
        made: list[SavedCodes],
    ) -> Tensor:  # fmt: skip
        y, ctx.spec, ctx.about_codes = x if inplace else torch.empty_like(x), spec, None
        if inplace:
            ctx.mark_dirty(x)
        codes = _relu_with_codes(x, y, kernels, saving) if saving is not None and ctx.needs_input_grad[0] else None
        if codes is not None:
            made.append(codes)
            ctx.about_codes = codes.format, codes.order, codes.dtype
            ctx.save_for_backward(codes.codes, codes.exponents, codes.spoiled)
        else:
            torch.clamp_min(x, 0, out=y)
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        spec, format, codes = ctx.spec, ctx.spec.errors, None
        if ctx.about_codes is not None:
            (saved, exponents, spoiled), (grid, order, dtype) = ctx.saved_tensors, ctx.about_codes
            codes = SavedCodes(saved, exponents, grid, order, spoiled, dtype=dtype)
        overflowed = has_overflowed(e)
        if codes is not None and not e.requires_grad and not overflowed and _can_mask(e, codes, format):
            overwrite = not is_deferred(e) and only_autograd_holds(e, "backward")
            out = quantize_in_memory_order(
                e, format, spec.rounding, spec.key, random.ERROR, overwrite=overwrite, positive=codes.codes, step=spec.step
            )  # fmt: skip
        else:
            y = codes.decode() if codes is not None else ctx.saved_tensors[0]
            q = e if format is None or overflowed else quantize_error(e, format, spec)
            out = torch.ops.aten.threshold_backward(q, y, 0)
        if not overflowed:
            mark_on_grid(out, format)
        return out, None, None, None, None, None


def _can_mask(e: Tensor, codes: SavedCodes, format: str | None) -> bool:
    """Return True if the kernel that rounds an error can read these codes as its mask: bytes, in the order of its memory."""
    return format is not None and codes.codes.dtype == torch.int8 and codes.order == block_order(e, parse(format))


def _relu_with_codes(x: Tensor, y: Tensor, kernels: Kernels, saving: SavedAsCodes) -> SavedCodes | None:
    """Write relu(x) into y and return its codes; return None and leave y to the caller if it has none."""
    order = block_order(x, saving.format)
    codes = saving.allocate_codes(x, order, kernels.deferred) if order is not None else None
    if codes is None:
        return None
    values, target = reorder_dims(x, codes.order), reorder_dims(y, codes.order)
    has_codes = kernels.relu_with_codes(
        values, target, codes.codes, codes.exponents, codes.format, spoiled=codes.spoiled
    )
    return codes if has_codes else None
