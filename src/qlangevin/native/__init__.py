"""The operations of `quantization` as fused C++ kernels for the CPU, bit for bit what `rounding` and `random` compute.

`available` tells if the kernels were compiled; without them everything runs on the PyTorch path. `disabled()` turns them off
within a context, which is how the two paths are compared. The kernels compute in float32; tensors of bfloat16 and float16 are
widened and narrowed, a range at a time, and float64 tensors always take the PyTorch path.

The environment variable ``QLANGEVIN_KERNELS``, read when this module is imported, chooses kernels for the process: ``none`` for
the PyTorch path, or one of `levels`.

This module is the CPU's backend (see `quantization.backend`). Kernels see memory only; `memory` checks tensors before a call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, cast, get_args

import torch
from torch import Tensor

from .._warnings import warn
from ..quantization import backend
from ..quantization.backend import Dynamics, TensorStep
from ..quantization.formats import FP32, Format, KernelGrid, fit_dtype, parse
from ..quantization.operators import Rounding
from ..quantization.qtensor import QTensor
from ..quantization.random import Key
from .memory import FLOAT_TYPES, aligned, exponents_of, memory_if_any, memory_of, numbers_of, readable

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
deferred = False  # a call returns when its work is done
floats = frozenset(FLOAT_TYPES)
_ROUNDINGS = {name: number for number, name in enumerate(get_args(Rounding))}

if not available and _chosen != "none":
    warn(
        "qlangevin was installed without its compiled kernels: all results are the same, the PyTorch path is slower. "
        "Install a C++ compiler and reinstall to get them."
    )


def disabled() -> AbstractContextManager[None]:
    """Run everything on the PyTorch path within this context, as far as this thread does it.

    It holds for this thread, and for what inherits its `contextvars` (asyncio's tasks, `asyncio.to_thread`), until the
    context ends. Other threads keep their kernels: those of other users, those started within it, and the ones in which
    autograd runs the backward of other devices. A backward on the CPU runs in the thread that calls it. Contexts may overlap
    and end in any order. No result depends on any of this, as the paths agree to the bit.
    """
    return backend.suspended(_this_module)


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
    out: Tensor | None = None, positive: Tensor | None = None, move: Tensor | None = None, *, step: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return Q(x) of a contiguous tensor, or Q(x + move), written to ``out`` if given, which may be x itself.

    Where ``positive``, int8 codes, is zero or less, the result is zero. ``step`` takes the place of that of the key.
    """
    shape = x.shape
    x, source = readable(x, None)
    if out is None:
        out = torch.empty_like(x)
        target = (out.data_ptr(), *source[1:])
    else:
        target = numbers_of(out, shape)
    scalar = float(variance) if variance is not None and variance.dim() == 0 else 0.0
    variances = aligned(variance) if variance is not None and variance.dim() else None
    move = None if move is None else aligned(move)
    kernels.quantize(
        x=source, out=target, numel=x.numel(), grid=grid(format, shape),
        rounding=_number(rounding_), seed=key.seed, stream=key.stream, step=key.step if step is None else int(step),
        purpose=purpose, variance=scalar,
        variances=memory_if_any(variances, torch.float32, shape), positive=memory_if_any(positive, torch.int8, shape),
        move=memory_if_any(move, torch.float32, shape), threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def quantize_with_codes(
    x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, codes: tuple[Tensor, Tensor], *,
    spoiled: Tensor | None = None, step: Tensor | None = None,
) -> bool:  # fmt: skip
    """Round x in place and write codes and exponents of the result; return False if it holds a NaN, which has no code."""
    memory = numbers_of(x, None)
    has_codes = kernels.quantize(
        x=memory, out=memory, rounding=_number(rounding_), seed=key.seed, stream=key.stream,
        step=key.step if step is None else int(step), purpose=purpose, **_coded(*codes, format, x.shape),
    )  # fmt: skip
    return _note_nan(has_codes, spoiled)


def draw(key: Key, count: int, purpose: int, normal: bool) -> Tensor:
    """Return `random.normal` or `random.centered`, drawn by the kernels."""
    out = torch.empty(count, dtype=torch.float32)
    kernels.draw(
        out=memory_of(out, torch.float32, out.shape), numel=count, normal=normal, seed=key.seed, stream=key.stream,
        step=key.step, purpose=purpose, threads=torch.get_num_threads(),
    )  # fmt: skip
    return out


def encode(values: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> None:
    """Write codes and exponents of values on the grid. All contiguous, one code an element."""
    if format == FP32:
        codes.view(torch.float32).copy_(values)
        return
    values, source = readable(values, codes.shape)
    kernels.encode(values=source, **_coded(codes, exponents, format, codes.shape))


def decode(
    values: Tensor, codes: Tensor, exponents: Tensor | None, format: Format, *, spoiled: Tensor | None = None
) -> None:
    """Write the values that codes and exponents stand for; NaN if ``spoiled``. All contiguous, one code an element."""
    if spoiled is not None and bool(spoiled):
        values.fill_(torch.nan)
        return
    if format == FP32:
        values.copy_(codes.view(torch.float32))
        return
    codes = codes if codes.itemsize == 1 else aligned(codes)
    kernels.decode(values=numbers_of(values, codes.shape), **_coded(codes, exponents, format, codes.shape))


def relu_with_codes(
    x: Tensor, out: Tensor, codes: Tensor, exponents: Tensor, format: Format, *, spoiled: Tensor | None = None
) -> bool:
    """Write relu(x) to ``out``, which may be x, and its codes, for x on the grid; return False if it holds a NaN."""
    shape = codes.shape
    has_codes = kernels.relu_with_codes(
        x=numbers_of(x, shape), out=numbers_of(out, shape), **_coded(codes, exponents, format, shape)
    )
    return _note_nan(has_codes, spoiled)


def _note_nan(has_codes: bool, spoiled: Tensor | None) -> bool:
    """Write 1 to the flag, if one is given, of numbers that have no codes; return if they have."""
    if spoiled is not None and not has_codes:
        spoiled.fill_(1)
    return has_codes


def encode_exactly(values: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> bool:
    """Write codes and exponents of any values; return True if they decode to the same bits."""
    values, source = readable(values, codes.shape)
    return kernels.encode_exactly(values=source, **_coded(codes, exponents, format, codes.shape))


def first_not_finite(tensors: list[Tensor]) -> int:
    """Return the index of the first of these contiguous tensors that holds an infinity or a NaN, or -1."""
    try:
        return int(kernels.first_not_finite([numbers_of(t, None) for t in tensors], torch.get_num_threads()))
    except ValueError:
        copies = [readable(t, None) for t in tensors]
        return int(kernels.first_not_finite([memory for _, memory in copies], torch.get_num_threads()))


def sgld(
    tensors: Sequence[TensorStep], *, weights: Format | None, gradients: Format | None, accumulator: Format | None,
    rounding: str, lr: float, weight_decay: float, variance: float, maximize: bool, dynamics: Dynamics | None = None,
) -> None:  # fmt: skip
    """Take one step of several tensors in place, in one call; see `qlangevin.sampling.update` for the equations.

    Tensors are contiguous, numbers or codes with a byte or more for each; accumulators are float32. A QTensor has a format of its
    own in place of ``weights``.
    """
    steps = [_kernel_step(t, weights, gradients, accumulator) for t in tensors]
    if dynamics is not None:
        for t, step in zip(tensors, steps, strict=True):
            _add_beside(step, t, dynamics)
    kernels.sgld(
        steps,
        rounding=_number(rounding), lr=lr, weight_decay=weight_decay, variance=variance, maximize=maximize,
        threads=torch.get_num_threads(),
    )  # fmt: skip


def _kernel_step(
    t: TensorStep, weights: Format | None, gradients: Format | None, accumulator: Format | None
) -> kernels.Step:
    shape, theta, codes, exponents = t.gradient.shape, None, None, None
    if not isinstance(t.theta, QTensor):
        theta = t.theta
    elif t.theta.format == FP32:  # whose codes are the bits of floats
        theta, weights = t.theta.unpacked().view(torch.float32), FP32
    else:
        codes, exponents, weights = t.theta.unpacked(), t.theta.exponents, fit_dtype(t.theta.format, t.theta.dtype)
    return kernels.Step(
        theta=None if theta is None else numbers_of(theta, shape),
        codes=None if codes is None else memory_of(codes, codes.dtype, shape),  # `unpacked` has checked the dtype
        exponents=None if exponents is None else memory_of(exponents, torch.int8, None),
        code_bytes=0 if codes is None else codes.itemsize,
        accumulator=memory_if_any(t.accumulator, torch.float32, shape), gradient=numbers_of(t.gradient, None),
        numel=t.gradient.numel(), seed=t.key.seed, stream=t.key.stream, step=t.key.step,
        weights=grid(weights, shape), gradients=grid(gradients, shape), accumulators=grid(accumulator, shape),
    )  # fmt: skip


def _add_beside(step: kernels.Step, t: TensorStep, dynamics: Dynamics) -> None:
    """Hand over what a step has beside weights and gradient."""
    shape, rms = t.gradient.shape, dynamics.rms
    if t.center is not None:
        step.set_center(_kept(t.center, None, shape), pull=dynamics.pull)
    if t.mask is not None:
        step.set_mask(memory_of(t.mask, torch.uint8, None))
    if t.moments is not None and rms is not None:
        scale = float(t.moments.scale)
        step.set_moments(
            _kept(t.moments.values, parse(rms.format), shape), decay=rms.decay, fresh=1 - rms.decay, eps=rms.eps, scale=scale,
            unscale=1 / scale, frozen=rms.is_frozen(t.key.step),
        )  # fmt: skip
    if t.velocity is not None:
        name, key = dynamics.velocity_format(t.theta), t.velocity.key
        step.set_velocity(
            _kept(t.velocity.values, None if name is None else parse(name), shape), seed=key.seed, stream=key.stream,
            step=key.step, coefficients=list(dynamics.underdamped(t.velocity.unit)),
        )  # fmt: skip


def _kept(values: Tensor, format: Format | None, shape: torch.Size) -> tuple[Any, ...]:
    """Return numbers, codes, exponents, bytes of a code and grid of a tensor that a step keeps beside the weights."""
    if not isinstance(values, QTensor):
        return numbers_of(values, shape), None, None, 0, grid(format, shape)
    codes = values.unpacked()
    exponents = None if values.exponents is None else memory_of(values.exponents, torch.int8, None)
    return None, memory_of(codes, codes.dtype, shape), exponents, codes.itemsize, grid(values.format, shape)


def _coded(codes: Tensor, exponents: Tensor | None, format: Format, shape: torch.Size) -> dict[str, Any]:
    """Return what every kernel takes that reads or writes codes of a tensor."""
    return {
        "codes": memory_of(codes, format.code_dtype, shape), "exponents": exponents_of(exponents, format),
        "code_bytes": codes.itemsize,
        "numel": codes.numel(), "grid": grid(format, shape), "threads": torch.get_num_threads(),
    }  # fmt: skip


def _number(rounding: str) -> int:
    if rounding not in _ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(_ROUNDINGS)}, got {rounding!r}")
    return _ROUNDINGS[rounding]


_this_module = cast(backend.Kernels, sys.modules[__name__])
if _chosen not in ("", "none", *levels()):
    possible = f"none, {', '.join(levels())}" if available else "none, because the kernels were not compiled"
    raise ValueError(f"the environment variable {_VARIABLE} must be one of {possible}, got {_chosen!r}")
if available:
    if _chosen:
        use_level(_chosen)
    backend.register("cpu", _this_module)
