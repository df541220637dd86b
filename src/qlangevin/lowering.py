"""Q_A and Q_E on any module: Algorithm 3 of the paper.

    forward    a_l     = Q_A(f_l(a_(l-1), θ_l))
    backward   e_(l-1) = Q_E((∂f_l / ∂a_(l-1))ᵀ e_l)

A layer l is a module; `lower` puts a hook on it that rounds its output, and the error that comes back to that output. Where
several layers use one output, it is the sum of their errors that is rounded. Random bits are a function of the seed, the
layer and how often it has run in training; in evaluation everything is rounded to nearest, and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import activation, batchnorm, conv, dropout, pooling, rnn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map_only

from . import native, ops, random
from .formats import FP32, Format, parse
from .ops import Rounding
from .random import Key
from .recurrent import layer_by_layer
from .saving import SavedAsCodes, memory_order
from .selection import Choice, choose

__all__ = ["LAYERS", "Quantize", "load_state_dict", "lower", "state_dict", "unlower"]


class Quantize(nn.Module):
    """Marks a place in a model where there is no layer, such as a residual sum: `lower` rounds what passes through it."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _modules_of(package: Any) -> tuple[type[nn.Module], ...]:
    return tuple(t for t in (getattr(package, name) for name in package.__all__) if issubclass(t, nn.Module))


# What is a layer. Log-softmax is not: it belongs to the loss.
LAYERS: tuple[type[nn.Module], ...] = tuple(
    t
    for t in (
        *[nn.Linear, nn.Bilinear, conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, rnn.RNNCellBase],
        *[batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d],
        *[*_modules_of(activation), *_modules_of(pooling), *_modules_of(dropout), nn.Upsample, Quantize],
    )
    if not issubclass(t, nn.LogSoftmax)
)
# Layers whose output nobody has seen, nor their own backward needs: it can be rounded where it is.
FRESH = (nn.Linear, nn.Bilinear, conv._ConvNd, batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm)
# Layers that give back some of the numbers they are given, or zero: numbers on the grid stay on it.
KEEPS_GRID = (nn.ReLU, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, pooling._AdaptiveMaxPoolNd)

_STREAMS = 1 << 40  # where the streams of layers begin; those of parameters are counted from 0


def lower(
    model: nn.Module,
    activations: str | Format | None = None,
    errors: str | Format | None = None,
    *,
    layers: Choice = LAYERS,
    skip: Choice | None = None,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    save_codes: bool = True,
) -> nn.Module:
    """Round the output of every layer, and the error that flows back to it, in place; returns the model.

    Args:
        model: any module; `unlower` undoes this.
        activations, errors: the formats, Q_A and Q_E; None for full precision. The blocks of ``"bfp8"`` are examples (the
            paper's small block), that of ``"bfp8/tensor"`` is all of a tensor.
        layers, skip: which layers, by type, name pattern or predicate of name and module.
        rounding: in training, ``"stochastic"`` or ``"nearest"``.
        seed: of the random bits.
        save_codes: keep for backward as codes what is on the grid of the activations, which changes no number.
    """
    ops.choose("rounding", rounding, ("nearest", "stochastic"))
    names = tuple(None if f is None or parse(f) == FP32 else str(parse(f)) for f in (activations, errors))
    chosen = choose(model, layers, skip)
    _check(model, chosen)
    for i, module in enumerate(chosen.values()):
        layer = Layer(names[0], names[1], rounding, seed, Key(seed).fold(_STREAMS + i).stream)
        module.register_forward_hook(layer)
        module.extra_repr = MethodType(_extra_repr, module)  # type: ignore[method-assign]
        if isinstance(module, nn.RNNBase):
            module.forward = MethodType(layer_by_layer(layer.one), module)
    if save_codes and names[0] is not None:
        saving = Saving(parse(names[0]))
        model.register_forward_pre_hook(saving.enter)
        model.register_forward_hook(saving.leave, always_call=True)
    return model


