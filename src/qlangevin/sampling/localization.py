"""The surroundings of a chain: a centre w0 that weights are drawn towards, and a box around it that they do not leave.

The centre is kept in a format of its own: numbers of a half precision as such, those of other formats as codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quantization.formats import Format, parse
from ..quantization.operators import quantize, working_dtype
from ..quantization.qtensor import QTensor, decoded_as, encode
from .settings import StepSettings

__all__ = ["hold", "into_box", "keep_center"]

_PLAIN = ("fp32", "bf16", "fp16")  # formats that are kept as numbers of their dtype


def hold(values: Tensor, name: str | None) -> Tensor:
    """Return numbers that are on the grid of a format in the memory that it needs; None is the numbers' own dtype."""
    if name is None:
        return values.clone()
    format = parse(name)
    dtype = getattr(format, "dtype", None)
    if name in _PLAIN and dtype is not None:
        return values.to(dtype, copy=True)
    return encode(values.to(torch.float32), format)


def keep_center(given: Any, theta: Tensor, settings: StepSettings, format: str | Format | None) -> Tensor:
    """Return the centre of a parameter as it is kept: ``given`` is ``"initial"``, the weights as they are, or a tensor.

    The initial weights are on their grid, so by default they are kept in its format, exactly. A tensor is by default kept
    as it is and not copied, so that samplers can share it. Another format is rounded to, to nearest.
    """
    if isinstance(given, str):
        if given != "initial":
            raise ValueError(f"center must be 'initial' or tensors, one for each parameter, got {given!r}")
        values = decoded_as(theta.detach(), working_dtype(theta.dtype)).contiguous()
        name = str(parse(format)) if format is not None else settings.weights_format(theta)
    else:
        given = _check_center(given, theta)
        if format is None:
            return given.contiguous() if not isinstance(given, QTensor) else given
        values, name = decoded_as(given, working_dtype(given.dtype)).contiguous(), str(parse(format))
    if name is None:
        return values.clone()
    parsed = parse(name)
    if values.numel() and not parsed.low <= float(values.min()) <= float(values.max()) <= parsed.high:
        raise ValueError(
            f"the centre has numbers from {float(values.min()):g} to {float(values.max()):g}, which do not fit {parsed}: its "
            f"range is {parsed.low:g} to {parsed.high:g}; take another center_format, such as 'bf16'"
        )
    return hold(quantize(values, parsed), name)


def _check_center(given: Any, theta: Tensor) -> Tensor:
    if not isinstance(given, Tensor) or not given.is_floating_point():
        kind = f"a tensor of {given.dtype}" if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"the centre must be a floating tensor, got {kind}")
    if given.shape != theta.shape:
        raise ValueError(f"the centre must have the parameter's shape, {tuple(theta.shape)}, got {tuple(given.shape)}")
    if given.device != theta.device:
        raise ValueError(f"the centre is on {given.device}, its parameter on {theta.device}; move it with .to(...)")
    if isinstance(given, QTensor) and given.is_view:
        raise ValueError("the centre is a view of a packed tensor; give all of it")
    if not bool(decoded_as(given.detach(), working_dtype(given.dtype)).isfinite().all()):
        raise ValueError("the centre holds an infinity or a NaN")
    return given.detach()


def into_box(drawn: Tensor, center: Tensor, box: float, format: str | None) -> tuple[Tensor, Tensor]:
    """Return numbers on the grid, those outside of the box w0 ± box moved to its edge, and a mask of these.

    An edge is the last number of the grid inside of the box; where a gap has none, the number nearest to w0.
    """
    low, high = center - box, center + box
    inside = torch.minimum(torch.maximum(drawn, low), high)
    outside = inside != drawn
    if format is None:
        return inside, outside
    parsed = parse(format)
    gap = parsed.gap(torch.maximum(drawn.abs(), inside.abs()))
    least, most = (low / gap).ceil() * gap, (high / gap).floor() * gap
    nearest = (center / gap).round() * gap
    edge = torch.where(least > most, nearest, torch.where(drawn < low, least, most)).clamp(parsed.low, parsed.high)
    on_grid = (drawn / gap).round() * gap  # changes a number only if its block has become coarser
    return torch.where(outside, edge, on_grid), outside & (edge != drawn)
