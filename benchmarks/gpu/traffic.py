"""Bytes that a launch moves, from the addresses that its programs load and store in Triton's interpreter.

Memory moves in sectors of 32 bytes. What a launch touches again it finds in the cache: a program its own block, where
`roofline.fits_in_cache` says so; its neighbours the table of tensors, exponents, and sectors that they share. What another launch
has touched counts again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["Traffic", "trace"]

SECTOR = 32


class Traffic:
    """Sectors that each launch has read and written."""

    def __init__(self) -> None:
        self.read: defaultdict[int, set[int]] = defaultdict(set)
        self.written: defaultdict[int, set[int]] = defaultdict(set)
        self.launches = 0

    @property
    def bytes(self) -> int:
        return SECTOR * sum(len(sectors) for kind in (self.read, self.written) for sectors in kind.values())

    def note(self, kind: defaultdict[int, set[int]], addresses: Any, mask: Any) -> None:
        """Note that the present launch has touched these addresses where the mask is True."""
        at, inside = np.broadcast_arrays(addresses, mask)
        sectors = np.unique(at[inside.astype(bool)].astype(np.int64) // SECTOR)
        kind[self.launches].update(sectors.tolist())


@contextmanager
def trace() -> Iterator[Traffic]:
    """Note all that kernels load and store within this context, while the interpreter runs them."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    function: Any = interpreter.InterpretedFunction
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    run, traffic = function.run, Traffic()

    def noting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        traffic.note(traffic.read, pointers.data, mask.data)
        return load(self, pointers, mask, *rest)

    def noting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.note(traffic.written, pointers.data, mask.data)
        return store(self, pointers, value, mask, *rest)

    def noting_atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        for kind in (traffic.read, traffic.written):
            traffic.note(kind, pointers.data, mask.data)
        return atomic(self, operation, pointers, value, mask, *rest)

    def counting_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.launches += 1
        return run(self, *args, **kwargs)

    builder.create_masked_load, builder.create_masked_store = noting_load, noting_store
    builder.create_atomic_rmw, function.run = noting_atomic, counting_run
    try:
        yield traffic
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_atomic_rmw, function.run = atomic, run
