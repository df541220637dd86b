"""Triton's interpreter: kernels run on CPU tensors, by NumPy, where there is no GPU. Slow, and exact to the bit.

The environment variable ``TRITON_INTERPRET=1`` chooses it for a process, before triton is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton

from ..quantization import backend

__all__ = ["is_interpreting", "on_cpu"]


def is_interpreting() -> bool:
    """Return True if this process interprets kernels."""
    return bool(triton.knobs.runtime.interpret)


@contextmanager
def on_cpu(kernels: backend.Kernels) -> Iterator[None]:
    """Make these the kernels of the CPU within a context, in all threads."""
    if not is_interpreting():
        raise RuntimeError(
            "kernels are compiled in this process; to interpret them on the CPU, set TRITON_INTERPRET=1 before triton is imported"
        )
    _speed_up()
    before = backend.unregister("cpu")
    backend.register("cpu", kernels)
    try:
        with np.errstate(all="ignore"):  # infinities and NaN are among what kernels compute with
            yield
    finally:
        backend.unregister("cpu")
        if before is not None:
            backend.register("cpu", before)


def _speed_up() -> None:
    """Have functions that a kernel calls not prepare the language anew, which takes most of the time.

    The launch of the kernel has prepared it for all modules that know it as `triton.language`; Triton's own modules do not, and
    what they prepare stays.
    """
    from triton.runtime import interpreter

    function: Any = interpreter.InterpretedFunction
    prepared: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in prepared:
            prepared.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    function.__call__ = call
