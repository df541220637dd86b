"""Kinds of modules that are lowered in a way of their own: a handler for each.

`handler_for` finds the handler of a module by its type. A new kind is one more class here, registered with `handles`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import conv
from torch.nn.utils.rnn import PackedSequence

from . import plain_tensors
from .bit_masks import drop_out, relu_with_mask
from .convolution import ConvolutionFunction, Geometry, convolve_gathered, must_gather
from .functions import without_functions
from .handler import Handler
from .linear import has_linear_function, linear
from .operand_kinds import Kind, find_mark, set_kinds

__all__ = ["LeafHandler", "Quantize", "handler_for", "handles"]

H = TypeVar("H", bound=type[Handler])

_exact: dict[type[nn.Module], type[Handler]] = {}
_with_subclasses: dict[type[nn.Module], type[Handler]] = {}


def handles(*types: type[nn.Module], subclasses: bool = False) -> Callable[[H], H]:
    """Register a handler class for modules of these types; their subclasses may do more, and are left out unless asked for."""

    def register(handler: H) -> H:
        (_with_subclasses if subclasses else _exact).update(dict.fromkeys(types, handler))
        return handler

    return register


def handler_for(module: nn.Module) -> type[Handler]:
    """Return the handler class for a module."""
    if (handler := _exact.get(type(module))) is not None:
        return handler
    found = next((_with_subclasses[base] for base in type(module).__mro__ if base in _with_subclasses), None)
    if found is not None:
        return found
    return LeafHandler if is_leaf_of_user(module) else Handler


def is_leaf_of_user(module: nn.Module) -> bool:
    """Return True for a module without children whose forward is the user's own."""
    if next(module.children(), None) is not None or isinstance(module, torch.jit.ScriptModule):
        return False
    return not _is_of_torch(type(module)) and type(module).forward not in (nn.Module.forward, nn.Identity.forward)


def _is_of_torch(kind: type[nn.Module]) -> bool:
    """Return True if the forward of a class is PyTorch's or ours."""
    package = kind.forward.__module__.split(".")[0]
    return package == "torch" or kind is Quantize


@handles(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.Embedding)
class FreshOutputHandler(Handler):
    """Modules that return memory of their own and do not need it in backward: it is overwritten."""

    may_overwrite_output = True


@handles(nn.Linear)
class LinearHandler(FreshOutputHandler):
    """Linear layers, whose output is made memory of its own; see `linear`."""

    replaces_forward = True

    def forward(self, module: nn.Linear, input: Tensor) -> Tensor:
        if has_linear_function(module, input):
            return linear(input, module.weight, module.bias)
        return nn.Linear.forward(module, input)


