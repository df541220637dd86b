"""A user's model on loan: a chain gets weights of its own in the places of the user's, which are put back afterwards.

The user's parameters are never written to. They are the centre of the localization, shared by all chains, so that a chain takes
the memory of its own weights and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..quantization import random
from ..quantization.formats import BF16, FP16, Format, check_holds
from ..quantization.operators import working_dtype
from ..quantization.qtensor import QTensor, decoded_as, encode_rounded
from ..sampling.sampler import Sampler
from ..sampling.settings import parameter_key
from ..sampling.update import quantize_for
from .selection import Part
from .settings import Settings

__all__ = ["hold_still", "lend_model", "mean_square_distance", "own_format"]

MEASURED = 2**17  # weights of a parameter that a distance is measured on: all of them would take memory


@contextmanager
def hold_still(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without dropout and with fixed statistics; restore modes and buffers at the end."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


@contextmanager
def lend_model(model: nn.Module, part: Part, settings: Settings, chain: int) -> Iterator[Sampler]:
    """Replace the parameters of a part by those of a chain at w*, and yield its sampler; put the user's back at the end."""
    users = dict(model.named_parameters())
    fixed = [p for name, p in users.items() if name not in part.masks and p.requires_grad]
    places = _find_places(model, {id(users[name]): name for name in part.masks})
    own = {name: _begin(name, users[name], i, settings, chain) for i, name in enumerate(part.masks)}
    try:
        for p in fixed:
            p.requires_grad_(False)
        for module, attribute, name in places:
            setattr(module, attribute, own[name])
        centers = [users[name].detach() for name in own]
        masks = {name: mask for name, mask in part.masks.items() if mask is not None}
        near = settings.localization > 0 or settings.box is not None
        more = ({"center": centers} if near else {}) | ({"mask": masks} if masks else {})
        yield settings.make_sampler([*own.items()], stream=chain, step_in_backward=True, **more)
    finally:
        for module, attribute, name in places:
            setattr(module, attribute, users[name])
        for p in fixed:
            p.requires_grad_(True)


def _find_places(model: nn.Module, wanted: Mapping[int, str]) -> list[tuple[nn.Module, str, str]]:
    """Return module, attribute and name of each place that has one of these parameters; tied ones have several."""
    return [
        (module, attribute, wanted[id(p)])
        for module in model.modules()
        for attribute, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in wanted
    ]


def _begin(name: str, p: Tensor, index: int, settings: Settings, chain: int) -> nn.Parameter:
    """Return the weights that a chain begins with: w*, rounded to its format with the bits that its sampler would take."""
    format = settings.packed
    if format is None or format_of(p) == format:
        return nn.Parameter(p.detach().clone())
    if isinstance(p, QTensor):
        raise ValueError(
            f"{name!r} is packed as {p.format}, not {format}; give weights={str(p.format)!r}, or unpack(model) first"
        )
    try:
        check_holds(p.dtype, format)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name!r}: {error}; or give weights=None for the model's own dtype") from None
    if not bool(p.isfinite().all()):
        raise ValueError(f"{name!r} holds an infinity or a NaN; a chain must begin at finite weights")
    key = parameter_key(settings.seed, chain, index, 0)
    with torch.no_grad():
        rounded = quantize_for(random.WEIGHT, p.detach(), str(format), "stochastic", key)
        return nn.Parameter(encode_rounded(rounded, format))


def format_of(p: Tensor) -> Format | None:
    """Return the low-precision format that a parameter has already, packed or by its dtype; None for full precision."""
    return p.format if isinstance(p, QTensor) else {torch.bfloat16: BF16, torch.float16: FP16}.get(p.dtype)


def own_format(model: nn.Module) -> Format | None:
    """Return the format that all moving parameters of a model share; None if there are several, or full precision."""
    found = {format_of(p) for p in model.parameters() if p.requires_grad}
    return found.pop() if len(found) == 1 else None


def mean_square_distance(model: nn.Module, users: Mapping[str, Tensor], part: Part) -> float:
    """Return the mean of (w - w*)² over the weights that move; of large parameters, over evenly spaced rows."""
    own, total = dict(model.named_parameters()), 0.0
    with torch.no_grad():
        for name, mask in part.masks.items():
            w, center = own[name].detach(), users[name].detach()
            rows = slice(None) if mask is not None or w.dim() == 0 else slice(None, None, -(-w.numel() // MEASURED))
            some, near = (decoded_as(t[rows] if t.dim() else t, working_dtype(t.dtype)) for t in (w, center))
            apart = (some - near) if mask is None else (some - near)[mask]
            moving = w.numel() if mask is None else int(mask.sum())
            total += moving * float(apart.square().mean(dtype=torch.float64))
    return total / part.size(users)
