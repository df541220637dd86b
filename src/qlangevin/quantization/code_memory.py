"""The memory of codes: what a format needs for a tensor of some shape, and the check that two tensors are that.

Codes come from files and other processes, users can replace or resize them, and kernels read them by address. So codes and
exponents are checked when a QTensor is made and again before they are read: dtype, shape, contiguity, device and storage.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .formats import Format

__all__ = [
    "CodeLayout",
    "check_codes",
    "check_layout",
    "check_storage",
    "check_view",
    "code_layout",
    "describe_memory",
    "packed_shape",
]

MOST_ELEMENTS = 2**63 - 1  # strides and offsets are 64-bit integers
FREED = "the codes of these weights were freed: a sharded layer has them only while it computes"

_has_storage = torch._C._has_storage


class CodeLayout(NamedTuple):
    """Memory of the codes of a tensor: dtype, shape and bytes, and the shape of its int8 exponents, None if it has none."""

    format: Format
    shape: torch.Size  # of the tensor
    dtype: torch.dtype
    codes: torch.Size
    itemsize: int
    nbytes: int
    exponents: torch.Size | None
    blocks: int


def packed_shape(shape: torch.Size, format: Format) -> torch.Size:
    """Return the shape of the packed codes of a tensor: a flat row of bytes if two codes share one."""
    return torch.Size((-(-shape.numel() // 2),)) if format.storage_bits == 4 else shape


@lru_cache(maxsize=4096)
def code_layout(format: Format, shape: torch.Size, packed: bool = True) -> CodeLayout:
    """Return the layout of the codes of a tensor of this shape; ``packed`` if two 4-bit codes share a byte.

    Raise ValueError for what is no format or no shape.
    """
    if not isinstance(format, Format):
        raise ValueError(f"the format of codes must be a FixedPoint, BlockFloat or Float, got {type(format).__name__}")
    if any(type(n) is not int or n < 0 for n in shape) or prod(max(n, 1) for n in shape) > MOST_ELEMENTS:
        raise ValueError(
            f"no tensor has the shape {tuple(shape)}: sizes must not be negative, their product below 2^63"
        )
    dtype, codes = format.code_dtype, packed_shape(shape, format) if packed else shape
    blocks = format.block_count(shape)
    exponents = torch.Size((blocks,)) if format.has_exponents else None
    return CodeLayout(format, shape, dtype, codes, dtype.itemsize, codes.numel() * dtype.itemsize, exponents, blocks)


def check_codes(
    codes: Tensor, exponents: Tensor | None, format: Format, shape: torch.Size, *, packed: bool = True
) -> None:  # fmt: skip
    """Raise ValueError unless these are codes and exponents of a tensor of the given format and shape, with all their memory.

    Raise RuntimeError if the memory was freed, as FSDP2 does with weights that it has gathered. Tensors that have no memory,
    those of compilers and of `torch.func`, are checked as far as they can be.
    """
    if type(codes) is not Tensor and not isinstance(codes, nn.Parameter):
        _check_without_memory(codes, exponents, format)
    else:
        check_layout(code_layout(format, shape, packed), codes, exponents)


def check_layout(layout: CodeLayout, codes: Tensor, exponents: Tensor | None, may_be_freed: bool = False) -> None:
    """The same, given the layout."""
    if _is_usual(layout, codes, exponents):
        return
    if type(codes) is not Tensor and not isinstance(codes, nn.Parameter):
        _check_without_memory(codes, exponents, layout.format)
        return
    _check_tensor("codes", codes, layout.dtype, layout.codes, layout, may_be_freed)
    _check_exponents(exponents, layout, may_be_freed)
    if exponents is not None and codes.device != exponents.device:
        raise ValueError(
            f"codes and exponents must be on one device, got codes on {codes.device}, exponents on {exponents.device}"
        )


def _is_usual(layout: CodeLayout, codes: Tensor, exponents: Tensor | None) -> bool:
    """Return True for sound codes in plain memory, fast: this precedes every use of codes. False says nothing."""
    try:
        if type(codes) is not Tensor:
            return False
        if not _holds(codes, layout.dtype, layout.codes, layout.itemsize, layout.nbytes):
            return False
        if exponents is None or layout.exponents is None:
            return exponents is None and layout.exponents is None
        if type(exponents) is not Tensor:
            return False
        if not (codes.is_cpu and exponents.is_cpu) and codes.device != exponents.device:
            return False
        return _holds(exponents, torch.int8, layout.exponents, 1, layout.blocks)
    except RuntimeError:  # some tensors have no shape or no storage
        return False


def _holds(t: Tensor, dtype: torch.dtype, shape: torch.Size, itemsize: int, nbytes: int) -> bool:
    return (
        t.dtype is dtype
        and t.shape == shape
        and t.is_contiguous()
        and t.untyped_storage().nbytes() >= nbytes + t.storage_offset() * itemsize
    )


def check_view(view: tuple[Any, Any, Any], shape: torch.Size) -> None:
    """Raise ValueError unless (size, strides, offset) describe a view inside of a contiguous tensor of this shape."""
    size, strides, offset = view
    good = isinstance(size, (tuple, list)) and isinstance(strides, (tuple, list)) and len(size) == len(strides)
    good = good and all(type(n) is int and 0 <= n <= MOST_ELEMENTS for n in (*size, *strides, offset))
    if good and 0 not in size:
        good = offset + sum((n - 1) * s for n, s in zip(size, strides, strict=True)) < shape.numel()
    if not good:
        raise ValueError(
            f"a view must lie inside of its tensor of shape {tuple(shape)}, got size {size}, strides {strides}, offset {offset}"
        )


def check_storage(t: Tensor) -> None:
    """Raise ValueError if a tensor's storage was freed or made smaller: any operation on it would read what is not its own."""
    if type(t) is not Tensor or not t.numel() or t.layout is not torch.strided or not _has_storage(t):
        return
    last = t.numel() - 1 if t.is_contiguous() else sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if t.untyped_storage().nbytes() < (t.storage_offset() + last + 1) * t.itemsize:
        raise ValueError(f"a tensor must have all of its memory, got {describe_memory(t)}")


