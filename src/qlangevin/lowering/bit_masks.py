"""ReLU and dropout that keep one bit a number for backward.

    relu       y = max(x, 0)              e_x = e_y · [y > 0]
    dropout    y = x · m / (1 - p)        e_x = e_y · m / (1 - p),    m ~ Bernoulli(1 - p)

Neither backward reads y, so that Q_A may be written into it. Bits of PyTorch's generator are drawn as PyTorch draws them.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from . import plain_tensors
from .grid_relu import relu_on_grid
from .handler import Handler
from .memory_order import memory_order, reorder_dims, restore_dims

__all__ = ["drop_out", "pack_bits", "relu_with_mask", "unpack_bits"]


def pack_bits(mask: Tensor) -> Tensor:
    """Return a contiguous bool tensor as bytes of eight."""
    if mask.is_cpu:
        return torch.from_numpy(np.packbits(mask.view(-1).numpy(), bitorder="little"))
    bytes_ = nn.functional.pad(mask.view(-1).to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (bytes_ << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    """Return the bool tensor of this shape that was packed."""
    count = shape.numel()
    if bits.is_cpu:
        return (
            torch.from_numpy(np.unpackbits(bits.numpy(), count=count, bitorder="little")).view(torch.bool).view(shape)
        )
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(1) >> places & 1).to(torch.bool).view(-1)[:count].view(shape)


def _save_mask(ctx: Any, mask: Tensor) -> None:
    """Keep a mask for backward, in the order of its memory."""
    ctx.order = memory_order(mask) or ()
    values = reorder_dims(mask, ctx.order).contiguous()
    ctx.shape = values.shape
    ctx.save_for_backward(pack_bits(values))


def _apply_mask(ctx: Any, e: Tensor) -> Tensor:
    (bits,) = ctx.saved_tensors
    return torch.where(restore_dims(unpack_bits(bits, ctx.shape), ctx.order), e, 0.0)


class ReLUMaskFunction(torch.autograd.Function):
    """relu(x), which keeps the signs of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
        y = torch.clamp_min(x, 0, out=x) if inplace else torch.clamp_min(x, 0)
        if ctx.needs_input_grad[0]:
            _save_mask(ctx, ~(y <= 0))  # the error of a NaN passes
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        return _apply_mask(ctx, e), None


class DropoutFunction(torch.autograd.Function):
    """Dropout, which keeps the places of the numbers it keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        noise, ctx.scale = torch.empty_like(x).bernoulli_(1 - p), 1 / (1 - p)
        if ctx.needs_input_grad[0]:
            _save_mask(ctx, noise != 0)
        return noise.div_(1 - p).mul_(x)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        return _apply_mask(ctx, e * ctx.scale), None


def relu_with_mask(handler: Handler, module: nn.Module, x: Tensor, inplace: bool) -> Tensor:
    """Return Q_A(relu(x)), by whichever way keeps least for backward."""
    kernels = plain_tensors.kernels_to_write(x)
    if kernels is None or handler.activations is None or (inplace and x._is_view()):
        return handler.quantize(module, nn.functional.relu(x, inplace))
    if plain_tensors.is_on_grid(x, handler.activations):
        return relu_on_grid(x, handler.next_spec(module, x, kernels), kernels, inplace, handler)
    y = _apply(ReLUMaskFunction, x, inplace)
    return plain_tensors.quantize_activation(
        y, handler.next_spec(module, y, kernels), kernels, may_overwrite=True, already_on_grid=False, producer=handler
    )


def drop_out(x: Tensor, p: float) -> Tensor:
    """Return dropout(x) of a probability above 0."""
    if p >= 1 or plain_tensors.kernels_to_write(x) is None or not x.is_cpu:
        return nn.functional.dropout(x, p, True)
    return _apply(DropoutFunction, x, p)


def _apply(function: Any, *arguments: Any) -> Tensor:
    return cast(Tensor, function.apply(*arguments))
