"""The operations of `quantization` as fused C++ kernels for the CPU, bit for bit what `rounding` and `random` compute.

`available` tells if the kernels were compiled; without them everything runs on the PyTorch path. `disabled()` turns them off
within a context, which is how the two paths are compared. float64 tensors always take the PyTorch path: the kernels compute
in float32.

The environment variable ``QLANGEVIN_KERNELS``, read when this module is imported, chooses kernels for the process: ``none`` for
the PyTorch path, or one of `levels`.

This module is the CPU's backend (see `quantization.backend`). It checks tensors, since the kernels see addresses only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple, cast, get_args

import torch
from torch import Tensor

from .._warnings import warn
from ..quantization import backend
from ..quantization.formats import FP32, Format, KernelGrid
from ..quantization.operators import Rounding
from ..quantization.qtensor import QTensor
from ..quantization.random import Key

try:
    from . import _kernels as kernels
except ImportError:
    kernels = None  # type: ignore[assignment]

_VARIABLE = "QLANGEVIN_KERNELS"
_chosen = os.environ.get(_VARIABLE, "")
if _chosen == "none":
    kernels = None  # type: ignore[assignment]

__all__ = ["available", "disabled", "level", "levels", "use_level"]

available: bool = kernels is not None
_ROUNDINGS = {name: number for number, name in enumerate(get_args(Rounding))}

if not available and _chosen != "none":
    warn(
        "qlangevin was installed without its compiled kernels: all results are the same, the PyTorch path is slower. "
        "Install a C++ compiler and reinstall to get them."
    )


@contextmanager
def disabled() -> Iterator[None]:
    """Run everything on the PyTorch path within this context."""
    registered = backend.unregister("cpu")
    try:
        yield
    finally:
        if registered is not None:
            backend.register("cpu", registered)


def enabled_for(*tensors: Tensor) -> bool:
    """Return True if the kernels are on and can compute with these tensors: on the CPU, not float64."""
    return backend.kernels_for(*tensors) is _this_module


def levels() -> list[str]:
    """Return the instruction sets that the kernels were compiled for and this machine has, best last."""
    return list(kernels.levels()) if available else []


def level() -> str:
    """Return the instruction set in use."""
    return str(kernels.level()) if available else "none"


def use_level(name: str) -> None:
    """Use another instruction set; results do not change."""
    if name not in levels():
        raise ValueError(f"level must be one of {', '.join(levels()) or 'none'}, got {name!r}")
    kernels.use_level(name)


@lru_cache(maxsize=4096)
def grid(format: Format | None, shape: torch.Size) -> kernels.Grid:
    """Return the grid of a format, for tensors of one shape, as the kernels take it."""
    return kernels.Grid(**(KernelGrid() if format is None else format.kernel_grid(shape))._asdict())


def quantize(
    x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, variance: Tensor | None = None,
    out: Tensor | None = None, positive: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return Q(x) of a contiguous float32 tensor, written to ``out`` if given, which may be x itself.

    Where ``positive``, int8 codes, is zero or less, the result is zero.
    """
    out = torch.empty_like(x) if out is None else out
    scalar = float(variance) if variance is not None and variance.dim() == 0 else 0.0
    variances = variance if variance is not None and variance.dim() else None
    _require(torch.float32, x.shape, x, out, variances)
    _require(torch.int8, x.shape, positive)
    kernels.quantize(
        x=x.data_ptr(), out=out.data_ptr(), numel=x.numel(), grid=grid(format, x.shape), rounding=_ROUNDINGS[rounding_],
        seed=key.seed, stream=key.stream, step=key.step, purpose=purpose, variance=scalar, variances=_address(variances),
        positive=_address(positive), threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def quantize_with_codes(
    x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, codes: tuple[Tensor, Tensor]
) -> bool:
    """Round x in place and write codes and exponents of the result; return False if it holds a NaN, which has no code."""
    integers, exponents = codes
    _require(torch.float32, integers.shape, x)
    address = x.data_ptr()
    return kernels.quantize(
        x=address, out=address, numel=x.numel(), grid=grid(format, x.shape), rounding=_ROUNDINGS[rounding_],
        seed=key.seed, stream=key.stream, step=key.step, purpose=purpose, codes=integers.data_ptr(),
        exponents=exponents.data_ptr(), code_bytes=integers.itemsize, threads=torch.get_num_threads(),
    )  # fmt: skip


def draw(key: Key, count: int, purpose: int, normal: bool) -> Tensor:
    """Return `random.normal` or `random.uniform`, drawn by the kernels."""
    out = torch.empty(count, dtype=torch.float32)
    kernels.draw(
        out=out.data_ptr(), numel=count, normal=normal, seed=key.seed, stream=key.stream, step=key.step, purpose=purpose,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def encode(values: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> None:
    """Write codes and exponents of values on the grid. All contiguous, one code an element."""
    if format == FP32:
        codes.view(torch.float32).copy_(values)
        return
    kernels.encode(
        values=values.data_ptr(), codes=codes.data_ptr(), exponents=exponents.data_ptr(), code_bytes=codes.itemsize,
        numel=codes.numel(), grid=grid(format, codes.shape), threads=torch.get_num_threads(),
    )  # fmt: skip


def decode(values: Tensor, codes: Tensor, exponents: Tensor | None, format: Format) -> None:
    """Write the values that codes and exponents stand for. All contiguous, one code an element."""
    if format == FP32:
        values.copy_(codes.view(torch.float32))
        return
    kernels.decode(
        values=values.data_ptr(), codes=codes.data_ptr(), exponents=_address(exponents), code_bytes=codes.itemsize,
        numel=codes.numel(), grid=grid(format, codes.shape), threads=torch.get_num_threads(),
    )  # fmt: skip


def relu_with_codes(x: Tensor, out: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> bool:
    """Write relu(x) to ``out``, which may be x, and its codes, for x on the grid; return False if it holds a NaN."""
    _require(torch.float32, codes.shape, x, out)
    return kernels.relu_with_codes(
        x=x.data_ptr(), out=out.data_ptr(), codes=codes.data_ptr(), exponents=exponents.data_ptr(),
        code_bytes=codes.itemsize, numel=codes.numel(), grid=grid(format, codes.shape), threads=torch.get_num_threads(),
    )  # fmt: skip


def encode_exactly(values: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> bool:
    """Write codes and exponents of any values; return True if they decode to the same bits."""
    _require(torch.float32, codes.shape, values)
    return kernels.encode_exactly(
        values=values.data_ptr(), codes=codes.data_ptr(), exponents=exponents.data_ptr(), code_bytes=codes.itemsize,
        numel=codes.numel(), grid=grid(format, codes.shape), threads=torch.get_num_threads(),
    )  # fmt: skip


def first_not_finite(tensors: list[Tensor]) -> int:
    """Return the index of the first of these contiguous float32 tensors that holds an infinity or a NaN, or -1."""
    addresses, numels = [t.data_ptr() for t in tensors], [t.numel() for t in tensors]
    return int(kernels.first_not_finite(addresses, numels, torch.get_num_threads()))


class TensorStep(NamedTuple):
    """One tensor of a step: all that the step reads and writes of it, on either path. What is optional comes last."""

    theta: Tensor  # numbers, or a QTensor
    gradient: Tensor
    key: Key
    accumulator: Tensor | None = None  # takes the update in theta's place; then theta = Q_W(accumulator)


def sgld(
    tensors: Sequence[TensorStep], *, weights: Format | None, gradients: Format | None, accumulator: Format | None,
    rounding: str, lr: float, weight_decay: float, variance: float, maximize: bool,
) -> None:  # fmt: skip
    """Take one SGLD step of several tensors in place, in one call; see `qlangevin.sampling.step` for the equation.

    Tensors are contiguous and float32, or codes with a byte or more for each; a QTensor has a format of its own in place of
    ``weights``.
    """
    kernels.sgld(
        [_kernel_step(t, weights, gradients, accumulator) for t in tensors],
        rounding=_ROUNDINGS[rounding], lr=lr, weight_decay=weight_decay, variance=variance, maximize=maximize,
        threads=torch.get_num_threads(),
    )  # fmt: skip


def _kernel_step(
    t: TensorStep, weights: Format | None, gradients: Format | None, accumulator: Format | None
) -> kernels.Step:
    shape, packed = t.gradient.shape, t.theta if isinstance(t.theta, QTensor) else None
    theta, codes, exponents = (t.theta, None, None) if packed is None else (None, packed.unpacked(), packed.exponents)
    _require(torch.float32, shape, theta, t.accumulator, t.gradient)
    if codes is not None:
        _require(codes.dtype, shape, codes)
    return kernels.Step(
        theta=_address(theta), codes=_address(codes), exponents=_address(exponents),
        code_bytes=0 if codes is None else codes.itemsize, accumulator=_address(t.accumulator),
        gradient=t.gradient.data_ptr(), numel=t.gradient.numel(), seed=t.key.seed, stream=t.key.stream, step=t.key.step,
        weights=grid(weights if packed is None else packed.format, shape), gradients=grid(gradients, shape),
        accumulators=grid(accumulator, shape),
    )  # fmt: skip


def _require(dtype: torch.dtype, shape: torch.Size, *tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor that the kernels, which see its address only, would misread."""
    for t in tensors:
        if t is not None and (t.dtype != dtype or t.shape != shape or not t.is_contiguous() or t.device.type != "cpu"):
            raise ValueError(
                f"the kernels need a contiguous {dtype} tensor of shape {tuple(shape)} on the CPU, "
                f"got {t.dtype}, {tuple(t.shape)}, strides {t.stride()}, {t.device}"
            )


def _address(tensor: Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0


_this_module = cast(backend.Kernels, sys.modules[__name__])
if _chosen not in ("", "none", *levels()):
    possible = f"none, {', '.join(levels())}" if available else "none, because the kernels were not compiled"
    raise ValueError(f"the environment variable {_VARIABLE} must be one of {possible}, got {_chosen!r}")
if available:
    if _chosen:
        use_level(_chosen)
    backend.register("cpu", _this_module)