@handles(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
@handles(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
class MaxPoolHandler(Handler):
    """Modules that return some of the numbers they are given."""

    keeps_grid = True


@handles(nn.MultiheadAttention, subclasses=True)
class AttentionHandler(Handler):
    """Attention, whose functions are lowered, too. It also returns its weights: they are for the user to look at."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        with without_functions():
            output = super().__call__(module, args, output)
        set_kinds(output, Kind.ACTIVATION)
        return output

    def quantize_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        return (self.quantize(module, output[0]), *output[1:])


@handles(nn.ReLU)
class ReLUHandler(Handler):
    """ReLU, which keeps numbers on the grid and applies Q_E and its mask to the error in one pass."""

    replaces_forward = quantizes_in_forward = True

    def forward(self, module: nn.ReLU, input: Tensor) -> Tensor:
        return relu_with_mask(self, module, input, module.inplace)


@handles(nn.Dropout)
class DropoutHandler(Handler):
    """Dropout, which keeps a bit a number for backward; in evaluation it returns its input, which is not overwritten."""

    replaces_forward = quantizes_in_forward = True

    def forward(self, module: nn.Dropout, input: Tensor) -> Tensor:
        if module.training and module.p > 0 and not module.inplace:
            return self.quantize(module, drop_out(input, module.p), is_own=True)
        y = nn.functional.dropout(input, module.p, module.training, module.inplace)
        is_plain = plain_tensors.kernels_to_write(y) is not None  # compilers do not see marks
        return self.quantize(module, y, is_plain and plain_tensors.is_on_grid(y, self.activations))


class Quantize(nn.Module):
    """The identity, for a place in a model where there is no layer and no function that is lowered: `lower` rounds its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@handles(Quantize)
class QuantizeHandler(Handler):
    """The identity, which leaves numbers on the grid where they are."""

    keeps_grid = True


class LeafHandler(Handler):
    """A module of the user's without children, such as an RMSNorm, whose functions are not lowered, but followed.

    With parameters of its own it is a layer. Without, it is one for those outputs that come from an activation: rotary embeddings
    return cosines and sines of positions, which stay as they are.
    """

    recomputes = True
    is_layer = True  # did the last run return an activation

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        with without_functions():
            return super().__call__(module, args, output)

    def quantize(self, module: nn.Module, x: Tensor, already_on_grid: bool = False, is_own: bool = False) -> Tensor:
        self.is_layer = self._is_activation(module, x)
        if not self.is_layer:
            return x
        y = super().quantize(module, x, already_on_grid, is_own)
        set_kinds(y, Kind.ACTIVATION)
        return y

    def _is_activation(self, module: nn.Module, x: Tensor) -> bool:
        if module._parameters:
            return True
        kind = find_mark(x)
        if kind is None:  # compiled, where functions are not followed
            return x.requires_grad or not torch.is_grad_enabled()
        return kind in (Kind.ACTIVATION, Kind.MASKED)


# ---- convolutions


@handles(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvolutionHandler(FreshOutputHandler):
    """Convolutions, whose backward is made to need less memory and to stay within its own; see `convolution`."""

    replaces_forward = True

    def forward(self, module: conv._ConvNd, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        geometry, recorded = Geometry.of(module), torch.is_grad_enabled()
        plain = recorded and not (args or kwargs) and plain_tensors.is_plain_cpu_tensor(input)
        if plain and _is_plain_convolution(module, input):
            function: Any = ConvolutionFunction
            return cast(Tensor, function.apply(input, module.weight, module.bias, geometry))
        if recorded and input.is_cpu and must_gather(input, module.weight, geometry):
            return convolve_gathered(module, input, *args, **kwargs)
        return cast(Tensor, super().forward(module, input, *args, **kwargs))


def _is_plain_convolution(module: conv._ConvNd, x: Tensor) -> bool:
    """Return True if the module's forward is one call of `torch.convolution` on a batch."""
    if torch.is_autocast_enabled("cpu"):
        return False
    batched = x.dim() == len(module.kernel_size) + 2
    return batched and not isinstance(module.padding, str) and module.padding_mode == "zeros"


# ---- recurrent modules


@handles(nn.RNNBase, subclasses=True)
class RecurrentHandler(Handler):
    """`nn.RNN`, `nn.GRU` and `nn.LSTM`, run one layer at a time: every layer's output is quantized, and the final states."""

    replaces_forward = quantizes_in_forward = True

    def forward(self, module: nn.RNNBase, input: Any, hx: Any = None) -> tuple[Any, Any]:
        directions = 2 if module.bidirectional else 1
        finals: list[Any] = []
        for i in range(module.num_layers):
            rows = slice(i * directions, (i + 1) * directions)
            start = None if hx is None else hx[rows] if isinstance(hx, Tensor) else tuple(h[rows] for h in hx)
            input, final = type(module).forward(_layer_as_module(module, i, directions), input, start)
            finals.append(final)
            dropout = module.dropout if i < module.num_layers - 1 else 0.0
            if isinstance(input, PackedSequence):
                input = input._replace(data=self._quantize_layer(module, input.data, dropout))
            else:
                input = self._quantize_layer(module, input, dropout)
        if isinstance(finals[0], Tensor):
            return input, self.quantize(module, torch.cat(finals))
        return input, tuple(self.quantize(module, torch.cat(states)) for states in zip(*finals, strict=True))

    def _quantize_layer(self, module: nn.RNNBase, x: Tensor, dropout: float) -> Tensor:
        y = self.quantize(module, x)
        return y if dropout == 0 else nn.functional.dropout(y, dropout, module.training)


def _layer_as_module(module: nn.RNNBase, i: int, directions: int) -> nn.RNNBase:
    """Return layer i of a recurrent module as a module with the same parameters."""
    if module.num_layers == 1:
        return module
    layer = copy.copy(module)  # a dict of attributes of its own, with the same tensors in it
    names = [name for d in range(directions) for name in module._all_weights[i * directions + d]]
    size = module.input_size if i == 0 else directions * (module.proj_size or module.hidden_size)
    weights = [getattr(module, name) for name in names]
    layer.__dict__.update(num_layers=1, dropout=0.0, input_size=size)
    layer.__dict__.update(
        _flat_weights=weights, _flat_weights_names=names, _flat_weight_refs=[weakref.ref(w) for w in weights]
    )
    return layer
