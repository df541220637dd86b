"""Memory of a QTensor's numbers, for programs that read tensors by address: safetensors, and all that saves with it.

Such a program asks a tensor for its address and reads the numbers there. A QTensor has codes there, so a copy of it that is no
parameter, such as each of a `state_dict`, gets its numbers decoded when it is asked, and keeps them as long as it lives.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from .qtensor import QTensor

__all__ = ["decoded_memory"]

# Tied weights have one memory: tools that save ask for equal addresses to find them.
_shared: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def decoded_memory(q: QTensor) -> Tensor | None:
    """Return the decoded numbers of all codes behind a QTensor, the same for all that share codes; None for a parameter.

    A parameter lives as long as its model: it would keep floats beside its codes, and these would be of an earlier step.
    """
    if isinstance(q, nn.Parameter) or type(q.codes) is not Tensor or q.codes.is_meta:
        return None
    kept: Tensor | None = getattr(q, "_memory", None)
    if kept is None:
        kept = _shared.get(id(q.codes))  # no other codes have that id: they live as long as a tensor that holds both
        if kept is None:
            with torch.inference_mode(False):  # so that it can be written to inside and outside of that mode
                kept = _shared[id(q.codes)] = q.decode_base()
        q._memory = kept
    return kept


def _data_ptr(self: QTensor) -> int:
    """Return the address of the decoded numbers, as they are now; they live as long as this tensor. 0 for a parameter."""
    values = decoded_memory(self)
    if values is None:
        return 0
    with torch.no_grad():  # each time: a step may have written to the codes
        values.copy_(self.decode_base())
    return values.data_ptr() + int(self.storage_offset()) * self.element_size()


def _storage(self: QTensor) -> Any:
    """Return the storage of the decoded numbers, whose address tells tied weights; raise RuntimeError for a parameter."""
    values = decoded_memory(self)
    if values is None:
        raise RuntimeError(
            "a packed parameter has codes, and no memory of floats that could be saved; save model.state_dict(), whose tensors "
            "decode themselves, or make floats of all with qlangevin.unpack(model)"
        )
    return values.untyped_storage()  # a typed one warns that it is deprecated when asked for its address


QTensor.data_ptr = _data_ptr  # type: ignore[method-assign, assignment]
QTensor.storage = _storage  # type: ignore[method-assign, assignment]
