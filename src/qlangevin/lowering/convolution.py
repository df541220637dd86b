"""Convolutions whose backward needs less memory and keeps clear of a oneDNN primitive that writes out of bounds.

On CPUs with AVX2 and without AVX-512, oneDNN (jit_avx2_1x1_convolution_bwd_weights, as of PyTorch 2.13) writes past its scratch
memory when it computes the gradient of the weights of a strided convolution of kernel size 1 in channels-last memory: it gathers
the pixels that the stride selects, and stores 8 channels of each where there are fewer. The same holds for transposed
convolutions, where the stride selects pixels of the output. So the pixels are gathered here, and oneDNN gets a convolution
without a stride, which is the same one:

    conv(x, w, stride=s)              = conv(x[::s], w)
    conv_transpose(x, w, stride=s)    = y with y[::s] = conv_transpose(x, w), else zero
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules import conv

from ..quantization.qtensor import QTensor, decoded

__all__ = ["ConvolutionFunction", "Geometry", "convolve_gathered", "must_gather"]

_FORWARD = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


class Geometry(NamedTuple):
    """Arguments of `torch.convolution` after the bias, in its order."""

    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, module: conv._ConvNd) -> Geometry:
        """Return the geometry of a module."""
        return cls(
            module.stride, module.padding, module.dilation, module.transposed, module.output_padding, module.groups
        )  # fmt: skip

    def without_stride(self) -> Geometry:
        """Return the geometry of the convolution of gathered pixels."""
        ones, zeros = (1,) * len(self.stride), (0,) * len(self.stride)
        return Geometry(ones, zeros, ones, self.transposed, zeros, self.groups)


def must_gather(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Return True for a convolution whose gradient oneDNN may write out of bounds.

    The second dim of the weights counts the channels of the side that the stride steps over, of one group.
    """
    padding = () if isinstance(geometry.padding, str) else geometry.padding  # "same" is for convolutions without stride
    if all(s == 1 for s in geometry.stride) or any(k != 1 for k in weight.shape[2:]) or any(padding):
        return False
    # One channel is contiguous either way: then PyTorch goes by the strides.
    channels_last = not x.is_contiguous() or x.stride(1 - weight.dim()) == 1 or weight.stride(-1) != 1
    return channels_last and weight.shape[1] % 8 != 0


def gather(pixels: Tensor, stride: tuple[int, ...], sizes: Sequence[int]) -> Tensor:
    """Return every s-th pixel, as many as ``sizes`` says: a view."""
    index: tuple[Any, ...] = (..., *(slice(0, n * s, s) for n, s in zip(sizes, stride, strict=True)))
    return pixels[index]


def convolve_gathered(module: conv._ConvNd, x: Tensor, output_size: list[int] | None = None) -> Tensor:
    """Return what a module's own forward does, by a convolution without a stride; all derivatives are without one, too."""
    stride, groups, dims = module.stride, module.groups, len(module.stride)
    if not module.transposed:
        sizes = [-(-n // s) for n, s in zip(x.shape[-dims:], stride, strict=True)]
        return _FORWARD[dims](gather(x, stride, sizes), module.weight, module.bias, groups=groups)
    padding = cast(conv._ConvTransposeNd, module)._output_padding(
        x, output_size, list(stride), [0] * dims, [1] * dims, dims, list(module.dilation)
    )
    small = _TRANSPOSED[dims](x, module.weight, groups=groups)
    sizes = [(n - 1) * s + 1 + p for n, s, p in zip(small.shape[-dims:], stride, padding, strict=True)]
    y = small.new_zeros(*small.shape[:-dims], *sizes)
    gather(y, stride, small.shape[-dims:]).copy_(small)
    return y if module.bias is None else y + decoded(module.bias).to(y.dtype).reshape(-1, *[1] * dims)


class ConvolutionFunction(torch.autograd.Function):
    """`torch.convolution` whose backward holds one large tensor less, with the same numbers.

    PyTorch's backward holds the input, the error and the error of the input at once. Here the gradient of the weights comes
    first, and the input, decoded for it, is freed before the error of the input is allocated. Each can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.bias_shape = geometry, None if bias is None else list(bias.shape)
        convolution: Any = torch.convolution
        return cast(Tensor, convolution(x, decoded(weight), None if bias is None else decoded(bias), *geometry))

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wants_error, wants_weight, wants_bias, _ = ctx.needs_input_grad
        # Stands in for x where only its shape counts; memory that is not written to takes no physical pages.
        like_x = torch.empty_like(x)
        error = weight_grad = bias_grad = None
        if wants_weight or wants_bias:
            packed = isinstance(weight, QTensor)
            like_weight = torch.empty(weight.shape, dtype=e.dtype, device=e.device) if packed else weight
            wanted = (wants_weight, ctx.bias_shape if wants_bias else None)
            weight_grad, bias_grad = _parameter_gradients(e, x, like_weight, ctx.geometry, *wanted)
        del x
        if wants_error:
            mask = [True, False, False]
            backward = torch.ops.aten.convolution_backward
            error, _, _ = backward(e, like_x, decoded(weight), None, *ctx.geometry, mask)
        return error, weight_grad, bias_grad, None


def _parameter_gradients(
    e: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, wants_weight: bool, bias_shape: list[int] | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias, None where not wanted. Of ``weight`` only shape and layout count."""
    bias_grad = None
    if must_gather(x, weight, geometry):
        if geometry.transposed:
            if bias_shape is not None:  # of all pixels
                bias_grad, bias_shape = e.sum(dim=[0, *range(2, e.dim())]), None
            e = gather(e, geometry.stride, x.shape[2:])
        else:
            x = gather(x, geometry.stride, e.shape[2:])
        geometry = geometry.without_stride()
    mask = [False, wants_weight, bias_shape is not None]
    _, weight_grad, summed = torch.ops.aten.convolution_backward(e, x, weight, bias_shape, *geometry, mask)
    return weight_grad, summed if bias_grad is None else bias_grad
