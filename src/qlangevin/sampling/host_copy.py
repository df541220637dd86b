"""Numbers that a device computes, on their way to the host: asked for without waiting, read when they have arrived."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dtensor import local
from ..quantization.qtensor import QTensor

__all__ = ["HostCopy", "has_no_numbers", "is_capturing"]

PLAIN = (Tensor, torch.nn.Parameter)


class HostCopy:
    """A copy of a small tensor in the host's memory; `ready` tells, without waiting, if it has arrived."""

    def __init__(self, source: Tensor) -> None:
        self._event: Any = None
        if source.is_cpu:
            self._values = source.clone()
            return
        self._values = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        self._values.copy_(source, non_blocking=True)
        self._event = torch.Event(source.device)
        self._event.record(torch.accelerator.current_stream(source.device))

    def ready(self) -> bool:
        """Return True if the numbers have arrived."""
        return self._event is None or bool(self._event.query())

    def numbers(self) -> list[Any]:
        """Return the numbers; wait for them if they have not arrived."""
        if self._event is not None:
            self._event.synchronize()
        found: list[Any] = self._values.tolist()
        return found


def is_capturing() -> bool:
    """Return True while a CUDA graph is captured: what is launched runs later, again and again."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def has_no_numbers(t: Tensor) -> bool:
    """Return True for a tensor that has a shape, a dtype and a device, but no memory: PyTorch's fake tensors."""
    if type(t) in PLAIN:  # the usual case, fast: this precedes every step of every tensor
        return False
    part = local(t)
    part = part.codes if isinstance(part, QTensor) else part
    return type(part) not in PLAIN and torch._subclasses.fake_tensor.is_fake(part)
