"""Masks of weights that move, a bit each: weight i is bit i % 8 of byte i // 8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quantization.formats import Format

__all__ = ["cuts_blocks", "pack_mask", "unpack_mask"]


def pack_mask(mask: Any, shape: torch.Size, device: torch.device) -> Tensor:
    """Return the bits of a mask: True where a weight moves. Raise ValueError if it is no mask of this shape."""
    given = torch.as_tensor(mask, device=device)
    if given.dtype != torch.bool and not bool(((given == 0) | (given == 1)).all()):
        raise ValueError(f"a mask must be of bool, or of zeros and ones, got numbers of {given.dtype}")
    if given.shape != shape:
        raise ValueError(f"the mask must have the parameter's shape, {tuple(shape)}, got {tuple(given.shape)}")
    bits = torch.zeros(-(-given.numel() // 8) * 8, dtype=torch.uint8, device=device)
    bits[: given.numel()] = given.reshape(-1).to(torch.uint8)
    return (bits.view(-1, 8) << _places(device)).sum(1, dtype=torch.uint8)


def unpack_mask(bits: Tensor, shape: torch.Size) -> Tensor:
    """Return a mask of bool from its bits."""
    each = (bits[:, None] >> _places(bits.device)) & 1
    return each.view(-1)[: shape.numel()].view(shape).bool()


def cuts_blocks(mask: Tensor, format: Format) -> bool:
    """Return True if a block has weights that move and weights that do not: these change when its exponent grows."""
    if not format.has_exponents or mask.numel() == 0:
        return False
    none, moving = torch.zeros(mask.shape, device=mask.device), mask.to(torch.float32)
    has_moving, has_fixed = (format.gap(x) > format.gap(none) for x in (moving, 1 - moving))
    return bool((has_moving & has_fixed).any())


def _places(device: torch.device) -> Tensor:
    """Return 0 .. 7, made on the device: a copy from the host would wait for it."""
    return torch.arange(8, dtype=torch.uint8, device=device)
