"""What autograd keeps for backward, as codes.

While a lowered model runs forward, every float tensor that an operation saves is tried on the grid of its activations. What
is on it, bit for bit, is kept as codes and exponents, a byte a number, and decoded when backward asks for it; what is not is
kept as it is. So nothing is lost, and gradients are the same to the bit. A tensor saved by several operations is kept once.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .codes import decode_op, encode_exactly
from .formats import BlockFloat, Format

__all__ = ["SavedAsCodes", "memory_order"]

SMALL = 1024  # tensors below this are not worth it


def memory_order(x: Tensor, format: Format | None = None) -> tuple[int, ...] | None:
    """The permutation of dims that makes x contiguous without a copy and keeps its blocks together; None if there is none.

    Channels-last activations are worked on in the order of their memory. Groups along the last dim must stay along it.
    """
    if x.is_contiguous():
        return tuple(range(x.dim()))
    order = tuple(sorted(range(x.dim()), key=lambda d: (-x.stride(d), d)))
    grouped = isinstance(format, BlockFloat) and isinstance(format.block, int)
    if (grouped and order[-1] != x.dim() - 1) or not x.permute(order).is_contiguous():
        return None
    return order


@dataclass(eq=False)
class Codes:
    """A saved tensor: codes in the order of memory, and how it lay there."""

    codes: Tensor
    exponents: Tensor | None
    format: str
    order: tuple[int, ...]
    __slots__ = ("__weakref__", "codes", "exponents", "format", "order")

    def decode(self) -> Tensor:
        values: Tensor = decode_op(self.codes, self.exponents, self.format)
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return values.permute(inverse)


class SavedAsCodes(torch.autograd.graph.saved_tensors_hooks):
    """The context in which saved tensors on the grid of ``format`` are kept as codes."""

    def __init__(self, format: Format) -> None:
        self.format = format
        self.known: dict[Any, tuple[StorageWeakRef, weakref.ref[Codes]]] = {}
        super().__init__(self.pack, self.unpack)

    def pack(self, t: Tensor) -> Tensor | Codes:
        if type(t) is not Tensor or t.dtype != torch.float32 or t.numel() < SMALL or t.is_leaf and t.requires_grad:
            return t
        place = (t.data_ptr(), t._version, t.shape, t.stride())
        if (found := self.known.get(place)) is not None:
            storage, codes = found[0], found[1]()
            if codes is not None and not storage.expired():
                return codes
        fresh = self._encode(t)
        if fresh is None:
            return t
        self.known[place] = (StorageWeakRef(t.untyped_storage()), weakref.ref(fresh))
        return fresh

    def _encode(self, t: Tensor) -> Codes | None:
        order = memory_order(t, self.format)
        if order is None:
            return None
        found = encode_exactly(t.detach().permute(order), self.format)
        return None if found is None else Codes(*found, str(self.format), order)

    @staticmethod
    def unpack(saved: Tensor | Codes) -> Tensor:
        return saved.decode() if isinstance(saved, Codes) else saved