def unlower(model: nn.Module) -> nn.Module:
    """Take away what `lower` put on a model, or on any of its parts; returns the model."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if _ours(hook)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
        if getattr(module.__dict__.get("extra_repr"), "__func__", None) is _extra_repr:
            del module.__dict__["extra_repr"]
            module.__dict__.pop("forward", None) if isinstance(module, nn.RNNBase) else None
    return model


def state_dict(model: nn.Module) -> dict[str, int]:
    """How often each layer has run in training: with the seed, all that its random bits depend on."""
    return {name: int(layer.count) for name, layer in _layers(model)}


def load_state_dict(model: nn.Module, state: Mapping[str, int]) -> None:
    """Go on with the random bits where a saved model stopped."""
    found = dict(_layers(model))
    if found.keys() != state.keys():
        odd = sorted(found.keys() ^ state.keys())
        raise ValueError(f"the state is of a model lowered otherwise: {', '.join(map(repr, odd[:5]))} in one only")
    for name, layer in found.items():
        layer.count.fill_(int(state[name]))


class Layer:
    """The hook on a layer."""

    def __init__(self, activations: str | None, errors: str | None, rounding: str, seed: int, stream: int) -> None:
        self.activations, self.errors, self.rounding, self.seed, self.stream = activations, errors, rounding, seed, stream
        self.count = torch.zeros((), dtype=torch.int64)  # a tensor, because compiled code must not depend on its value

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(module, nn.RNNBase):  # done between its layers
            return output
        if isinstance(module, nn.MultiheadAttention):  # the second output is not passed on, but looked at
            return (self.one(module, output[0]), *output[1:])
        there = isinstance(module, KEEPS_GRID) and bool(args) and _on_grid(args[0], output, self.activations)
        if isinstance(output, Tensor):
            return self.one(module, output, there)
        return tree_map_only(Tensor, lambda t: self.one(module, t), output)

    def __repr__(self) -> str:
        return f"activations={self.activations or 'fp32'}, errors={self.errors or 'fp32'}"

    def one(self, module: nn.Module, x: Tensor, on_grid: bool = False) -> Tensor:
        """Q_A of one output, and Q_E on its error."""
        if not x.dtype.is_floating_point or (self.activations is None and self.errors is None):
            return x
        rounding = self.rounding if module.training else "nearest"
        step = self.count + 1 if module.training else torch.zeros_like(self.count)
        if module.training:
            self.count.copy_(step)
        if torch.compiler.is_compiling() or not _simple(x):
            seed, stream = ops.signed(self.seed), ops.signed(self.stream)
            return cast(Tensor, lower_op(x, self.activations, self.errors, rounding, seed, stream, step))
        key = Key(self.seed, self.stream, int(step))
        return self._eagerly(x, rounding, key, on_grid, isinstance(module, FRESH) and not x._is_view())

    def _eagerly(self, x: Tensor, rounding: str, key: Key, on_grid: bool, fresh: bool) -> Tensor:
        """The same without a node in the graph: rounded in place, and the error by a hook on the tensor."""
        y = x
        if self.activations is not None and not on_grid:
            if fresh:
                _round(x.detach(), self.activations, rounding, key, random.ACTIVATION, in_place=True)
            else:
                y = cast(Tensor, _Rounded.apply(x, self.activations, rounding, key))
        if self.activations is not None:
            y._qlangevin_grid = (self.activations, y._version)  # type: ignore[attr-defined]
        if self.errors is not None and y.requires_grad:
            errors = self.errors
            y.register_hook(lambda e: _round(e, errors, rounding, key, random.ERROR))
        return y


class _Rounded(torch.autograd.Function):
    """Q_A as a new tensor; the error passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, rounding: str, key: Key) -> Tensor:
        return _round(x, format, rounding, key, random.ACTIVATION)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return error, None, None, None


def _simple(x: Tensor) -> bool:
    """Whether x is memory the kernels can write to, and no stand-in for a tensor."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)  # type: ignore[attr-defined]
    return type(x) is Tensor and not wrapped and native.enabled_for(x) and x.dtype == torch.float32


def _on_grid(before: Tensor, after: Any, format: str | None) -> bool:
    """Whether a layer that keeps the grid was given numbers on it. One that works in place has changed the version by one."""
    known = getattr(before, "_qlangevin_grid", None)
    return known is not None and known == (format, before._version - (before is after)) and "/" not in str(format)


def _round(x: Tensor, format: str, rounding: str, key: Key, purpose: int, in_place: bool = False) -> Tensor:
    """x on a grid, in the order of its memory."""
    order = memory_order(x, ops.parse(format))
    if order is None:
        rounded: Tensor = ops.quantize_op(x, format, rounding, *ops.key_bits(key), purpose)
        return x.copy_(rounded) if in_place else rounded
    out = x if in_place else torch.empty_like(x)
    flat, target = x.permute(order), out.permute(order)
    if native.enabled_for(x) and x.dtype == torch.float32:
        native.run(flat, ops.parse(format), rounding, key, purpose, out=target)
    else:
        target.copy_(ops.quantize_op(flat, format, rounding, *ops.key_bits(key), purpose))
    return out


@ops.operator("lower")
def lower_op(
    x: Tensor, activations: str | None, errors: str | None, rounding: str, seed: int, stream: int, step: Tensor
) -> Tensor:
    """Q_A; backward is Q_E."""
    key = ops.key_of(seed, stream, int(step))
    return x.clone() if activations is None else _round(x, activations, rounding, key, random.ACTIVATION)


@ops.operator("lower_error")
def error_op(e: Tensor, errors: str | None, rounding: str, seed: int, stream: int, step: Tensor) -> Tensor:
    key = ops.key_of(seed, stream, int(step))
    return e.clone() if errors is None else _round(e, errors, rounding, key, random.ERROR)


@ops.fake("lower")
@ops.fake("lower_error")
def _(x: Tensor, *_: Any) -> Tensor:
    order = memory_order(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format if order is None else torch.preserve_format)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.how, ctx.step = inputs[2:6], inputs[6]


def _error(ctx: Any, e: Tensor) -> tuple[Any, ...]:
    return (error_op(e, *ctx.how, ctx.step), *[None] * 6)


torch.library.register_autograd("qlangevin::lower", _error, setup_context=_remember, lib=ops._library)


class Saving:
    """The hooks on a lowered model that keep its activations as codes."""

    def __init__(self, format: Format) -> None:
        self.format, self.open = format, []  # type: ignore[var-annotated]

    def enter(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.open.append(SavedAsCodes(self.format))
            self.open[-1].__enter__()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.open and not torch.compiler.is_compiling():
            self.open.pop().__exit__()


def _ours(hook: Any) -> bool:
    return isinstance(hook, Layer) or isinstance(getattr(hook, "__self__", None), Saving)


def _layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    for name, module in model.named_modules():
        yield from ((name, hook) for hook in module._forward_hooks.values() if isinstance(hook, Layer))


def _extra_repr(module: nn.Module) -> str:
    [layer] = (hook for hook in module._forward_hooks.values() if isinstance(hook, Layer))
    return ", ".join(filter(None, [type(module).extra_repr(module), repr(layer)]))


def _check(model: nn.Module, chosen: dict[str, nn.Module]) -> None:
    for name, module in chosen.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{name!r} is a scripted module, whose output no hook can change; lower before scripting")
        if any(isinstance(hook, Layer) for hook in module._forward_hooks.values()):
            raise ValueError(f"{name!r} is lowered already; unlower(model) first")
