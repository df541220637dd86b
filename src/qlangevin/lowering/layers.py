"""Q_A and Q_E on any module: Algorithm 3 of the paper.

    forward    a_l     = Q_A(f_l(a_(l-1), θ_l))
    backward   e_(l-1) = Q_E((∂f_l / ∂a_(l-1))ᵀ e_l)

A layer l is a module; `lower` puts a hook on it that rounds its output, and the error that comes back to that output. Where
several layers use one output, it is the sum of their errors that is rounded. Random bits are a function of the seed, the
layer and how often it has run in training; in evaluation everything is rounded to nearest, and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import activation, batchnorm, conv, dropout, pooling
from torch.nn.modules.module import _global_forward_hooks as global_hooks
from torch.utils._pytree import tree_map_only

from .._select import Choice, select_modules
from .._validate import check_choice
from ..quantization import operators
from ..quantization.formats import FP32, Format, parse
from ..quantization.operators import Rounding
from ..quantization.random import Key
from . import inplace_cpu
from .convolution import CONVOLUTIONS, convolve
from .recurrent import layer_by_layer
from .saved_tensors import SavedAsCodes

__all__ = ["LAYERS", "Quantize", "load_state_dict", "lower", "set_replica", "state_dict", "unlower"]

M = TypeVar("M", bound=nn.Module)


class Quantize(nn.Module):
    """Marks a place in a model where there is no layer, such as a residual sum: `lower` rounds what passes through it."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _modules_of(package: Any) -> list[type[nn.Module]]:
    return [getattr(package, name) for name in package.__all__]


# What is a layer. Log-softmax is not: it belongs to the loss.
LAYERS: tuple[type[nn.Module], ...] = (
    *[nn.Linear, nn.Bilinear, conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase],
    *[batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d],
    *[t for t in _modules_of(activation) if t is not nn.LogSoftmax],
    *[*_modules_of(pooling), *_modules_of(dropout), nn.Upsample, Quantize],
)
# Layers whose output nobody has seen and their own backward does not need: it can be rounded where it is. These types
# only: a subclass may do more with it.
FRESH = (nn.Linear, *CONVOLUTIONS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm)
# Layers that give back some of the numbers they are given: numbers on the grid stay on it. So do those of ReLU, see below.
KEEPS_GRID = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)

_STREAMS = 1 << 40  # where the streams of layers begin; those of parameters are counted from 0


def lower(
    model: M,
    activations: str | Format | None = None,
    errors: str | Format | None = None,
    *,
    layers: Choice = LAYERS,
    skip: Choice | None = None,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
    save_codes: bool = True,
) -> M:
    """Round the output of every layer, and the error that flows back to it, in place; returns the model.

    Args:
        model: any module; `unlower` undoes this.
        activations, errors: the formats, Q_A and Q_E; None for full precision. The blocks of ``"bfp8"`` are slices along the
            first dim, that is examples (the paper's small block), that of ``"bfp8/tensor"`` is all of a tensor.
        layers, skip: which layers, by type, name pattern or predicate of name and module.
        rounding: in training, ``"stochastic"`` or ``"nearest"``.
        seed: of the random bits; parts that are lowered separately want different ones.
        stream: tells chains apart that share a seed.
        save_codes: keep for backward as codes what is on the grid of the activations, which changes no number.
    """
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    names = tuple(None if f is None or parse(f) == FP32 else str(parse(f)) for f in (activations, errors))
    chosen = select_modules(model, layers, skip)
    _check(chosen)
    for i, module in enumerate(chosen.values()):
        layer = Layer(names[0], names[1], rounding, Key(seed, stream), _STREAMS + i)
        module.register_forward_hook(layer)
        module.extra_repr = partial(_extra_repr, module)  # type: ignore[method-assign]
        if (forward := _forward_for(module)) is not None and "forward" not in module.__dict__:
            module.forward = partial(forward, module)
    inplace_cpu.know_sole_owners()
    if save_codes and names[0] is not None and "_qlangevin_saving" not in model.__dict__:
        model._qlangevin_saving = (parse(names[0]), model.__dict__.get("forward"))  # type: ignore[assignment]
        model.forward = partial(_saving_forward, model)
    return model


