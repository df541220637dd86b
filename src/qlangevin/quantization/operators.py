"""The quantizers as PyTorch operators: for any device and dtype, opaque to `torch.compile`, straight-through for autograd.

An operator runs the kernels of its tensors' device, if there are any (see `backend`), else the PyTorch code of `rounding`.
It has to be opaque: the random generator written out as tensor operations takes a compiler minutes, and fused differently it
would no longer give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from .._validate import check_choice
from . import formats, random, rounding
from .backend import Kernels, kernels_for
from .code_memory import check_storage
from .formats import Format, parse
from .laws import Mean
from .random import Key

__all__ = ["Algorithm", "Rounding", "corrected", "quantize"]

Rounding: TypeAlias = Literal["nearest", "stochastic", "corrected"]
Algorithm: TypeAlias = Literal["exact", "paper"]

_library = torch.library.Library("qlangevin", "FRAGMENT")


def operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the operator ``qlangevin::name``, its body for every device.

    `torch.library.custom_op` does as much, but brings in the compiler at the first call (seconds) and doubles the cost of
    the others.
    """

    def register(body: Callable[..., Any]) -> Any:
        _library.define(name + torch.library.infer_schema(body, mutates_args=mutates), tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, body, "CompositeExplicitAutograd")
        return getattr(torch.ops.qlangevin, name).default

    return register


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the result of an operator for tensors that have a shape but no numbers."""
    return cast(Callable[..., Any], torch.library.register_fake(f"qlangevin::{name}", lib=_library))


def signed(x: int) -> int:
    """Return a 64-bit pattern as the signed integer that operators take."""
    return x - 2**64 if x >= 2**63 else x


def key_bits(key: Key) -> tuple[int, int, int]:
    """Return a key as the three integers that operators take."""
    if not isinstance(key, Key):
        raise TypeError(f"key must be a Key, such as Key(seed=0), got {type(key).__name__}")
    return signed(key.seed), signed(key.stream), signed(key.step)


def key_of(seed: int, stream: int, step: int) -> Key:
    """Return the key whose `key_bits` these are."""
    return Key(seed % 2**64, stream % 2**64, step % 2**64)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: half precisions are computed in float32, which holds them exactly."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def working_values(x: Tensor) -> Tensor:
    """Return x, contiguous and in its working dtype; raise ValueError if it would have to be read but has lost its memory."""
    if x.dtype is torch.float32 and x.is_contiguous():
        return x  # kernels check the memory themselves
    check_storage(x)
    return x.contiguous().to(working_dtype(x.dtype))


def kernel_values(x: Tensor) -> tuple[Tensor, Kernels | None]:
    """Return x as it is computed with, contiguous, and the kernels that take it, half precisions as they are if they can."""
    kernels = kernels_for(x)
    if kernels is None or x.dtype not in kernels.floats:
        values = working_values(x)
        return values, kernels if kernels is None or values is x else kernels_for(values)
    if not x.is_contiguous():
        check_storage(x)
        x = x.contiguous()
    return x, kernels  # which check the memory themselves


def check(x: Tensor, format: str) -> Format:
    """Return the parsed format, clipped to the range of x's dtype; raise if that cannot hold its numbers."""
    return formats.fit_dtype(parse(format), x.dtype)


@operator("quantize")
def quantize_op(x: Tensor, format: str, rounding_: str, seed: int, stream: int, step: int, purpose: int) -> Tensor:
    """Return Q^d(x) or Q^s(x); see `quantize`."""
    if rounding_ not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be nearest or stochastic, got {rounding_!r}")
    parsed, (values, kernels), key = check(x, format), kernel_values(x), key_of(seed, stream, step)
    if kernels is None:
        check_storage(values)
        return rounding.quantize_values(values, parsed, rounding_, key, purpose).to(x.dtype)
    return kernels.quantize(values, parsed, rounding_, key, purpose).to(x.dtype)


@operator("corrected")
def corrected_op(
    mu: Tensor, variance: Tensor, format: str, algorithm: str, seed: int, stream: int, step: int
) -> Tensor:
    """Return Q^vc(μ, v); see `corrected`."""
    parsed, dtype = check(mu, format), working_dtype(mu.dtype)
    v, (values, kernels) = check_variance(variance, mu, dtype), kernel_values(mu)
    key = key_of(seed, stream, step)
    if kernels is None or algorithm == "paper":
        values = working_values(values)
        check_storage(values)
        return rounding.corrected_values(values, v.to(mu.device), parsed, algorithm, key).to(mu.dtype)
    return kernels.quantize(values, parsed, "corrected", key, random.ROUNDING, v).to(mu.dtype)


