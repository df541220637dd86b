"""The number of a layer's run inside of CUDA graphs, which replay without the host: it has to be counted on the device.

A layer counts its runs in training on the host. From the first capture of its forward on it counts them here, in memory that was
allocated by a run before the capture: the graph adds 1 at each replay, and so does every run outside of a graph. With n runs
on the host before the capture and r here since then, the number of a run is n + r.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["GraphCount", "is_capturing"]


def is_capturing(x: Tensor) -> bool:
    """Return True if operations on x are now recorded into a CUDA graph instead of run."""
    return x.is_cuda and not isinstance(x, FakeTensor) and torch.cuda.is_current_stream_capturing()


class GraphCount:
    """Runs of a layer in training since its forward was first captured."""

    def __init__(self) -> None:
        self._runs: Tensor | None = None  # int64, on the device of the layer's output
        self.is_used = False

    def prepare(self, device: torch.device) -> None:
        """Allocate the memory, outside of a capture: a graph would set it back to zero at each replay."""
        if not self.is_used and (self._runs is None or self._runs.device != device):
            with torch.inference_mode(False):
                self._runs = torch.zeros((), dtype=torch.int64, device=device)

    def next_number(self, before: Tensor) -> Tensor:
        """Count a run; return its number, given those counted on the host, in memory that later runs leave as it is."""
        if self._runs is None:
            raise RuntimeError(
                "a lowered model was captured in a CUDA graph before its first run in training; run forward and backward once "
                "or more before the capture, as torch.cuda.graph asks for anyway"
            )
        self.is_used = True
        self._runs.add_(1)
        return self._runs + int(before)

    def total(self, before: Tensor) -> int:
        """Return the number of all runs, given those counted on the host. Waits for the device."""
        return int(before) + (int(self._runs) if self.is_used and self._runs is not None else 0)

    def load(self, total: int, before: Tensor) -> None:
        """Set the number of all runs: here, where graphs have it from, if there are any, else on the host."""
        if self.is_used and self._runs is not None:
            self._runs.fill_(total - int(before))  # graphs hold `before` as a constant
        else:
            before.fill_(total)
