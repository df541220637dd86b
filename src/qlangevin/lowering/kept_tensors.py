"""Stand-ins that autograd holds for saved tensors: codes, or the tensor itself."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ..quantization.codes import decode_values
from ..quantization.formats import Format
from .memory_order import restore_dims

__all__ = ["Kept", "SavedCodes", "SavedUnchanged"]


class SavedCodes(NamedTuple):
    """A saved tensor as codes in the order of its memory (see `memory_order`)."""

    codes: Tensor
    exponents: Tensor
    format: Format
    order: tuple[int, ...]
    spoiled: Tensor | None = None  # 1 if the tensor held a NaN; all of it is one then
    view: tuple[torch.Size, tuple[int, ...], int] | None = None  # shape, strides and offset of a view of its memory
    dtype: torch.dtype = torch.float32

    def decode(self) -> Tensor:
        """Return the tensor that was saved. Views that are held at once, such as queries and keys, share their memory."""
        if self.view is None:
            return restore_dims(self._values(), self.order)
        held = getattr(self.codes, "_qlangevin_values", None)
        values = None if held is None else held()
        if values is None:
            values = self._values()
            self.codes._qlangevin_values = weakref.ref(values)  # type: ignore[attr-defined]
        view: Any = values.as_strided(*self.view)
        view._qlangevin_whole = values
        return cast(Tensor, view)

    def _values(self) -> Tensor:
        return decode_values(self.codes, self.exponents, self.format, self.spoiled, self.dtype)


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


Kept: TypeAlias = SavedCodes | SavedUnchanged
