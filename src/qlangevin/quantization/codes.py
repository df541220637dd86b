"""Numbers on a grid as integers and back, losslessly: what a code is.

    FixedPoint   the two's complement integer value / Δ
    BlockFloat   the same with the block's Δ = 2^(E - W + 2); E is kept in ``exponents``, one int8 for each block in order
    Float        the sign bit, then the place of |value| among the format's numbers counted from zero; for the formats of
                 hardware this is torch's own bit pattern

Every number on the grid has one. Codes take int8 up to 8 bits, int16 up to 16, int32 beyond.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from . import operators
from .formats import FP32, BlockFloat, FixedPoint, Format, power_of_two

__all__ = ["decode_op", "empty_codes", "encode_exactly", "encode_op", "values_of"]

DTYPES = {4: torch.int8, 8: torch.int8, 16: torch.int16, 32: torch.int32}


@operators.operator("encode")
def encode_op(values: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """(codes, exponents) of float32 numbers on the grid, one code an element; formats without blocks have no exponents."""
    if bool(values.isnan().any()):
        raise ValueError(
            "cannot encode NaN: no code stands for it; look for its origin, or replace it with torch.nan_to_num"
        )
    parsed = operators.parse(format)
    if not native.enabled_for(values):
        return _codes(values, parsed)
    codes, exponents = empty_codes(values, parsed)
    native.recode(values, codes, exponents, parsed, encode=True)
    return codes, exponents


@operators.operator("decode")
def decode_op(codes: Tensor, exponents: Tensor | None, format: str) -> Tensor:
    """`values_of`, as an operator."""
    return _decode(codes, exponents, operators.parse(format))


def values_of(codes: Tensor, exponents: Tensor | None, format: Format) -> Tensor:
    """The float32 numbers of unpacked codes. Real ones need no operator, which would cost more than a small tensor does."""
    if type(codes) is Tensor and native.enabled_for(codes):
        return _decode(codes, exponents, format)
    result: Tensor = decode_op(codes, exponents, str(format))
    return result


def _decode(codes: Tensor, exponents: Tensor | None, format: Format) -> Tensor:
    if not native.enabled_for(codes):
        return _values(codes, exponents, format)
    values = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    native.recode(values, codes.contiguous(), exponents, format, encode=False)
    return values


def encode_exactly(values: Tensor, format: Format) -> tuple[Tensor, Tensor] | None:
    """(codes, exponents) of contiguous float32 numbers if they decode to the same bits; None if not, or if it saves nothing."""
    if format.storage_bits >= 32:
        return None
    codes, exponents = empty_codes(values, format)
    if native.enabled_for(values):
        same = native.encode_exactly(values, codes, exponents, format)
    else:
        same = bool(values.isfinite().all()) and bool((values >= format.low).all() and (values <= format.high).all())
        if same:
            codes, exponents = _codes(values, format)
            same = torch.equal(_values(codes, exponents, format).view(torch.int32), values.view(torch.int32))
    return (codes, exponents) if same else None


def empty_codes(values: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Room for codes and exponents of such a tensor, in the order of its dims."""
    blocks = format.block_count(values.shape) if isinstance(format, BlockFloat) else 0
    return values.new_empty(values.shape, dtype=DTYPES[format.storage_bits]), values.new_empty(blocks, dtype=torch.int8)


@operators.fake("encode")
def _(values: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return empty_codes(values, operators.parse(format))


@operators.fake("decode")
def _(codes: Tensor, exponents: Tensor | None, format: str) -> Tensor:
    return codes.new_empty(codes.shape, dtype=torch.float32)


def _codes(values: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """`encode_op` in plain PyTorch."""
    dtype, none = DTYPES[format.storage_bits], values.new_empty(0, dtype=torch.int8)
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
    sign = torch.where(values.signbit(), -(1 << (8 * dtype.itemsize - 1)), 0)
    return (place + sign).to(dtype), none


def _values(codes: Tensor, exponents: Tensor | None, format: Format) -> Tensor:
    """`decode_op` in plain PyTorch."""
    if isinstance(format, FixedPoint):
        return codes.to(torch.float32) * format.step
    if isinstance(format, BlockFloat):
        assert exponents is not None
        gap = power_of_two(exponents.view(-1, 1).to(torch.int32) - format.bits + 2, torch.float32)
        return format.unblocks(format.blocks(codes).to(torch.float32) * gap, codes.shape).contiguous()
    if format == FP32:
        return codes.view(torch.float32).clone()
    place = codes.to(torch.int32) & ((1 << (8 * codes.dtype.itemsize - 1)) - 1)
    above = ((place >> format.man) - 1).clamp_min(0)  # binades above the lowest, which holds the subnormal numbers too
    gap = power_of_two(above + format.min_gap_exponent, torch.float32)
    size = (place - above * 2**format.man).to(torch.float32) * gap
    return torch.where(codes < 0, -size, size)
