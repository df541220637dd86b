"""Numbers on a grid as integer codes and back, losslessly: the operators encode and decode, and packing of 4-bit codes.

Every number on the grid of a format has a code; the class of the format says which (`Format.encode`). Codes take int8 up to
8 bits, int16 up to 16, int32 beyond. In a QTensor two codes of up to 4 bits share a byte, the first in the low half.
"""

from __future__ import annotations

from math import isnan

import torch
from torch import Tensor

from . import operators
from .backend import Kernels, kernels_for
from .code_memory import check_codes, check_storage, packed_shape
from .format_base import DtypeLimits
from .formats import FP32, Format, fit_dtype, parse

__all__ = [
    "decode_op",
    "decode_values",
    "empty_codes",
    "encode_exactly",
    "encode_op",
    "pack_codes",
    "packed_shape",
    "unpack_codes",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # that codes are made of


@operators.operator("encode")
def encode_op(values: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return (codes, exponents) of float32, bfloat16 or float16 numbers on the grid of their dtype.

    Formats without blocks have no exponents.
    """
    parsed = _check_numbers(values, parse(format))
    values = values.contiguous()
    kernels = kernels_for(values)
    if kernels is None or values.dtype not in kernels.floats:
        return parsed.encode(values.to(torch.float32))
    codes, exponents = empty_codes(values, parsed)
    kernels.encode(values, codes, exponents, parsed)
    return codes, exponents


def _check_numbers(values: Tensor, format: Format) -> Format:
    """Return the format on which numbers are encoded; raise ValueError for other dtypes, and numbers that have no code."""
    if values.dtype not in FLOATS:
        raise ValueError(
            f"only float32, bfloat16 and float16 numbers can be encoded, got {values.dtype}; convert them with .float() first"
        )
    format = fit_dtype(format, values.dtype)
    if values.numel() == 0:
        return format
    check_storage(values)
    least, most = torch.aminmax(values)
    low, high = least.item(), most.item()
    if isnan(low):  # or high: a NaN spoils both
        raise ValueError(
            "cannot encode NaN: no code stands for it; look for its origin, or replace it with torch.nan_to_num"
        )
    if low < format.low or high > format.high:
        raise ValueError(
            f"cannot encode numbers from {low:.6g} to {high:.6g} as {format}, which has those from {format.low:.6g} to "
            f"{format.high:.6g}; round them first, with quantize"
        )
    return format


@operators.operator("decode")
def decode_op(codes: Tensor, exponents: Tensor | None, format: str) -> Tensor:
    """Return the float32 numbers that codes stand for."""
    check_storage(codes)
    if exponents is not None:
        check_storage(exponents)
        exponents = exponents.contiguous()
    return _decode(codes, exponents, parse(format), _kernels_for(codes, exponents))


def decode_values(
    codes: Tensor, exponents: Tensor | None, format: Format, spoiled: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Return the numbers that codes stand for, in a floating dtype; NaN throughout if ``spoiled`` is 1.

    A number that the dtype does not have, of a block whose exponent it does not reach, is rounded as ``.to(dtype)`` would.

    Skips the operator, which costs more than a small tensor does.
    """
    if type(codes) is Tensor and (kernels := _kernels_for(codes, exponents)) is not None:
        return _decode(codes, exponents, format, kernels, spoiled, dtype)
    check_codes(codes, exponents, format, codes.shape, packed=False)
    result: Tensor = decode_op(codes, exponents, str(format)).to(dtype)
    return result if spoiled is None else torch.where(spoiled != 0, torch.nan, result)


def _kernels_for(codes: Tensor, exponents: Tensor | None) -> Kernels | None:
    return kernels_for(codes) if exponents is None else kernels_for(codes, exponents)


def _decode(
    codes: Tensor, exponents: Tensor | None, format: Format, kernels: Kernels | None, spoiled: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    codes = codes.contiguous()
    if kernels is None or format == FP32:
        check_codes(codes, exponents, format, codes.shape, packed=False)
        return format.decode(codes, exponents).to(dtype)
    taken = dtype if dtype in kernels.floats else torch.float32
    values = torch.empty(codes.shape, dtype=taken, device=codes.device)
    kernels.decode(values, codes, exponents, format, spoiled=spoiled)  # which checks the same
    return values if taken is dtype else values.to(dtype)


def encode_exactly(values: Tensor, format: Format) -> tuple[Tensor, Tensor] | None:
    """Return (codes, exponents) of contiguous numbers if they decode to the same bits; None if not.

    None also for formats whose codes would be as large as float32. Half precision is tried on the grid clipped to its range.
    """
    if format.storage_bits >= 32:
        return None
    if values.dtype is not torch.float32:
        format = format.within(DtypeLimits.of(values.dtype))
    kernels = kernels_for(values)
    if kernels is None or values.dtype not in kernels.floats:
        return _encode_exactly(values.to(torch.float32), format)
    codes, exponents = empty_codes(values, format)
    return (codes, exponents) if kernels.encode_exactly(values, codes, exponents, format) else None


def _encode_exactly(values: Tensor, format: Format) -> tuple[Tensor, Tensor] | None:
    in_range = values.isfinite() & (values >= format.low) & (values <= format.high)
    if not bool(in_range.all()):
        return None
    codes, exponents = format.encode(values)
    same = torch.equal(format.decode(codes, exponents).view(torch.int32), values.view(torch.int32))
    return (codes, exponents) if same else None


def empty_codes(values: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Allocate codes and exponents of a tensor, in the order of its dims."""
    codes = values.new_empty(values.shape, dtype=format.code_dtype)
    return codes, values.new_empty(format.block_count(values.shape), dtype=torch.int8)


@operators.fake("encode")
def _(values: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return empty_codes(values, parse(format))


@operators.fake("decode")
def _(codes: Tensor, exponents: Tensor | None, format: str) -> Tensor:
    check_codes(codes, exponents, parse(format), codes.shape, packed=False)
    return codes.new_empty(codes.shape, dtype=torch.float32)


# ---- two 4-bit codes in a byte


def pack_codes(codes: Tensor, format: Format) -> Tensor:
    """Return codes, one an element, as they are stored."""
    if format.storage_bits > 4:
        return codes
    pairs = torch.nn.functional.pad(codes.view(-1), (0, codes.numel() % 2)).view(-1, 2)
    return (pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)


def unpack_codes(packed: Tensor, shape: torch.Size, format: Format) -> Tensor:
    """Return the stored codes of a tensor of this shape, one an element."""
    if format.storage_bits > 4:
        return packed
    low, high = (packed << 4) >> 4, packed >> 4  # arithmetic shifts extend the sign
    return torch.stack((low, high), 1).view(-1)[: shape.numel()].view(shape)
