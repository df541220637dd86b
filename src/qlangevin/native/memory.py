"""Tensors as the kernels see them: an address and a number of bytes.

So before every call it is checked that a tensor has the dtype and the shape that the kernel assumes, is contiguous, and that its
storage holds all of it. The kernels check each number of bytes against the number of elements and the blocks of the grid.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from ..quantization.code_memory import check_storage, describe_memory
from ..quantization.formats import Format

__all__ = ["FLOAT_TYPES", "Memory", "aligned", "exponents_of", "memory_if_any", "memory_of", "numbers_of", "readable"]

Memory: TypeAlias = tuple[int, int] | tuple[int, int, int]  # address, bytes; of halves also one of FLOAT_TYPES

FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as the kernels number them


def exponents_of(exponents: Tensor | None, format: Format) -> Memory | None:
    """Return the memory of exponents; the kernels know how many a grid has."""
    if exponents is None:
        if format.has_exponents:
            raise ValueError(f"codes of {format} need exponents, got None")
        return None
    if exponents.dim() != 1:
        raise ValueError(f"exponents must have one dimension, got shape {tuple(exponents.shape)}")
    return memory_of(exponents, torch.int8, None)


def memory_of(t: Tensor, dtype: torch.dtype, shape: torch.Size | None) -> tuple[int, int]:
    """Return (address, bytes); raise ValueError for a tensor that the kernels, which see nothing else of it, would misread.

    A shape of None is any.
    """
    try:
        if (
            t.dtype is dtype
            and t.is_cpu
            and t.is_contiguous()
            and (shape is None or t.shape == shape)
            and not t.is_neg()
        ):
            size = t.nbytes
            if not size or t.untyped_storage().nbytes() >= t.storage_offset() * dtype.itemsize + size:
                return t.data_ptr(), size
    except RuntimeError:  # some tensors have no storage
        pass
    of_shape = "" if shape is None else f" of shape {tuple(shape)}"
    raise ValueError(
        f"the kernels need a contiguous {dtype} tensor{of_shape} on the CPU, with all of its memory, got {describe_memory(t)}"
    )


def numbers_of(t: Tensor, shape: torch.Size | None) -> Memory:
    """Return the memory of floating numbers; that of bfloat16 and float16 comes with its type."""
    if t.dtype is torch.float32 or t.dtype not in FLOAT_TYPES:
        return memory_of(t, torch.float32, shape)
    return (*memory_of(t, t.dtype, shape), FLOAT_TYPES[t.dtype])


def memory_if_any(t: Tensor | None, dtype: torch.dtype, shape: torch.Size) -> Memory | None:
    return None if t is None else memory_of(t, dtype, shape)


def readable(t: Tensor, shape: torch.Size | None) -> tuple[Tensor, Memory]:
    """Return a tensor and its memory, or those of a copy if its memory does not hold its numbers as kernels read them.

    It may begin between two multiples of its item size, over foreign memory, or hold its negative, as conj().imag does.
    """
    try:
        memory = numbers_of(t, shape)
    except ValueError:
        if not t.is_neg():
            raise
        return readable(t.resolve_neg(), shape)
    return (t, memory) if memory[0] % t.itemsize == 0 else readable(t.clone(), shape)


def aligned(t: Tensor) -> Tensor:
    """Return t, or a copy if it begins between two multiples of its item size."""
    if t.layout is not torch.strided or t.data_ptr() % t.itemsize == 0:
        return t
    check_storage(t)
    return t.clone()
