"""Q_A and Q_E on the layers of a model: Algorithm 3 of the paper.

    forward    a_l     = Q_A(f_l(a_(l-1), θ_l))
    backward   e_(l-1) = Q_E((∂f_l / ∂a_(l-1))ᵀ e_l)

A layer l is a module; `lower` puts a hook on it that rounds its output, and the error that comes back to that output. Where
several layers use one output, the sum of their errors is rounded. Random bits are a function of the seed, the layer's name and
how often it has run in training; in evaluation everything is rounded to nearest, and no run is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import activation, batchnorm, conv, dropout, pooling

from .._select import Choice, select_modules
from .._validate import check_choice
from ..quantization.formats import FP32, Format, parse
from ..quantization.operators import Rounding
from ..quantization.random import Key
from .handler import Handler, find_handler
from .modules import handler_for
from .patches import remove_patches
from .saved_tensors import SavingForward
from .tensor_owners import calibrate_refcounts

__all__ = [
    "LAYERS",
    "Quantize",
    "check_state",
    "load_state_dict",
    "lower",
    "set_replica",
    "settings",
    "state_dict",
    "unlower",
]

M = TypeVar("M", bound=nn.Module)


class Quantize(nn.Module):
    """The identity, for a place in a model where there is no layer, such as a residual sum: `lower` rounds its output."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _modules_of(package: Any) -> list[type[nn.Module]]:
    return [getattr(package, name) for name in package.__all__]


# The modules that are layers. Log-softmax is none: it belongs to the loss.
LAYERS: tuple[type[nn.Module], ...] = (
    *[nn.Linear, nn.Bilinear, conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase],
    *[batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d],
    *[t for t in _modules_of(activation) if t is not nn.LogSoftmax],
    *[*_modules_of(pooling), *_modules_of(dropout), nn.Upsample, Quantize],
)


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
    prefix: str = "",
    save_codes: bool = True,
) -> M:
    """Round the output of every layer, and the error that flows back to it, in place; return the model.

    Args:
        model: any module; `unlower` undoes this.
        activations, errors: the formats, Q_A and Q_E; None for full precision. The blocks of ``"bfp8"`` are slices along the
            first dim, that is examples (the paper's small block); that of ``"bfp8/tensor"`` is all of a tensor.
        layers, skip: which layers, by type, name pattern or predicate of name and module.
        rounding: in training, ``"stochastic"`` or ``"nearest"``.
        seed: of the random bits, which follow from it, from ``stream`` and from the name that a layer has in ``model``. So
            several calls may lower different ``layers`` of one model.
        stream: distinguishes chains that share a seed.
        prefix: the name of ``model`` in the network that it is a part of: ``lower(net.encoder, ..., prefix="encoder")`` draws
            the bits of ``lower(net, ..., layers="encoder.*")``. Without it, parts whose layers have the same names would draw
            the same bits, and their common backward raises.
        save_codes: keep tensors on the grid of the activations as codes for backward, which changes no number. On a GPU these are
            the outputs of layers and views of them, and a tensor that held a NaN is NaN throughout in backward.
    """
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    names = tuple(None if f is None or parse(f) == FP32 else str(parse(f)) for f in (activations, errors))
    chosen = select_modules(model, layers, skip)
    _check_can_be_lowered(chosen)
    for name, module in chosen.items():
        full = _join_names(prefix, name)
        handler_for(module)(names[0], names[1], rounding, Key(seed, stream), full).install(module)
    calibrate_refcounts()
    if save_codes and names[0] is not None and not isinstance(model.__dict__.get("forward"), SavingForward):
        SavingForward(model, parse(names[0])).install()
    return model


def unlower(model: M) -> M:
    """Remove what `lower` put on a model, or on any part of it; return the model."""
    for module in model.modules():
        for key in [k for k, hook in module._forward_hooks.items() if isinstance(hook, Handler)]:
            del module._forward_hooks[key]
        remove_patches(module)
    return model


def state_dict(model: nn.Module) -> dict[str, int]:
    """Return how often each layer has run in training: with the seed, all that its random bits depend on."""
    return {name: handler.runs for name, handler in _named_handlers(model)}


def load_state_dict(model: nn.Module, state: Mapping[str, int]) -> None:
    """Resume the random bits of a saved model."""
    check_state(model, state)
    for name, handler in _named_handlers(model):
        handler.runs = int(state[name])


def check_state(model: nn.Module, state: Mapping[str, int]) -> None:
    """Raise ValueError if a state is of a model with other layers."""
    found = dict(_named_handlers(model))
    if found.keys() != state.keys():
        odd = sorted(found.keys() ^ state.keys())
        raise ValueError(f"the state is of a model lowered otherwise: {', '.join(map(repr, odd[:5]))} in one only")


def settings(model: nn.Module) -> dict[str, str]:
    """Return the formats, the rounding and the random stream of each layer, as text."""
    return {name: handler.settings() for name, handler in _named_handlers(model)}


def set_replica(model: nn.Module, replica: int) -> None:
    """Give one of several copies of a model that see different data random bits of its own; copy 0 keeps those it has."""
    for _, handler in _named_handlers(model):
        handler.set_replica(replica)


def _named_handlers(model: nn.Module) -> Iterator[tuple[str, Handler]]:
    for name, module in model.named_modules():
        if (handler := find_handler(module)) is not None:
            yield name, handler


def _join_names(prefix: str, name: str) -> str:
    """Return the name of a layer in the network, given that of its part."""
    if prefix.startswith(".") or prefix.endswith("."):
        raise ValueError(f"prefix must be the name of a module, such as 'encoder' or 'model.encoder', got {prefix!r}")
    return ".".join(filter(None, (prefix, name)))


def _check_can_be_lowered(chosen: dict[str, nn.Module]) -> None:
    for name, module in chosen.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{name!r} is a scripted module, whose output no hook can change; lower before scripting")
        if find_handler(module) is not None:
            raise ValueError(f"{name!r} is lowered already; unlower(model) first")
