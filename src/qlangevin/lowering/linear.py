"""Linear layers as one function of autograd: decode packed weights, multiply, free.

    forward    y = x Wᵀ + b
    backward   e_x = e_y W,   e_W = e_yᵀ x,   e_b = Σ e_y

PyTorch computes the same products by views. Of packed weights each view passes through the dispatcher of QTensor, which in a
small network takes longer than the products. And of an input with three dims the result is a view, which must not be rounded in
place: here it is memory of its own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..quantization.qtensor import QTensor, decoded
from . import plain_tensors
from .saved_tensors import SavedUnchanged

__all__ = ["has_linear_function", "linear"]


def has_linear_function(module: nn.Linear, x: Tensor) -> bool:
    """Return True if `linear` does better than PyTorch and computes the same: in training, by one product of two matrices."""
    weight = module.weight
    is_packed = isinstance(weight, QTensor)
    if not torch.is_grad_enabled() or not (is_packed or x.dim() == 3) or x.dtype is not weight.dtype:
        return False
    is_matrix = x.dim() == 2 or (x.dim() == 3 and module.bias is not None and x.is_contiguous())
    if not is_matrix or plain_tensors.kernels_to_write(x) is None or torch.is_autocast_enabled(x.device.type):
        return False  # also while compiling, which the next question would not survive
    return _is_whole(weight) if is_packed else _is_plain(weight, module.bias)


def _is_whole(weight: Tensor) -> bool:
    """Return True for packed weights that are no view of others."""
    assert isinstance(weight, QTensor)
    return not weight.is_view and weight.is_leaf and type(weight.codes) is Tensor


def _is_plain(*tensors: Tensor) -> bool:
    """Return True for tensors on the CPU that are no subclasses and not in `vmap`."""
    usual = all(type(t) in (nn.Parameter, Tensor) and t.is_cpu for t in tensors)
    return usual and not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b in new memory."""
    function: Any = LinearFunction
    return cast(Tensor, function.apply(x, weight, bias))


class LinearFunction(torch.autograd.Function):
    """The product with decoded weights. It holds on to a packed parameter, not to a view of it as autograd would save."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        is_packed = isinstance(weight, QTensor)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x and not is_packed else None)
        ctx.packed = SavedUnchanged(weight, weight._version) if needs_x and is_packed else None
        numbers = weight.decode_base() if isinstance(weight, QTensor) else weight
        own = bias.decode_detached() if isinstance(bias, QTensor) else bias
        if x.dim() == 2 or own is None:
            return nn.functional.linear(x, numbers, own)
        y = x.new_empty(*x.shape[:-1], numbers.shape[0])
        torch.addmm(own, _rows(x), numbers.t(), out=_rows(y))
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows, e_x, e_weight = _rows(e), None, None
        x, weight = ctx.saved_tensors
        if needs_weight:
            e_weight = rows.t().mm(_rows(x))
        del x  # decoded for this product: its memory is free for the next
        if needs_x:
            e_x = _multiply(e, rows, weight if ctx.packed is None else decoded(ctx.packed.decode()))
        return e_x, e_weight, rows.sum(0) if needs_bias else None


def _multiply(e: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return e W, in memory of its own where nobody differentiates it: a view would not be rounded in place."""
    if e.dim() == 2:
        return e.mm(weight)
    if torch.is_grad_enabled():
        return rows.mm(weight).view(*e.shape[:-1], -1)
    product = e.new_empty(*e.shape[:-1], weight.shape[1])
    torch.mm(rows, weight, out=_rows(product))
    return product


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