def unlower(model: M) -> M:
    """Take away what `lower` put on a model, or on any of its parts; returns the model."""
    for module in model.modules():
        for key in [k for k, hook in module._forward_hooks.items() if isinstance(hook, Layer)]:
            del module._forward_hooks[key]
        if "_qlangevin_saving" in module.__dict__:
            _, before = module.__dict__.pop("_qlangevin_saving")
            module.__dict__["forward"] = before  # None is deleted below
        for name, ours in (("extra_repr", (_extra_repr,)), ("forward", (_rnn_forward, _relu_forward, _conv_forward))):
            method = module.__dict__.get(name)
            if name in module.__dict__ and (method is None or _own(method) in ours):
                del module.__dict__[name]
    return model


def state_dict(model: nn.Module) -> dict[str, int]:
    """How often each layer has run in training: with the seed, all that its random bits depend on."""
    return {name: int(layer.count) for name, layer in _layers(model)}


def load_state_dict(model: nn.Module, state: Mapping[str, int]) -> None:
    """Go on with the random bits where a saved model stopped."""
    check_state(model, state)
    for name, layer in _layers(model):
        layer.count.fill_(int(state[name]))


def settings(model: nn.Module) -> dict[str, str]:
    """How each layer is lowered, in words."""
    return {name: layer.settings() for name, layer in _layers(model)}


def set_replica(model: nn.Module, replica: int) -> None:
    """Give each of several copies of a model that see different data random bits of its own; the first keeps those it has."""
    for _, layer in _layers(model):
        layer.set_replica(replica)


def check_state(model: nn.Module, state: Mapping[str, int]) -> None:
    """Refuse a state that is not of this model."""
    found = dict(_layers(model))
    if found.keys() != state.keys():
        odd = sorted(found.keys() ^ state.keys())
        raise ValueError(f"the state is of a model lowered otherwise: {', '.join(map(repr, odd[:5]))} in one only")


class Layer:
    """The hook on a layer."""

    def __init__(self, activations: str | None, errors: str | None, rounding: str, key: Key, index: int) -> None:
        self.activations, self.errors, self.rounding = activations, errors, rounding
        self.chain, self.index, self.seed = key, index, key.seed
        self.set_replica(0)
        self.count = torch.zeros((), dtype=torch.int64)
        self.saved = False  # whether somebody keeps the output for backward

    def set_replica(self, replica: int) -> None:
        own = self.chain.fold(self.index)
        self.stream = (own.fold(replica) if replica else own).stream

    def settings(self) -> str:
        """How the layer is lowered, in words; which replica it is of is not among them."""
        chain = f", stream={self.chain.stream}" if self.chain.stream else ""
        return f"{self!r}, rounding={self.rounding}, seed={self.seed}{chain}"

    def __repr__(self) -> str:
        return f"activations={self.activations or 'fp32'}, errors={self.errors or 'fp32'}"

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if _own(_forward_of(module)) in (_rnn_forward, _relu_forward):  # which has done it
            return output
        if isinstance(module, nn.MultiheadAttention):  # the second output is not passed on, but looked at
            return (self.one(module, output[0]), *output[1:])
        if isinstance(output, Tensor):
            keeps = type(module) in KEEPS_GRID and self._sees_first(module) and "/" not in str(self.activations)
            return self.one(
                module, output, on_grid=keeps and bool(args) and inplace_cpu.marked(args[0], self.activations)
            )
        return tree_map_only(Tensor, lambda t: self.one(module, t), output)

    def one(self, module: nn.Module, x: Tensor, on_grid: bool = False) -> Tensor:
        """Q_A of one output, and Q_E on its error."""
        if not x.dtype.is_floating_point or (self.activations is None and self.errors is None):
            return x
        if inplace_cpu.simple(x):
            fresh = type(module) in FRESH and self._sees_first(module) and not x._is_view()
            return inplace_cpu.passed(x, self.next(module), fresh, on_grid, self)
        seed, stream, rounding = operators.signed(self.seed), operators.signed(self.stream), self._rounding(module)
        return cast(
            Tensor, inplace_cpu.lower_op(x, self.activations, self.errors, rounding, seed, stream, self._count(module))
        )

    def _sees_first(self, module: nn.Module) -> bool:
        """Whether the output is what the layer's type says, unseen: no hook before ours, no forward of somebody else's."""
        forward = _forward_of(module)
        ours = forward is None or _own(forward) is _conv_forward
        return ours and not global_hooks and next(iter(module._forward_hooks.values())) is self

    def relu(self, module: nn.ReLU, x: Tensor) -> Tensor:
        """The forward of `nn.ReLU`."""
        if inplace_cpu.simple(x) and self.activations is not None and inplace_cpu.marked(x, self.activations):
            return inplace_cpu.relu(x, self.next(module), module.inplace, SavedAsCodes.innermost())
        return self.one(module, nn.functional.relu(x, module.inplace))

    def next(self, module: nn.Module) -> inplace_cpu.Step:
        key = Key(self.seed, self.stream, int(self.count.add_(1)) if module.training else 0)
        return inplace_cpu.Step(self.activations, self.errors, self._rounding(module), key)

    def _rounding(self, module: nn.Module) -> str:
        return self.rounding if module.training else "nearest"

    def _count(self, module: nn.Module) -> Tensor:
        """How often the layer has run in training, this time included; a tensor that stays as it is."""
        if not module.training:
            return torch.zeros_like(self.count)
        self.count.add_(1)
        return self.count.clone()


