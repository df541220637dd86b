"""What autograd keeps for backward, as codes.

While a lowered model runs forward, every float tensor that an operation saves is tried on the grid of its activations. What
is on it, bit for bit, is kept as codes and exponents, a byte a number, and decoded when backward asks for it; what is not is
kept as it is. So nothing is lost, and gradients are the same to the bit. A tensor saved by several operations is kept once.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..quantization.codes import decode_values, empty_codes, encode_exactly
from ..quantization.formats import Format

__all__ = ["Codes", "SavedAsCodes", "in_order", "memory_order"]

SMALL = 1024  # tensors below this are not worth it


def memory_order(x: Tensor) -> tuple[int, ...] | None:
    """The permutation of dims that makes x contiguous without a copy; () if it is contiguous already, None if there is none."""
    if x.is_contiguous():
        return ()
    strides = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda d: (-strides[d], d)))
    return order if x.permute(order).is_contiguous() else None


def in_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    return x.permute(order) if order else x


class Codes(NamedTuple):
    """A saved tensor: codes in the order of memory, and how it lay there."""

    codes: Tensor
    exponents: Tensor
    format: Format
    order: tuple[int, ...]

    @property
    def about(self) -> tuple[Format, tuple[int, ...]]:
        return self.format, self.order

    def decode(self) -> Tensor:
        values = decode_values(self.codes, self.exponents, self.format)
        return values.permute(sorted(range(len(self.order)), key=self.order.__getitem__)) if self.order else values


class AsItIs(NamedTuple):
    """A saved tensor that is not on the grid. PyTorch does not look whether hooks give back what was saved: this does."""

    tensor: Tensor
    version: int | None

    def decode(self) -> Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
                f"shape {tuple(self.tensor.shape)} is at version {self.tensor._version}, expected version {self.version}"
            )
        return self.tensor


class Maker(Protocol):
    """Whoever makes tensors learns here that they are saved: next time it can make the codes with them."""

    saved: bool


class SavedAsCodes(torch.autograd.graph.saved_tensors_hooks):
    """The context in which saved tensors on the grid of ``format`` are kept as codes."""

    _open = threading.local()

    def __init__(self, format: Format) -> None:
        self.format = format
        self.known: dict[Any, Codes] = {}
        self.makers: dict[StorageWeakRef, Maker] = {}
        super().__init__(self.pack, self.unpack)

    @classmethod
    def _stack(cls) -> list[SavedAsCodes]:
        if not hasattr(cls._open, "stack"):
            cls._open.stack = []
        return cast("list[SavedAsCodes]", cls._open.stack)

    @classmethod
    def innermost(cls) -> SavedAsCodes | None:
        """The context this thread is in."""
        stack = cls._stack()
        return stack[-1] if stack else None

    def __enter__(self) -> None:
        super().__enter__()
        self._stack().append(self)

    def __exit__(self, *error: object) -> None:
        self._stack().remove(self)
        self.known.clear()
        self.makers.clear()
        super().__exit__(*error)

    def pack(self, t: Tensor) -> Codes | AsItIs:
        """What is kept for a tensor."""
        codes = self.codes_of(t)
        return AsItIs(t, None if t.is_inference() else t._version) if codes is None else codes

    def codes_of(self, t: Tensor) -> Codes | None:
        if type(t) is not Tensor or t.dtype != torch.float32 or t.numel() < SMALL or (t.is_leaf and t.requires_grad):
            return None
        place = self.place(t)
        if place not in self.known:
            codes = self._encode(t)
            if codes is None:
                return None
            self.known[place] = codes
            if (maker := self.makers.get(place[0])) is not None:
                maker.saved = True
        return self.known[place]

    def room(self, x: Tensor, order: tuple[int, ...]) -> Codes | None:
        """Codes to be filled in by whoever puts numbers on the grid into x; None if this saves nothing."""
        if self.format.storage_bits >= 32 or x.numel() < SMALL:
            return None
        return Codes(*empty_codes(in_order(x, order), self.format), self.format, order)

    @staticmethod
    def place(t: Tensor) -> tuple[Any, ...]:
        """What tells a tensor from others: its storage, which is not another's as long as somebody has a weak reference."""
        return StorageWeakRef(t.untyped_storage()), t._version, t.storage_offset(), t.shape, t.stride()

    def _encode(self, t: Tensor) -> Codes | None:
        order = memory_order(t)
        if order is None:
            return None
        found = encode_exactly(in_order(t.detach(), order), self.format)
        return None if found is None else Codes(*found, self.format, order)

    @staticmethod
    def unpack(saved: Codes | AsItIs) -> Tensor:
        return saved.decode()
