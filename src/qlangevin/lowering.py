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
from torch.utils._pytree import tree_map_only

from . import flow, ops
from .formats import FP32, Format, parse
from .ops import Rounding
from .random import Key
from .recurrent import layer_by_layer
from .saving import SavedAsCodes
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
        if (forward := _forward_for(module)) is not None:
            module.forward = MethodType(forward, module)
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
        if getattr(module.__dict__.get("forward"), "__func__", None) in (_rnn_forward, _relu_forward):
            del module.__dict__["forward"]
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
        self.activations, self.errors, self.rounding, self.seed, self.stream = (
            activations,
            errors,
            rounding,
            seed,
            stream,
        )
        self.count = torch.zeros((), dtype=torch.int64)
        self.saved = False  # whether somebody keeps the output for backward

    def __repr__(self) -> str:
        return f"activations={self.activations or 'fp32'}, errors={self.errors or 'fp32'}"

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if "forward" in module.__dict__:  # one of ours, which has done it
            return output
        if isinstance(module, nn.MultiheadAttention):  # the second output is not passed on, but looked at
            return (self.one(module, output[0]), *output[1:])
        if isinstance(output, Tensor):
            kept = isinstance(module, KEEPS_GRID) and bool(args) and flow.marked(args[0], self.activations)
            return self.one(module, output, on_grid=kept and "/" not in str(self.activations))
        return tree_map_only(Tensor, lambda t: self.one(module, t), output)

    def one(self, module: nn.Module, x: Tensor, on_grid: bool = False) -> Tensor:
        """Q_A of one output, and Q_E on its error."""
        if not x.dtype.is_floating_point or (self.activations is None and self.errors is None):
            return x
        if flow.simple(x):
            return flow.passed(x, self.next(module), isinstance(module, FRESH) and not x._is_view(), on_grid, self)
        seed, stream, rounding = ops.signed(self.seed), ops.signed(self.stream), self._rounding(module)
        return cast(
            Tensor, flow.lower_op(x, self.activations, self.errors, rounding, seed, stream, self._count(module))
        )

    def relu(self, module: nn.ReLU, x: Tensor) -> Tensor:
        """The forward of `nn.ReLU`."""
        if flow.simple(x) and self.activations is not None and flow.marked(x, self.activations):
            return flow.relu(x, self.next(module), module.inplace, SavedAsCodes.innermost())
        return self.one(module, nn.functional.relu(x, module.inplace))

    def next(self, module: nn.Module) -> flow.Step:
        key = Key(self.seed, self.stream, int(self.count.add_(1)) if module.training else 0)
        return flow.Step(self.activations, self.errors, self._rounding(module), key)

    def _rounding(self, module: nn.Module) -> str:
        return self.rounding if module.training else "nearest"

    def _count(self, module: nn.Module) -> Tensor:
        """How often the layer has run in training, this time included; a tensor that stays as it is."""
        if not module.training:
            return torch.zeros_like(self.count)
        self.count.add_(1)
        return self.count.clone()


class Saving:
    """The hooks on a lowered model that keep its activations as codes."""

    def __init__(self, format: Format) -> None:
        self.format = format
        self.entered: list[SavedAsCodes] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.entered.append(SavedAsCodes(self.format))
            self.entered[-1].__enter__()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.entered and not torch.compiler.is_compiling():
            self.entered.pop().__exit__()


def _ours(hook: Any) -> bool:
    return isinstance(hook, Layer) or isinstance(getattr(hook, "__self__", None), Saving)


def _layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    for name, module in model.named_modules():
        yield from ((name, hook) for hook in module._forward_hooks.values() if isinstance(hook, Layer))


# These find their layer when they are called: a deep copy of a module has its own.


def _layer_of(module: nn.Module) -> Layer:
    return next(hook for hook in module._forward_hooks.values() if isinstance(hook, Layer))


def _extra_repr(module: nn.Module) -> str:
    return ", ".join(filter(None, [type(module).extra_repr(module), repr(_layer_of(module))]))


def _rnn_forward(module: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    return layer_by_layer(module, _layer_of(module).one, input, hx)


def _relu_forward(module: nn.ReLU, input: Tensor) -> Tensor:
    return _layer_of(module).relu(module, input)


def _forward_for(module: nn.Module) -> Any:
    """A forward of our own for modules in the midst of which something is to be done."""
    return _rnn_forward if isinstance(module, nn.RNNBase) else _relu_forward if type(module) is nn.ReLU else None


def _check(model: nn.Module, chosen: dict[str, nn.Module]) -> None:
    for name, module in chosen.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{name!r} is a scripted module, whose output no hook can change; lower before scripting")
        if any(isinstance(hook, Layer) for hook in module._forward_hooks.values()):
            raise ValueError(f"{name!r} is lowered already; unlower(model) first")