def _layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    for name, module in model.named_modules():
        yield from ((name, hook) for hook in module._forward_hooks.values() if isinstance(hook, Layer))


# These find their layer when they are called: a deep copy of a module has its own.


def _own(method: Any) -> Any:
    """Which of the functions below an attribute is; partial, because that can be copied and pickled with its module."""
    return method.func if isinstance(method, partial) else None


def _forward_of(module: nn.Module) -> Any:
    """The forward that an instance has instead of its class's, below that of a lowered model."""
    forward = module.__dict__.get("forward")
    return cast(Any, module)._qlangevin_saving[1] if _own(forward) is _saving_forward else forward


def _layer_of(module: nn.Module) -> Layer:
    return next(hook for hook in module._forward_hooks.values() if isinstance(hook, Layer))


def _extra_repr(module: nn.Module) -> str:
    return ", ".join(filter(None, [type(module).extra_repr(module), repr(_layer_of(module))]))


def _saving_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a lowered model, its activations kept as codes; compiled code keeps what its compiler wants."""
    format, before = cast(Any, module)._qlangevin_saving
    possible = not torch.compiler.is_compiling() and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    with SavedAsCodes(format) if possible else nullcontext():
        return type(module).forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)


def _rnn_forward(module: nn.RNNBase, input: Any, hx: Any = None) -> Any:
    return layer_by_layer(module, _layer_of(module).one, input, hx)


def _relu_forward(module: nn.ReLU, input: Tensor) -> Tensor:
    return _layer_of(module).relu(module, input)


def _conv_forward(module: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    y = convolve(module, input) if inplace_cpu.simple(input) and not (args or kwargs) else None
    return cast(Tensor, type(module).forward(module, input, *args, **kwargs)) if y is None else y


def _forward_for(module: nn.Module) -> Any:
    """A forward of our own for modules in the midst of which something is to be done."""
    if isinstance(module, nn.RNNBase):
        return _rnn_forward
    return {nn.ReLU: _relu_forward, **dict.fromkeys(CONVOLUTIONS, _conv_forward)}.get(type(module))


def _check(chosen: dict[str, nn.Module]) -> None:
    for name, module in chosen.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{name!r} is a scripted module, whose output no hook can change; lower before scripting")
        if any(isinstance(hook, Layer) for hook in module._forward_hooks.values()):
            raise ValueError(f"{name!r} is lowered already; unlower(model) first")
