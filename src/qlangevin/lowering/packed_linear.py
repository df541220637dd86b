"""Linear layers with packed weights as one function of autograd: decode, multiply, free.

    forward    y = x Wᵀ + b
    backward   e_x = e_y W,   e_W = e_yᵀ x,   e_b = Σ e_y

PyTorch computes the same products, but takes views of the weights on the way, each of which passes through the dispatcher of
QTensor. In a small network these views took longer than the products.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..quantization.qtensor import QTensor, decoded
from . import plain_tensors
from .saved_tensors import SavedUnchanged

__all__ = ["is_packed_linear", "packed_linear"]


def is_packed_linear(module: nn.Linear, x: Tensor) -> bool:
    """Return True if a layer has packed weights, and an input for which PyTorch would multiply two matrices."""
    weight = module.weight
    if not isinstance(weight, QTensor) or weight.is_view or not weight.is_leaf or not torch.is_grad_enabled():
        return False
    is_matrix = x.dim() == 2 or (x.dim() == 3 and module.bias is not None and x.is_contiguous())
    is_usual = is_matrix and x.dtype is weight.dtype and type(weight.codes) is Tensor
    return is_usual and plain_tensors.kernels_to_write(x) is not None and not torch.is_autocast_enabled(x.device.type)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b."""
    function: Any = LinearFunction
    return cast(Tensor, function.apply(x, weight, bias))


class LinearFunction(torch.autograd.Function):
    """The product with decoded weights. It holds on to the parameter, not to a view of it as autograd would save."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QTensor, bias: Tensor | None) -> Tensor:
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x)
        if ctx.needs_input_grad[0]:
            ctx.weight, ctx.version = weight, weight._version
        own = bias.decode_detached() if isinstance(bias, QTensor) else bias
        return nn.functional.linear(x, weight.decode_base(), own)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows, e_x, e_weight = e if e.dim() == 2 else e.reshape(-1, e.shape[-1]), None, None
        if needs_x:
            e_x = rows.mm(decoded(SavedUnchanged(ctx.weight, ctx.version).decode()))
            e_x = e_x if e.dim() == 2 else e_x.view(*e.shape[:-1], -1)
        if needs_weight:
            (x,) = ctx.saved_tensors
            e_weight = rows.t().mm(x if x.dim() == 2 else x.view(-1, x.shape[-1]))
        return e_x, e_weight, rows.sum(0) if needs_bias else None
