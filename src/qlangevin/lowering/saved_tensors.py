"""Tensors that autograd saves for backward, kept as codes.

While a lowered model runs forward, every float32 tensor that an operation saves is tried on the grid of its activations. If
it is on the grid, bit for bit, its codes and exponents are kept, a byte a number, and decoded when backward asks for it;
other tensors are kept unchanged. Gradients are therefore the same to the bit. A tensor that several operations save is kept
once.

A layer that writes its output onto the grid can produce the codes in the same pass. The model's `SavingForward` remembers
for which layers that paid: those whose output autograd saved in an earlier forward.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..quantization.codes import decode_values, empty_codes, encode_exactly
from ..quantization.formats import Format
from .memory_order import memory_order, reorder_dims, restore_dims
from .patches import Patch

__all__ = ["SavedAsCodes", "SavedCodes", "SavedUnchanged", "SavingForward"]

MIN_NUMEL = 1024  # smaller tensors are not worth encoding


class SavedCodes(NamedTuple):
    """A saved tensor as codes in the order of its memory (see `memory_order`)."""

    codes: Tensor
    exponents: Tensor
    format: Format
    order: tuple[int, ...]

    def decode(self) -> Tensor:
        """Return the tensor that was saved."""
        return restore_dims(decode_values(self.codes, self.exponents, self.format), self.order)


class SavedUnchanged(NamedTuple):
    """A saved tensor that is not on the grid, with the check for changes that PyTorch omits where there are hooks."""

    tensor: Tensor
    version: int | None

    def decode(self) -> Tensor:
        """Return the tensor; raise RuntimeError if it was written to since it was saved."""
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
                f"shape {tuple(self.tensor.shape)} is at version {self.tensor._version}, expected version {self.version}"
            )
        return self.tensor


class SavedAsCodes(torch.autograd.graph.saved_tensors_hooks):
    """One forward in which saved tensors on the grid of ``format`` are kept as codes; owns the codes while it lasts.

    ``saved_producers`` are the layers whose outputs were saved before; those found in this forward are added.
    """

    def __init__(self, format: Format, saved_producers: set[Hashable]) -> None:
        self.format, self._saved_producers = format, saved_producers
        self._codes: dict[tuple[Any, ...], SavedCodes] = {}
        self._producers: dict[StorageWeakRef, Hashable] = {}
        super().__init__(self.pack, self.unpack)

    @staticmethod
    def innermost() -> SavedAsCodes | None:
        """Return the context that this thread entered last."""
        entered = _thread.entered
        return entered[-1] if entered else None

    def __enter__(self) -> None:
        super().__enter__()
        _thread.entered.append(self)

    def __exit__(self, *error: object) -> None:
        _thread.entered.remove(self)
        self._codes.clear()
        self._producers.clear()
        super().__exit__(*error)

    # ---- for autograd

    def pack(self, t: Tensor) -> SavedCodes | SavedUnchanged:
        """Return the object that autograd keeps in the place of t."""
        codes = self._find_codes(t)
        return SavedUnchanged(t, None if t.is_inference() else t._version) if codes is None else codes

    @staticmethod
    def unpack(saved: SavedCodes | SavedUnchanged) -> Tensor:
        """Return the tensor that was saved."""
        return saved.decode()

    def _find_codes(self, t: Tensor) -> SavedCodes | None:
        """Return the codes of t, encoding it if no operation has saved it yet; None if t is not on the grid or too small."""
        if (
            type(t) is not Tensor
            or t.dtype != torch.float32
            or t.numel() < MIN_NUMEL
            or (t.is_leaf and t.requires_grad)
        ):
            return None
        key = _identify(t)
        if key not in self._codes:
            codes = self._encode(t)
            if codes is None:
                return None
            self._codes[key] = codes
            if (producer := self._producers.get(key[0])) is not None:
                self._saved_producers.add(producer)
        return self._codes[key]

    def _encode(self, t: Tensor) -> SavedCodes | None:
        order = memory_order(t)
        if order is None:
            return None
        found = encode_exactly(reorder_dims(t.detach(), order), self.format)
        return None if found is None else SavedCodes(*found, self.format, order)

    # ---- for layers

    def begin_output(self, x: Tensor, order: tuple[int, ...], producer: Hashable) -> SavedCodes | None:
        """Note that a producer writes its output into x; return codes to fill if an output of it was saved before."""
        self._producers[StorageWeakRef(x.untyped_storage())] = producer
        return self.allocate_codes(x, order) if producer in self._saved_producers else None

    def allocate_codes(self, x: Tensor, order: tuple[int, ...]) -> SavedCodes | None:
        """Return codes for a tensor like x, to be filled by the caller; None if they would save no memory."""
        if self.format.storage_bits >= 32 or x.numel() < MIN_NUMEL:
            return None
        return SavedCodes(*empty_codes(reorder_dims(x, order), self.format), self.format, order)

    def set_codes(self, x: Tensor, codes: SavedCodes) -> None:
        """Keep these codes if an operation saves x as it is now."""
        self._codes[_identify(x)] = codes


class _Thread(threading.local):
    """The contexts that a thread has entered, innermost last."""

    def __init__(self) -> None:
        self.entered: list[SavedAsCodes] = []


_thread = _Thread()


def _identify(t: Tensor) -> tuple[Any, ...]:
    """Return a key that no other contents of a tensor have: the weak reference keeps the storage's address from reuse."""
    return StorageWeakRef(t.untyped_storage()), t._version, t.storage_offset(), t.shape, t.stride()


class SavingForward(Patch):
    """The forward of a lowered model: runs the replaced one within `SavedAsCodes`. Compilers decide for themselves what is
    saved."""

    method = "forward"

    def __init__(self, module: nn.Module, format: Format) -> None:
        super().__init__(module)
        self.format = format
        self.saved_producers: set[Hashable] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return self.call_replaced(*args, **kwargs)
        with SavedAsCodes(self.format, self.saved_producers):
            return self.call_replaced(*args, **kwargs)
