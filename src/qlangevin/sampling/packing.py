"""Parameters that are low precision from the first step to the last: one byte a weight, and no float copy beside it."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from .._select import Choice, select_modules
from .._validate import check_choice, check_flag
from .._warnings import warn
from ..quantization import random
from ..quantization.formats import Format, check_holds, parse
from ..quantization.operators import Rounding
from ..quantization.qtensor import QTensor, decoded, encode_rounded
from .host_copy import has_no_numbers
from .replacing import replace_parameters
from .settings import parameter_key
from .update import quantize_for

__all__ = ["pack", "unpack"]

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
    frozen: bool = False,
) -> M:
    """Turn parameters into `QTensor` parameters, in place; returns the model.

    Every layer works as before: it decodes its weights when it computes, in forward and again in backward, and frees the
    decoded copy. `SGLD` steps on the codes. Frozen parameters, those that do not require gradients, stay as they are unless
    ``frozen`` is True. Packing rounds with the bits that a sampler of the same seed and stream, made for all of
    ``model.parameters()``, would have used: without an accumulator, a packed chain is the unpacked one.

    The model has other parameters afterwards. Train with any optimizer, then pack, then make the sampler. From then on an
    optimizer that was made before raises ValueError when it is to step a parameter that was replaced.

    Args:
        model: any module.
        weights: the format, Q_W.
        layers, skip: whose parameters, by type, name pattern or predicate of name and module.
        rounding: ``"stochastic"`` or ``"nearest"``.
        seed, stream: of the random bits; those of the sampler.
        frozen: pack frozen parameters too, such as the base under an adapter, rounded to nearest: no average over samples would
            make up for the noise of a stochastic rounding. They stay frozen.
    """
    parsed = parse(weights)
    check_flag("frozen", frozen)
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    found = [
        (f"{where}.{name}".lstrip("."), module, p)
        for where, module in select_modules(model, layers, skip).items()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    order = {id(p): i for i, p in enumerate(model.parameters())}
    chosen = [each for each in found if each[2].requires_grad or (frozen and each[2].is_floating_point())]
    if found and not chosen:
        warn("nothing was packed: no parameter requires gradients; pack(..., frozen=True) packs frozen ones, too")
    for full, module, p in chosen:
        _check_can_be_packed(full, module, p, parsed)
    packed: dict[int, nn.Parameter] = {}
    for _, _, p in chosen:
        if id(p) not in packed:
            key = parameter_key(seed, stream, order[id(p)], 0)
            how: Rounding = rounding if p.requires_grad else "nearest"
            rounded = quantize_for(random.WEIGHT, p.detach(), str(parsed), how, key)
            packed[id(p)] = nn.Parameter(encode_rounded(rounded, parsed), requires_grad=p.requires_grad)
    return replace_parameters(model, packed, by="pack")


def unpack(model: M) -> M:
    """Turn `QTensor` parameters back into float ones with the same numbers, in place; returns the model.

    A sampler of the packed parameters raises ValueError at its next step: to sample on, make a new one.
    """
    floats = {
        id(p): nn.Parameter(decoded(p.detach()), requires_grad=p.requires_grad)
        for p in model.parameters()
        if isinstance(p, QTensor)
    }
    return replace_parameters(model, floats, by="unpack")


def _check_can_be_packed(name: str, module: nn.Module, p: Tensor, format: Format) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"{name!r} belongs to a scripted module, whose parameters cannot be replaced; pack before scripting"
        )
    if isinstance(p, QTensor):
        raise ValueError(f"{name!r} is packed already, as {p.format}; unpack(model) first")
    if type(p) not in (nn.Parameter, Tensor) and not has_no_numbers(p):
        raise TypeError(f"{name!r} is a {type(p).__name__}; only plain parameters can be packed")
    try:
        check_holds(p.dtype, format)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name!r}: {error}") from None
    if not has_no_numbers(p) and not bool(p.isfinite().all()):
        raise ValueError(f"{name!r} holds an infinity or a NaN, for which {format} has no code")
