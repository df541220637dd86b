"""Q_A and Q_E on the layers of a model: Algorithm 3 of the paper.

    forward    a_l     = Q_A(f_l(a_(l-1), θ_l))
    backward   e_(l-1) = Q_E((∂f_l / ∂a_(l-1))ᵀ e_l)

A layer l is a module; `lower` puts a hook on it that rounds its output, and the error that comes back to that output. Where
several layers use one output, the sum of their errors is rounded. Random bits are a function of the seed, the layer's name and
how often it has run in training; in evaluation everything is rounded to nearest, and no run is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn

from .._select import Choice, select_modules
from .._validate import check_choice
from .._warnings import warn
from ..quantization.formats import FP32, Format, parse
from ..quantization.operators import Rounding
from ..quantization.random import Key
from .function_table import FunctionChoice, choose_functions
from .functions import EnterLayer, FunctionSettings, LeaveLayer, ScopedForward, find_scope
from .handler import Handler, find_handler
from .layer_choice import LAYERS, is_layer, scope_functions
from .modules import Quantize, handler_for
from .patches import find_patch, remove_patches
from .saved_tensors import SavingForward
from .tensor_owners import calibrate_refcounts

__all__ = [
    "LAYERS",
    "Quantize",
    "check_state",
    "is_layer",
    "load_state_dict",
    "lower",
    "set_replica",
    "settings",
    "state_dict",
    "unlower",
]

M = TypeVar("M", bound=nn.Module)


def lower(
    model: M,
    activations: str | Format | None = None,
    errors: str | Format | None = None,
    *,
    layers: Choice = is_layer,
    skip: Choice | None = None,
    functions: FunctionChoice = True,
    skip_functions: FunctionChoice = False,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
    prefix: str = "",
    save_codes: bool = True,
) -> M:
    """Round the output of every layer, and the error that flows back to it, in place; return the model.

    Args:
        model: any module; `unlower` undoes this.
        activations, errors: the formats, Q_A and Q_E; None or ``"fp32"`` for full precision. The blocks of ``"bfp8"`` are slices
            along the first dim, that is examples (the paper's small block); that of ``"bfp8/tensor"`` is all of a tensor.
        layers, skip: which layers, by type, name pattern or predicate of name and module. By default all layers of PyTorch
            (`LAYERS`) and modules of the user's that have no children; see `is_layer`.
        functions, skip_functions: which functions, by name (``"relu"``) or callable (``F.relu``), are lowered like layers
            where the forward of the model, or of a module in it that has children, calls them; see `lowering.FUNCTIONS`. If
            ``layers`` are chosen, only where they match the calling module. Functions of skipped modules are not.
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
    if activations is None and errors is None:
        warn(
            "lower rounds nothing: neither activations nor errors have a format. Give them one, such as lower(model, "
            "activations='bfp8', errors='bfp8'); 'fp32' is full precision without this warning"
        )
    names = _format_name(activations), _format_name(errors)
    chosen, wanted = select_modules(model, layers, skip), choose_functions(functions, skip_functions)
    _check_can_be_lowered(chosen)
    for name, module in chosen.items():
        full = _join_names(prefix, name)
        handler_for(module)(names[0], names[1], rounding, Key(seed, stream), full).install(module)
    calibrate_refcounts()
    if names != (None, None):
        functions_of = FunctionSettings(*names, rounding, Key(seed, stream), wanted, prefix)
        _scope_functions(model, functions_of, chosen, layers, skip)
    if save_codes and names[0] is not None and find_patch(model, SavingForward) is None:
        SavingForward(model, parse(names[0])).install()
    return model


def _format_name(format: str | Format | None) -> str | None:
    """Return the name of a format; None for full precision."""
    return None if format is None or parse(format) == FP32 else str(parse(format))


def _scope_functions(
    model: nn.Module, settings: FunctionSettings, chosen: dict[str, nn.Module], layers: Choice, skip: Choice | None
) -> None:
    """Have functions lowered in the modules that ``layers`` chooses, all by default, less those to skip."""
    everywhere = select_modules(model, nn.Module, skip) if layers is is_layer else chosen
    scope_functions(model, settings, set(chosen.values()), set(everywhere.values()))


def unlower(model: M) -> M:
    """Remove what `lower` put on a model, or on any part of it; return the model."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if isinstance(hook, (Handler, EnterLayer, LeaveLayer))]:
                del hooks[key]
        remove_patches(module)
    return model


def state_dict(model: nn.Module) -> dict[str, int]:
    """Return how often each layer and function has run in training: with the seed, all that their random bits depend on.

    A function is named after the module whose forward calls it: ``"block/relu/0"`` is the first `relu` of ``block``.
    """
    state = {name: handler.runs for name, handler in _named_handlers(model)}
    for name, scope in _named_scopes(model):
        state |= {f"{name}/{key}": runs for key, runs in scope.state().items()}
    return state


def load_state_dict(model: nn.Module, state: Mapping[str, int]) -> None:
    """Resume the random bits of a saved model."""
    check_state(model, state)
    for name, handler in _named_handlers(model):
        handler.runs = int(state[name])
    for name, scope in _named_scopes(model):
        start = f"{name}/"
        scope.load({key[len(start) :]: int(runs) for key, runs in state.items() if key.startswith(start)})


def check_state(model: nn.Module, state: Mapping[str, int]) -> None:
    """Raise ValueError if a state is of a model with other layers, or with functions in other modules.

    Functions are known once they have been called, so that a state may have more or fewer of them than the model.
    """
    found = {name for name, _ in _named_handlers(model)} | {f"{name}/" for name, _ in _named_scopes(model)}
    given = {name.split("/")[0] + "/" if "/" in name else name for name in state}
    odd = {name for name in found ^ given if name in given or not name.endswith("/")}
    if odd:
        names = ", ".join(map(repr, sorted(odd)[:5]))
        raise ValueError(f"the state is of a model lowered otherwise: {names} in one only")


def settings(model: nn.Module) -> dict[str, str]:
    """Return the formats, the rounding and the random stream of each layer, and of the functions of each module, as text."""
    found = {name: handler.settings() for name, handler in _named_handlers(model)}
    return found | {f"{name}/": scope.text() for name, scope in _named_scopes(model)}


def set_replica(model: nn.Module, replica: int) -> None:
    """Give one of several copies of a model that see different data random bits of its own; copy 0 keeps those it has."""
    for _, handler in _named_handlers(model):
        handler.set_replica(replica)
    for _, scope in _named_scopes(model):
        scope.set_replica(replica)


def _named_handlers(model: nn.Module) -> Iterator[tuple[str, Handler]]:
    for name, module in model.named_modules():
        if (handler := find_handler(module)) is not None:
            yield name, handler


def _named_scopes(model: nn.Module) -> Iterator[tuple[str, ScopedForward]]:
    """Yield the modules whose functions are lowered."""
    for name, module in model.named_modules():
        if (scope := find_scope(module)) is not None and scope.settings.names:
            yield name, scope


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
