"""A tensor that IS low precision: integer codes, and an exponent for each block; never a float copy.

What a code is depends on the format, and every number on the grid has one:

    FixedPoint   the two's complement integer value / Δ
    BlockFloat   the same with the block's Δ = 2^(E - W + 2); E is kept in ``exponents``, one int8 for each block in order
    Float        the sign bit, then the place of |value| among the format's numbers counted from zero; for the formats of
                 hardware this is torch's own bit pattern

Codes take int8 up to 8 bits, int16 up to 16, int32 beyond; up to 4 bits two codes share a byte, the first in the low half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import native, ops
from .formats import FP32, BlockFloat, FixedPoint, Format, parse, power_of_two
from .ops import Rounding
from .random import Key

__all__ = ["QTensor", "encode"]

_CODE_DTYPES = {4: torch.int8, 8: torch.int8, 16: torch.int16, 32: torch.int32}


@dataclass(frozen=True, eq=False)
class QTensor:
    """Codes of a tensor of the given shape; `decode` gives it back, exactly, in the given dtype."""

    codes: Tensor
    exponents: Tensor | None
    format: Format
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes and exponents: all the memory the numbers take."""
        return self.codes.nbytes + (self.exponents.nbytes if self.exponents is not None else 0)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def numel(self) -> int:
        return self.shape.numel()

    def to(self, device: torch.device | str) -> QTensor:
        exponents = self.exponents.to(device) if self.exponents is not None else None
        return replace(self, codes=self.codes.to(device), exponents=exponents)

    def unpacked(self) -> Tensor:
        """The codes, one an element, in the tensor's shape."""
        if self.format.storage_bits > 4:
            return self.codes.view(self.shape)
        low, high = (self.codes << 4) >> 4, self.codes >> 4  # arithmetic shifts extend the sign
        return torch.stack((low, high), 1).view(-1)[: self.numel()].view(self.shape)

    def decode(self) -> Tensor:
        """The numbers the codes stand for."""
        values: Tensor = decode_op(self.unpacked(), self.exponents, str(self.format))
        return values.to(self.dtype)

    def __repr__(self) -> str:
        return f"QTensor({self.format}, shape={tuple(self.shape)}, {self.nbytes} bytes, device={self.device})"


def encode(x: Tensor, format: str | Format, rounding: Rounding = "nearest", key: Key | None = None) -> QTensor:
    """x rounded to a format, as codes. For numbers already on the grid nothing is rounded: decoding gives back x."""
    parsed = parse(format)
    values = ops.quantize(x.detach(), parsed, rounding, key).to(torch.float32).contiguous()
    codes, exponents = encode_op(values, str(parsed))
    if parsed.storage_bits == 4:
        pairs = torch.nn.functional.pad(codes.view(-1), (0, codes.numel() % 2)).view(-1, 2)
        codes = (pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)
    return QTensor(codes, exponents if isinstance(parsed, BlockFloat) else None, parsed, x.shape, x.dtype)


@ops.operator("encode")
def encode_op(values: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """(codes, exponents) of float32 numbers on the grid, one code an element; formats without blocks have no exponents."""
    if bool(values.isnan().any()):
        raise ValueError(
            "cannot encode NaN: no code stands for it; look for its origin, or replace it with torch.nan_to_num"
        )
    parsed = ops.parse(format)
    if not native.enabled_for(values):
        return _codes(values, parsed)
    codes, exponents = _empty_codes(values, parsed)
    native.recode(values, codes, exponents, parsed, encode=True)
    return codes, exponents


@ops.operator("decode")
def decode_op(codes: Tensor, exponents: Tensor | None, format: str) -> Tensor:
    """The float32 numbers of unpacked codes."""
    parsed = ops.parse(format)
    if not native.enabled_for(codes):
        return _values(codes, exponents, parsed)
    values = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.contiguous_format)
    native.recode(values, codes.contiguous(), exponents, parsed, encode=False)
    return values


def _empty_codes(values: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    blocks = format.block_count(values.shape) if isinstance(format, BlockFloat) else 0
    return values.new_empty(values.shape, dtype=_CODE_DTYPES[format.storage_bits]), values.new_empty(
        blocks, dtype=torch.int8
    )


@ops.fake("encode")
def _(values: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return _empty_codes(values, ops.parse(format))


@ops.fake("decode")
def _(codes: Tensor, exponents: Tensor | None, format: str) -> Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)


def _codes(values: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """`encode_op` in plain PyTorch."""
    dtype, none = _CODE_DTYPES[format.storage_bits], values.new_empty(0, dtype=torch.int8)
    if isinstance(format, FixedPoint):
        return (values / format.step).to(dtype), none
    if isinstance(format, BlockFloat):
        rows = format.blocks(values)
        gap = format.gap_exponent(rows)
        codes = format.unblocks(rows / power_of_two(gap, torch.float32), values.shape)
        return codes.to(dtype), (gap + format.bits - 2).to(torch.int8).view(-1)
    if format == FP32:
        return values.view(torch.int32).clone(), none
    size = values.abs()
    gap = format.gap_exponent(size)  # a place is 2^man (E - emin + 1) + mantissa, and below 2^emin value / Δ
    place = (size / power_of_two(gap, torch.float32)).to(torch.int32) + (gap - format.min_gap_exponent) * 2**format.man
    sign = torch.where(values < 0, -(1 << (8 * dtype.itemsize - 1)), 0)
    return (place + sign).to(dtype), none


def _values(codes: Tensor, exponents: Tensor | None, format: Format) -> Tensor:
    """`decode_op` in plain PyTorch."""
    if isinstance(format, FixedPoint):
        return codes.to(torch.float32) * format.step
    if isinstance(format, BlockFloat):
        assert exponents is not None
        gap = power_of_two(exponents.view(-1, 1).to(torch.int32) - format.bits + 2, torch.float32)
        return format.unblocks(format.blocks(codes).to(torch.float32) * gap, codes.shape)
    if format == FP32:
        return codes.view(torch.float32).clone()
    place = codes.to(torch.int32) & ((1 << (8 * codes.dtype.itemsize - 1)) - 1)
    above = ((place >> format.man) - 1).clamp_min(0)  # binades above the lowest, which holds the subnormal numbers too
    gap = power_of_two(above + format.min_gap_exponent, torch.float32)
    size = (place - above * 2**format.man).to(torch.float32) * gap
    return torch.where(codes < 0, -size, size)