def draw(mu: Mean, variance: Tensor, format: Format, key: Key, algorithm: Algorithm = "exact") -> Tensor:
    """Return Q^vc(μ, v), or Q^s(μ) for v = 0, of contiguous float32 or float64 tensors.

    Not an operator: code that a compiler traces must not call it.
    """
    kernels = kernels_for(mu.start) if mu.move is None else kernels_for(mu.start, mu.move)
    if format == formats.FP32 and not bool(variance.any()):
        return mu.total
    if kernels is None or algorithm == "paper":
        return rounding.corrected_values(mu, variance, format, algorithm, key)
    start, move = mu.start.contiguous(), None if mu.move is None else mu.move.contiguous()
    return kernels.quantize(start, format, "corrected", key, random.ROUNDING, variance, move=move)


def check_variance(variance: Tensor, mu: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the variance as the computation takes it. Reads the tensor, so it has to be called inside an operator.

    A number stays where it is: only a variance on a GPU makes the host wait for the GPU.
    """
    check_storage(variance)
    spread = variance.to(dtype)
    try:
        spread = spread.expand_as(mu).contiguous() if spread.dim() else spread
    except RuntimeError as error:
        raise ValueError(f"variance must be a number or broadcast to μ: {error}") from None
    if spread.dim() == 0:
        worst = None if 0 <= spread.item() < math.inf else variance.item()
    else:
        good = (spread >= 0) & spread.isfinite()
        worst = None if bool(good.all()) else spread[~good].flatten()[0].item()
    if worst is not None:
        raise ValueError(f"variance must be a finite {dtype} and not negative, got {worst}")
    return spread.to(mu.device) if spread.dim() else spread


@fake("quantize")
def _(x: Tensor, format: str, *_: Any) -> Tensor:
    check(x, format)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@fake("corrected")
def _(mu: Tensor, variance: Tensor, format: str, *_: Any) -> Tensor:
    check(mu, format)
    return torch.empty_like(mu, memory_format=torch.contiguous_format)


for _name in ("quantize", "corrected"):  # straight through to the first argument
    torch.library.register_autograd(f"qlangevin::{_name}", lambda ctx, grad: (grad, *[None] * 6), lib=_library)


def quantize(x: Tensor, format: str | Format, rounding: Rounding = "nearest", key: Key | None = None) -> Tensor:
    """Round x to the grid of a format; return a tensor of the same shape and dtype. Gradients pass straight through.

    Args:
        x: any floating tensor; infinities saturate, a NaN stays one (and spoils its block). Half precision clips the exponents
            of blocks to its range.
        format: a format or its name, such as ``"fixed8.3"``, ``"bfp8"``, ``"fp8_e4m3"``.
        rounding: ``"nearest"`` (Q^d, half away from zero) or ``"stochastic"`` (Q^s, unbiased).
        key: the random bits of stochastic rounding.
    """
    check_choice("rounding", rounding, ("nearest", "stochastic"))
    if key is None:
        if rounding == "stochastic":
            raise ValueError("stochastic rounding needs random bits: pass key=Key(seed)")
        key = Key(0)
    return cast(Tensor, quantize_op(x, str(format), rounding, *key_bits(key), random.ROUNDING))


def corrected(
    mu: Tensor, variance: float | Tensor, format: str | Format, key: Key, algorithm: Algorithm = "exact"
) -> Tensor:
    """Draw the paper's Q^vc: a random tensor on the grid with mean μ and the given variance, as far as the grid allows.

    Args:
        mu: any floating tensor.
        variance: a number, or a tensor that broadcasts to μ. Where it is below v_s, the variance of stochastic rounding,
            the result is stochastic rounding: no unbiased quantizer has less.
        format: a format or its name.
        key: the random bits.
        algorithm: ``"exact"`` settles the grid before the noise; ``"paper"`` is Algorithm 2 (fixed point) or 5 (block and
            floating point) as printed.
    """
    check_choice("algorithm", algorithm, ("exact", "paper"))
    if not isinstance(variance, Tensor):
        variance = torch.full((), variance, dtype=torch.float64)
    elif variance.dim():
        variance = variance.expand_as(mu)
    return cast(Tensor, corrected_op(mu, variance, str(format), algorithm, *key_bits(key)))
