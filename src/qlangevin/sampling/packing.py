"""Parameters that are low precision from the first step to the last: one byte a weight, and no float copy beside it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._select import Choice, select_modules
from .._validate import check_choice
from ..quantization import random
from ..quantization.formats import Format, check_holds, parse
from ..quantization.operators import Rounding
from ..quantization.qtensor import QTensor, encode
from .step import parameter_key, quantized

__all__ = ["check_owners", "pack", "replace_parameters", "unpack"]

M = TypeVar("M", bound=nn.Module)


def pack(
    model: M,
    weights: str | Format,
    *,
    layers: Choice = nn.Module,
    skip: Choice | None = None,
    rounding: Rounding = "stochastic",
    seed: int = 0,
    stream: int = 0,
) -> M:
    """Turn parameters into `QTensor` parameters, in place; returns the model.

    Every layer works as before: it decodes its weights when it computes, in forward and again in backward, and lets go of
    them. `SGLD` steps on the codes. Frozen parameters stay as they are. Rounded with the bits that a sampler of the same seed
    and stream, made for all of ``model.parameters()``, would have used: without an accumulator, a packed chain is the unpacked
    one.

    Args:
        model: any module. Pack before the optimizer is made: it must hold the new parameters.
        weights: the format, Q_W.
        layers, skip: whose parameters, by type, name pattern or predicate of name and module.
        rounding: ``"stochastic"`` or ``"nearest"``.
        seed, stream: of the random bits; those of the sampler.
    """
    parsed = parse(weights)
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    order = {id(p): i for i, p in enumerate(model.parameters())}
    chosen = [
        (f"{where}.{name}".lstrip("."), module, p)
        for where, module in select_modules(model, layers, skip).items()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if p.requires_grad
    ]
    for full, module, p in chosen:
        _check(full, module, p, parsed)
    check_owners([(full, p) for full, _, p in chosen])
    packed: dict[int, nn.Parameter] = {}
    for _, _, p in chosen:
        if id(p) not in packed:
            key = parameter_key(seed, stream, order[id(p)], 0)
            rounded = quantized(p.detach(), str(parsed), rounding, key, random.WEIGHT)
            packed[id(p)] = nn.Parameter(encode(rounded, parsed))
    return replace_parameters(model, packed)


def unpack(model: M) -> M:
    """Turn `QTensor` parameters back into float ones with the same numbers, in place; returns the model."""
    chosen = [(name, p) for name, p in model.named_parameters() if isinstance(p, QTensor)]
    check_owners(chosen)
    return replace_parameters(
        model,
        {id(p): nn.Parameter(cast(QTensor, p.detach()).decode(), requires_grad=p.requires_grad) for _, p in chosen},
    )


def replace_parameters(model: M, new: dict[int, nn.Parameter]) -> M:
    """Put new parameters in the places of old ones, wherever those are: tied weights are one before and after."""
    places = [
        (module, name, p)
        for module in model.modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in new
    ]
    for module, name, p in places:
        setattr(module, name, new[id(p)])
    return model


def _check(name: str, module: nn.Module, p: Tensor, format: Format) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{name!r} belongs to a scripted module, whose parameters cannot be replaced; pack before scripting"
        )
    if isinstance(p, QTensor):
        raise ValueError(f"{name!r} is packed already, as {p.format}; unpack(model) first")
    if type(p) not in (nn.Parameter, Tensor):
        raise TypeError(f"{name!r} is a {type(p).__name__}; only plain parameters can be packed")
    try:
        check_holds(p.dtype, format)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name!r}: {error}") from None
    if not bool(p.isfinite().all()):
        raise ValueError(f"{name!r} holds an infinity or a NaN, for which {format} has no code")


def check_owners(parameters: Sequence[tuple[str, Tensor]]) -> None:
    """An optimizer keeps the parameters it was given: after packing it would step tensors nobody uses."""
    ids = {id(p): name for name, p in parameters}
    for attempt in range(2 if ids else 0):
        optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
        groups = [
            (o, group) for o in optimizers for group in getattr(o, "param_groups", [])
        ]  # none if it was not finished
        owned = next(((ids[id(p)], o) for o, group in groups for p in group["params"] if id(p) in ids), None)
        if owned is None:
            return
        if attempt == 1:
            raise ValueError(
                f"{owned[0]!r} belongs to a {type(owned[1]).__name__} optimizer, which would go on with the old tensor; "
                "pack or unpack first, then make the optimizer"
            )
        del optimizers, groups, owned
        gc.collect()  # it may be one that nobody has any more
