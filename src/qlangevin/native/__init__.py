"""The same operations as fused C++ kernels for the CPU, bit for bit what `rounding` and `random` compute.

`available` says whether the kernels were compiled; without them everything runs on the PyTorch path. `disabled()` turns
them off for a while, which is how the two paths are compared. float64 tensors always take the PyTorch path: the kernels
compute in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..quantization import operators, random, rounding
from ..quantization.formats import FP32, BlockFloat, FixedPoint, Format
from ..quantization.random import Key

try:
    from . import _kernels as kernels
except ImportError:
    kernels = None  # type: ignore[assignment]

__all__ = ["available", "disabled", "level", "levels", "use_level"]

available: bool = kernels is not None
_enabled = available
_ROUNDINGS = {"nearest": 0, "stochastic": 1, "corrected": 2}

if not available:
    warnings.warn(
        "qlangevin was installed without its compiled kernels: all results are the same, the PyTorch path is slower. "
        "Install a C++ compiler and reinstall to get them.",
        stacklevel=2,
    )


@contextmanager
def disabled() -> Iterator[None]:
    """Within this context the PyTorch path does everything."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def enabled_for(*tensors: Tensor) -> bool:
    """Whether the kernels are on and can compute with these tensors: on the CPU, not float64."""
    if _enabled:
        for t in tensors:
            if not t.is_cpu or t.dtype == torch.float64:
                return False
    return _enabled


def levels() -> list[str]:
    """The instruction sets the kernels were compiled for that this machine has, best last."""
    return list(kernels.levels()) if available else []


def level() -> str:
    """The instruction set in use."""
    return str(kernels.level()) if available else "none"


def use_level(name: str) -> None:
    """Use another instruction set; results do not change."""
    if name not in levels():
        raise ValueError(f"level must be one of {', '.join(levels()) or 'none'}, got {name!r}")
    kernels.use_level(name)


@lru_cache(maxsize=4096)
def grid(format: Format | None, shape: torch.Size) -> kernels.Grid:
    """A format as the numbers the kernels take, for tensors of one shape."""
    if format is None or format == FP32:
        return kernels.Grid(0, 0, 0, 0, 0.0, 0.0, 0.0, 1, 1)
    if isinstance(format, FixedPoint):
        return kernels.Grid(1, 0, -format.frac, -format.frac, 0.0, format.low, format.high, 1, 1)
    if isinstance(format, BlockFloat):
        kind, shift, layout = 2, format.bits - 2, format.layout(shape)
    else:
        kind, shift, layout = 3, format.man, (1, 1)
    limits = (format.min_gap_exponent, format.max_gap_exponent)
    return kernels.Grid(kind, shift, *limits, format.top, format.low, format.high, *layout)


def _quantize_values(x: Tensor, format: Format, rounding_: str, key: Key, purpose: int) -> Tensor:
    compute = run if enabled_for(x) else rounding.quantize_values
    return compute(x, format, rounding_, key, purpose)


def _corrected_values(mu: Tensor, v: Tensor, format: Format, algorithm: str, key: Key) -> Tensor:
    if algorithm == "paper" or not enabled_for(mu):
        return rounding.corrected_values(mu, v, format, algorithm, key)
    return run(mu, format, "corrected", key, random.ROUNDING, v)


def run(
    x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, variance: Tensor | None = None,
    out: Tensor | None = None, positive: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One call of the quantize kernel on a contiguous float32 tensor; ``out`` may be x itself.

    Where ``positive``, int8 codes, is zero or less, the result is zero.
    """
    out = torch.empty_like(x) if out is None else out
    _require(torch.float32, x.shape, x, out, *([variance] if variance is not None and variance.dim() else []))
    _require(torch.int8, x.shape, positive)
    scalar = float(variance) if variance is not None and variance.dim() == 0 else 0.0
    each = variance.data_ptr() if variance is not None and variance.dim() else 0
    kernels.quantize(
        x.data_ptr(), out.data_ptr(), x.numel(), grid(format, x.shape), _ROUNDINGS[rounding_],
        key.seed, key.stream, key.step, purpose, scalar, each, _address(positive), 0, 0, 0, torch.get_num_threads(),
    )  # fmt: skip
    return out


def run_coded(x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, codes: tuple[Tensor, Tensor]) -> bool:
    """The same in place, with codes and exponents of the result; False if it holds a NaN, which has no code."""
    _require(torch.float32, codes[0].shape, x)
    where = (x.data_ptr(), x.data_ptr(), x.numel(), grid(format, x.shape), _ROUNDINGS[rounding_])
    bits = (key.seed, key.stream, key.step, purpose)
    parts = (codes[0].data_ptr(), codes[1].data_ptr(), codes[0].itemsize)
    return bool(kernels.quantize(*where, *bits, 0.0, 0, 0, *parts, torch.get_num_threads()))


def draw(key: Key, count: int, purpose: int, normal: bool) -> Tensor:
    """`random.uniform` or `random.normal` from the kernels."""
    out = torch.empty(count, dtype=torch.float32)
    bits = (key.seed, key.stream, key.step)
    kernels.draw(out.data_ptr(), count, normal, *bits, purpose, torch.get_num_threads())
    return out


def recode(values: Tensor, codes: Tensor, exponents: Tensor | None, format: Format, encode: bool) -> None:
    """Values to codes and exponents, or back: fills the one from the other. All contiguous, one code an element."""
    if format == FP32:
        target, origin = (codes.view(torch.float32), values) if encode else (values, codes.view(torch.float32))
        target.copy_(origin)
        return
    where = (values.data_ptr(), codes.data_ptr(), _address(exponents))
    threads = torch.get_num_threads()
    kernels.recode(*where, codes.itemsize, codes.numel(), grid(format, codes.shape), encode, threads)


def rectify(x: Tensor, out: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> bool:
    """out = relu(x), for x on the grid, and its codes; False if it holds a NaN. ``out`` may be x itself."""
    _require(torch.float32, codes.shape, x, out)
    where = (x.data_ptr(), out.data_ptr(), codes.data_ptr(), exponents.data_ptr())
    threads = torch.get_num_threads()
    return bool(kernels.rectify(*where, codes.itemsize, codes.numel(), grid(format, codes.shape), threads))


def encode_exactly(values: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> bool:
    """`recode` to codes, of any numbers: whether they decode to the same bits."""
    _require(torch.float32, codes.shape, values)
    where = (values.data_ptr(), codes.data_ptr(), exponents.data_ptr())
    return bool(
        kernels.encode_exactly(
            *where, codes.itemsize, codes.numel(), grid(format, codes.shape), torch.get_num_threads()
        )
    )


def first_not_finite(tensors: list[Tensor]) -> int:
    """The index of the first of these contiguous float32 tensors that holds an infinity or a NaN, or -1."""
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
    shape, packed = t.gradient.shape, cast(Any, t.theta if hasattr(t.theta, "codes") else None)
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
    """The kernels see addresses only: what they would misread stops here."""
    for t in tensors:
        if t is not None and (t.dtype != dtype or t.shape != shape or not t.is_contiguous() or t.device.type != "cpu"):
            raise ValueError(
                f"the kernels need a contiguous {dtype} tensor of shape {tuple(shape)} on the CPU, "
                f"got {t.dtype}, {tuple(t.shape)}, strides {t.stride()}, {t.device}"
            )


def _address(tensor: Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0


if available:
    operators.on_cpu("quantize", partial(operators.quantize_by, _quantize_values))
    operators.on_cpu("corrected", partial(operators.corrected_by, _corrected_values))
