"""Layers that draw the same random bits, found out when one backward pass goes through both.

The bits of a layer follow from the seed, the stream and its name in the model that was lowered. Two parts of one network, each
lowered by a call of its own, have layers of the same name unless `lower` is told a prefix; so have copies of a lowered layer.
Neither call sees the whole network, but backward does. Models that are trained apart may share bits: to compare them, or to
repeat a run. Layers in different checkpointed regions with ``use_reentrant=True`` go undetected: each has a backward of its own.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["SharedBits"]


class SharedBits:
    """The layers that draw the bits of one seed and stream. It lives as long as one of them does."""

    _all: ClassVar[weakref.WeakValueDictionary[tuple[int, int], SharedBits]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.are_shared = False
        self.last = (-1, 0)  # the backward pass that was here last, and the id of the layer it came through

    @classmethod
    def claim(cls, seed: int, stream: int, layer: object) -> SharedBits:
        """Return the bits of a seed and stream, which one more layer draws."""
        bits = cls._all.setdefault((seed, stream), cls())
        bits.layers.add(layer)
        bits.are_shared = len(bits.layers) > 1
        return bits

    def watch(self, layer: object, name: str, output: Any) -> None:
        """Have the backward pass of these outputs raise RuntimeError if it passes another layer with the same bits."""
        if torch.compiler.is_compiling():
            return
        for t in tree_leaves(output):
            is_plain = isinstance(t, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(t)
            if is_plain and t.requires_grad:
                t.register_hook(BackwardHook(self, id(layer), name))


class BackwardHook:
    """Notes the backward pass that reaches a layer."""

    def __init__(self, bits: SharedBits, layer: int, name: str) -> None:
        self.bits, self.layer, self.name = bits, layer, name

    def __call__(self, error: Tensor) -> None:
        (backward, layer), now = self.bits.last, torch._C._current_graph_task_id()
        if backward == now and layer != self.layer:
            raise RuntimeError(
                f"two layers of this network draw the same random bits: both were lowered under the name {self.name!r}, with the "
                "same seed and stream. Lower the whole network, by one call or by several that choose layers= of it; or tell "
                "each part its name, lower(net.encoder, ..., prefix='encoder'); and copy layers before they are lowered, not "
                "after"
            )
        self.bits.last = (now, self.layer)