def describe_memory(t: Tensor) -> str:
    """Return dtype, shape, strides, device and bytes of a tensor, for messages."""
    if not isinstance(t, Tensor):
        return f"a {type(t).__name__}"
    if t.layout is not torch.strided or t.is_nested:
        return f"{t.dtype}, {'nested' if t.is_nested else t.layout}"
    storage = f"{t.untyped_storage().nbytes()} bytes of storage" if _has_storage(t) else "no storage"
    storage += ", lazily negated" if t.is_neg() else ""
    return (
        f"{t.dtype}, shape {tuple(t.shape)}, strides {t.stride()}, offset {t.storage_offset()}, {t.device}, {storage}"
    )


def _check_tensor(
    what: str, t: Tensor, dtype: torch.dtype, shape: torch.Size, layout: CodeLayout, may_be_freed: bool
) -> None:
    good = isinstance(t, Tensor) and t.layout is torch.strided and not t.is_nested
    good = good and t.dtype is dtype and t.shape == shape and t.is_contiguous()
    if good and _has_storage(t):
        needed, storage = t.nbytes, t.untyped_storage().nbytes()
        if needed and storage == 0 and not may_be_freed:
            raise RuntimeError(FREED)
        good = not needed or storage == 0 or storage >= t.storage_offset() * t.itemsize + needed
    elif good:
        good = torch._C._functorch.is_functorch_wrapped_tensor(t)
    if not good:
        raise ValueError(
            f"the {what} of {_name(layout)} must be a contiguous {dtype} tensor of shape {tuple(shape)} with all of its "
            f"memory, got {describe_memory(t)}"
        )


def _check_exponents(exponents: Tensor | None, layout: CodeLayout, may_be_freed: bool) -> None:
    if layout.exponents is None:
        if exponents is not None and (exponents.shape != (0,) or exponents.dtype != torch.int8):
            raise ValueError(f"{_name(layout)} has no exponents, got {describe_memory(exponents)}")
    elif exponents is None:
        raise ValueError(f"{_name(layout)} needs {layout.blocks} exponents, got None")
    else:
        _check_tensor("exponents", exponents, torch.int8, layout.exponents, layout, may_be_freed)


def _check_without_memory(codes: Tensor, exponents: Tensor | None, format: Format) -> None:
    if not isinstance(codes, Tensor) or codes.dtype != format.code_dtype:
        found = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise ValueError(f"the codes of a {format} tensor must be {format.code_dtype}, got {found}")
    if format.has_exponents and (exponents is None or exponents.dtype != torch.int8):
        raise ValueError(
            f"a {format} tensor needs int8 exponents, got {None if exponents is None else exponents.dtype}"
        )


def _name(layout: CodeLayout) -> str:
    return f"a {layout.format} tensor of shape {tuple(layout.shape)}"
