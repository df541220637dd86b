"""The operations of `quantization` as Triton kernels for GPUs, bit for bit what `rounding` and `random` compute.

The first tensor on a GPU loads these kernels (see `quantization.backend`); each is compiled when it is first used. Without
Triton, which CUDA builds of PyTorch bring along, GPU tensors take the PyTorch path, and a warning says so once.

    generator        Philox4x32-7 and Box-Muller
    laws, elements   random rounding on the integers; formats in which every element stands alone
    means            numbers and their drifts, read from memory
    rows, blocks     blocks that share an exponent: passes over them, decisions
    block_draws, round_rows, codes
    kernels, launch  one tensor at a time
    step_kernels, tables, step   an SGLD step of many tensors
    kept, dynamics_kernels, dynamics   the same with a centre, a mask, a preconditioner or velocities

`python -m qlangevin.gpu.check` compares every kernel with the PyTorch path, on a GPU or in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .._warnings import warn
from ..quantization import backend

__all__ = ["interpreted", "missing"]

TRITON = (3, 7)  # the least version: before, compiled roots of denormals are wrong
SERVED = ("cuda", "xpu")  # types of devices that Triton compiles for; ROCm calls itself "cuda"


def missing() -> str | None:
    """Return why kernels cannot be had, and the remedy; None if they can."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed; pip install 'qlangevin[gpu]', or a CUDA build of PyTorch, which brings it"
    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < TRITON:
        return (
            f"Triton {triton.__version__} is too old; {TRITON[0]}.{TRITON[1]} or later is needed: pip install -U triton"
        )
    return None


def load(device_type: str) -> backend.Kernels | None:
    """Return the kernels of a type of device; None, with a warning, if it has none."""
    if device_type not in SERVED:
        why = f"Triton does not serve devices of the type {device_type!r}; move model and data to a CPU or a GPU for speed"
    elif (why := missing() or "") == "":
        from . import functions

        return functions.this_module
    warn(f"tensors on {device_type!r} take the PyTorch path, which is many times slower and has the same bits: {why}")
    return None


@contextmanager
def interpreted() -> Iterator[None]:
    """Make the Triton kernels those of the CPU within this context: Triton interprets them, slowly, exact to the bit.

    The environment variable ``TRITON_INTERPRET=1`` must have been set before triton was imported.
    """
    if (why := missing()) is not None:
        raise RuntimeError(why)
    from . import functions, interpreter

    with interpreter.on_cpu(functions.this_module):
        yield


backend.offer(load)
