"""Tensors that autograd saves for backward, kept as codes.

While a lowered model runs forward, every tensor of float32, bfloat16 or float16 that an operation saves is tried on the grid of
its activations. If it is on the grid, bit for bit, its codes and exponents are kept, a byte a number, and decoded when backward
asks for it; other tensors are kept unchanged. Gradients are therefore the same to the bit. A tensor that several operations
save is kept once, and so are views of a tensor, such as queries, keys and values that one layer computes.

A layer that writes its output onto the grid can produce the codes in the same pass. The model's `SavingForward` remembers
for which layers that paid: those whose output autograd saved in an earlier forward.

Where kernels are deferred, on GPUs, no tensor is tried, because the host would wait for the answer. Kept as codes are the outputs
that layers have rounded, and views of all of one (see `rounded_outputs`). Others are kept unchanged, though the CPU would find
them on the grid: parts and copies of outputs (such as channels-last ones, flattened), results of functions that are no layers
(``torch.nn.functional.relu``, sums in fixed point), zeros, inputs and weights of the same format. A NaN has no code. The CPU
keeps a tensor that holds one unchanged; deferred kernels write its codes and a flag, ``spoiled``, with which it decodes to NaN
throughout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..quantization.backend import Kernels, kernels_for
from ..quantization.codes import FLOATS, empty_codes, encode_exactly
from ..quantization.formats import Format, fit_dtype
from .kept_tensors import Kept, SavedCodes, SavedUnchanged
from .memory_order import block_order, memory_order, reorder_dims
from .patches import Patch
from .replay import enclosing_regions, top_pack_hook
from .rounded_outputs import Flags, RoundedOutput

__all__ = [
    "Kept",
    "SavedAsCodes",
    "SavedCodes",
    "SavedUnchanged",
    "SavingForward",
    "identify",
    "recording_into",
    "watching",
]

MIN_NUMEL = 1024  # smaller tensors are not worth encoding


class Record(Protocol):
    """Calls of functions, whose results need not be saved; see `recomputation`."""

    def keep(self, t: Tensor, otherwise: Callable[[Tensor], Kept]) -> Any:
        """Return what stands for a tensor that autograd saves now; None if it is no result of a recorded call."""


class SavedAsCodes(torch.autograd.graph.saved_tensors_hooks):
    """One forward in which saved tensors on the grid of ``format`` are kept as codes; owns the codes while it lasts.

    ``saved_producers`` are the layers whose outputs were saved before; those found in this forward are added.
    """

    is_outside_of_regions = True  # see `SavingForward`

    def __init__(self, format: Format, saved_producers: set[Hashable]) -> None:
        self.format, self._saved_producers = format, saved_producers
        self._codes: dict[tuple[Any, ...], SavedCodes] = {}
        self._refused: set[tuple[Any, ...]] = set()  # tensors that are not on the grid
        self._producers: dict[StorageWeakRef, Hashable] = {}
        self._outputs: dict[StorageWeakRef, RoundedOutput] = {}
        self._flags = Flags()
        super().__init__(self.pack, self.unpack)

    @staticmethod
    def innermost() -> SavedAsCodes | None:
        """Return the context that this thread entered last; None if other hooks now get what is saved."""
        entered = _thread.entered
        return entered[-1] if entered and getattr(top_pack_hook(), "__self__", None) is entered[-1] else None

    def __enter__(self) -> None:
        super().__enter__()
        _thread.entered.append(self)

    def __exit__(self, *error: object) -> None:
        _thread.entered.remove(self)
        self._codes.clear()
        self._refused.clear()
        self._producers.clear()
        self._outputs.clear()
        super().__exit__(*error)

    # ---- for autograd

    def pack(self, t: Tensor) -> Any:
        """Return the object that autograd keeps in the place of t; its ``decode`` returns t."""
        if _thread.record is not None and type(t) is Tensor and self._saves_memory(t):
            with torch._C.DisableTorchFunction():
                result = _thread.record.keep(t, self.keep)
            if result is not None:
                return result
        return self.keep(t)

    def keep(self, t: Tensor) -> Kept:
        """Return t as codes if it is on the grid, else unchanged."""
        with torch._C.DisableTorchFunction():  # modes are for the functions of users
            codes = self.find_codes(t)
        kept = SavedUnchanged(t, None if t.is_inference() else t._version) if codes is None else codes
        if _thread.watcher is not None:
            _thread.watcher(kept)
        return kept

    @staticmethod
    def unpack(saved: Any) -> Tensor:
        """Return the tensor that was saved."""
        return cast(Tensor, saved.decode())

    def find_codes(self, t: Tensor) -> SavedCodes | None:
        """Return the codes of t, encoding it if no operation has saved it yet; None if t is not on the grid or too small."""
        if type(t) is not Tensor or not self._saves_memory(t) or _is_of_parameter(t):
            return None
        kernels = kernels_for(t)
        if kernels is not None and kernels.deferred:
            return self._find_output_codes(t, kernels)
        whole = _whole_of(t)
        if whole is not t and (codes := self._codes_of(whole)) is not None:
            return codes._replace(view=(t.shape, t.stride(), int(t.storage_offset() - whole.storage_offset())))
        return self._codes_of(t)

    def _codes_of(self, t: Tensor) -> SavedCodes | None:
        key = identify(t)
        if key not in self._codes:
            codes = None if key in self._refused else self._encode(t)
            if codes is None:
                self._refused.add(key)
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
        return None if found is None else SavedCodes(*found, self.format, order, dtype=t.dtype)

    def _find_output_codes(self, t: Tensor, kernels: Kernels) -> SavedCodes | None:
        """Return the codes of t if it is a rounded output or a view of all of one; None if that is not known."""
        output = self._outputs.get(StorageWeakRef(t.untyped_storage()))
        if output is None or not output.has_same_elements(t):
            return None
        codes = self._codes.get(output.key)
        if codes is None:
            codes = self._codes[output.key] = self._encode_output(output.of_view(t), kernels)
            self._saved_producers.add(output.producer)
        same = t.shape == output.shape and t.stride() == output.stride
        return codes if same else codes._replace(view=(t.shape, t.stride(), 0))

    def _encode_output(self, x: Tensor, kernels: Kernels) -> SavedCodes:
        """Return codes of numbers that are on the grid, unless they are NaN, without waiting for them."""
        order = memory_order(x)
        assert order is not None
        values = reorder_dims(x.detach(), order)
        codes, exponents = empty_codes(values, self.format)
        kernels.encode(values, codes, exponents, fit_dtype(self.format, x.dtype))
        spoiled = values.amax().isnan().to(torch.int32).view(1)  # a NaN is the greatest of all
        return SavedCodes(codes, exponents, self.format, order, spoiled, dtype=x.dtype)

    # ---- for layers

    def wants_codes(self, x: Tensor, producer: Hashable) -> bool:
        """Return True if an output of a producer was saved before, and codes of it would save memory."""
        return producer in self._saved_producers and self._saves_memory(x)

    def begin_output(
        self, x: Tensor, order: tuple[int, ...], producer: Hashable, deferred: bool = False
    ) -> SavedCodes | None:
        """Note that a producer writes its output into x; return codes to fill if an output of it was saved before."""
        self._producers[StorageWeakRef(x.untyped_storage())] = producer
        return self.allocate_codes(x, order, deferred) if producer in self._saved_producers else None

    def allocate_codes(self, x: Tensor, order: tuple[int, ...], deferred: bool = False) -> SavedCodes | None:
        """Return codes for a tensor like x, to be filled by the caller; None if they would save no memory.

        ``deferred`` kernels fill in a flag as well.
        """
        if not self._saves_memory(x):
            return None
        spoiled = self._flags.take(x.device) if deferred else None
        codes, format = empty_codes(reorder_dims(x, order), self.format), fit_dtype(self.format, x.dtype)
        return SavedCodes(*codes, format, order, spoiled, dtype=x.dtype)

    def set_codes(self, x: Tensor, codes: SavedCodes) -> None:
        """Keep these codes if an operation saves x as it is now."""
        self._codes[identify(x)] = codes

    def note_output(self, x: Tensor, producer: Hashable) -> None:
        """Note that x is on the grid as it is now, so that it is kept as codes if an operation saves it or a view of it."""
        if self._saves_memory(x) and not x.is_inference() and block_order(x, self.format) is not None:
            self._outputs[StorageWeakRef(x.untyped_storage())] = RoundedOutput.of(x, identify(x), producer)

    def _saves_memory(self, x: Tensor) -> bool:
        return x.numel() >= MIN_NUMEL and x.dtype in FLOATS and self.format.storage_bits < 8 * x.itemsize


class _Thread(threading.local):
    """The contexts that a thread has entered, innermost last."""

    def __init__(self) -> None:
        self.entered: list[SavedAsCodes] = []
        self.watcher: Callable[[Kept], None] | None = None
        self.record: Record | None = None


_thread = _Thread()


@contextmanager
def watching(watcher: Callable[[Kept], None]) -> Iterator[None]:
    """Show everything that this thread keeps for backward to a function."""
    before, _thread.watcher = _thread.watcher, watcher
    try:
        yield
    finally:
        _thread.watcher = before


@contextmanager
def recording_into(record: Record | None) -> Iterator[None]:
    """Ask a record, if there is one, about everything that is saved within this context."""
    before, _thread.record = _thread.record, record
    try:
        yield
    finally:
        _thread.record = before


def identify(t: Tensor) -> tuple[Any, ...]:
    """Return a key that no other contents of a tensor have: the weak reference keeps the storage's address from reuse."""
    return StorageWeakRef(t.untyped_storage()), t._version, t.storage_offset(), t.shape, t.stride(), t.dtype


def _whole_of(t: Tensor) -> Tensor:
    """Return the tensor that t is a view of, if its codes are not larger than t; else t."""
    whole = t._base
    if whole is None or type(whole) is not Tensor or whole.dtype is not t.dtype or whole.numel() > t.nbytes:
        return t
    return t if memory_order(whole) is None else whole


def _is_of_parameter(t: Tensor) -> bool:
    """Return True for a leaf that requires a gradient, and for views of one: its numbers stay in memory anyway."""
    base = t if t._base is None else t._base
    return base.is_leaf and base.requires_grad


class SavingForward(Patch):
    """The forward of a lowered model: runs the replaced one within `SavedAsCodes`.

    Compilers decide for themselves what is saved. So do checkpointed regions that have hooks: they save nothing.
    """

    method = "forward"

    def __init__(self, module: nn.Module, format: Format) -> None:
        super().__init__(module)
        self.format = format
        self.saved_producers: set[Hashable] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return self.call_replaced(*args, **kwargs)
        if top_pack_hook() is not None and any(region.has_hooks for region in enclosing_regions()):
            return self.call_replaced(*args, **kwargs)
        with SavedAsCodes(self.format, self.saved_producers):
            return self.call_replaced(*args, **kwargs)
