"""Outputs that layers have rounded, remembered by their memory: their numbers need not be looked at.

An output is known by its storage and the version that autograd counts up at each write. A view of all of its elements, such
as a flattened one, is the same numbers. Writes through ``tensor.data`` and by kernels of others bypass the version: after one
a saved output would be encoded as if it were still on the grid.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .memory_order import memory_order

__all__ = ["Flags", "RoundedOutput"]

FLAGS_AT_ONCE = 64


class RoundedOutput(NamedTuple):
    """One output as it was when its layer returned it. It fills its memory without gaps."""

    key: tuple[Any, ...]  # by which its codes are found
    producer: Hashable  # its layer
    version: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, key: tuple[Any, ...], producer: Hashable) -> RoundedOutput:
        """Describe x."""
        return cls(key, producer, x._version, int(x.storage_offset()), x.shape, x.stride())

    def has_same_elements(self, t: Tensor) -> bool:
        """Return True if t, in the same storage, is this output or a view of all of it, and nothing was written since."""
        same = t._version == self.version and t.storage_offset() == self.offset and t.numel() == self.shape.numel()
        return same and memory_order(t) is not None

    def of_view(self, t: Tensor) -> Tensor:
        """Return the output, given a view of all of it."""
        return t.detach().as_strided(self.shape, self.stride)


class Flags:
    """Zeros on a device for kernels to set: many allocated at once, because each allocation is a launch.

    Each begins at a multiple of 16 bytes, as other tensors do: compilers of kernels make use of that.
    """

    def __init__(self) -> None:
        self._unused: dict[torch.device, list[Tensor]] = {}

    def take(self, device: torch.device) -> Tensor:
        """Return an int32 tensor of one element, a zero."""
        if not self._unused.get(device):
            rows = torch.zeros(FLAGS_AT_ONCE, 4, dtype=torch.int32, device=device)
            self._unused[device] = list(rows[:, :1].unbind(0))
        return self._unused[device].pop()
