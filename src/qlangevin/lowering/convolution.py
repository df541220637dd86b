"""Convolution whose backward needs one large tensor less at a time.

PyTorch's backward holds the input, the error and the error of the input at once. Here the gradient of the weights comes first,
and the input, decoded for it, is let go of before the error of the input is made. The numbers are the same.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import conv

from ..quantization.qtensor import QTensor, decoded

__all__ = ["CONVOLUTIONS", "convolve"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def convolve(module: conv._ConvNd, x: Tensor) -> Tensor | None:
    """What the forward of a convolution computes; None where it has to be left to that."""
    batched = x.dim() == len(module.kernel_size) + 2
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    if not batched or isinstance(module.padding, str) or module.padding_mode != "zeros":
        return None
    how = (
        module.stride, module.padding, module.dilation, module.transposed, module.output_padding, module.groups
    )  # fmt: skip
    function: Any = Convolution
    return cast(Tensor, function.apply(x, module.weight, module.bias, how))


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.bias_shape = how, None if bias is None else list(bias.shape)
        return torch.convolution(x, decoded(weight), None if bias is None else decoded(bias), *how)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        backward, (input_wanted, weight_wanted, bias_wanted, _) = (
            torch.ops.aten.convolution_backward,
            ctx.needs_input_grad,
        )
        if e.requires_grad:  # the derivative of a derivative is wanted
            wanted = [input_wanted, weight_wanted, bias_wanted]
            return (*backward(e, x, decoded(weight), ctx.bias_shape, *ctx.how, wanted), None)
        blank = torch.empty_like(x)  # only its shape counts: memory nobody writes to is not there
        error = of_weight = of_bias = None
        if weight_wanted or bias_wanted:
            shape = torch.empty(weight.shape, dtype=e.dtype, device=e.device) if isinstance(weight, QTensor) else weight
            wanted = [False, weight_wanted, bias_wanted]
            _, of_weight, of_bias = backward(e, x, shape, ctx.bias_shape, *ctx.how, wanted)
        del x
        if input_wanted:
            error, _, _ = backward(e, blank, decoded(weight), None, *ctx.how, [True, False, False])
        return error, of_weight, of_bias, None
