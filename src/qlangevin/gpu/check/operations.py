"""Cases for the quantizers and for codes, in all formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from ...quantization.formats import check_holds, parse
from ...quantization.operators import Rounding, corrected, quantize
from ...quantization.qtensor import encode
from ...quantization.random import Key
from .comparing import Case, Place

__all__ = ["DTYPES", "Shapes", "code_cases", "corrected_cases", "numbers", "quantize_cases"]

Shapes: TypeAlias = Sequence[tuple[int, ...]]

FORMATS = (
    *("bfp8", "fixed8.6", "bfp8/tensor", "bfp8/32", "fp8_e4m3"),
    *("bfp8e5", "e4m3", "fixed4.2", "fp8_e5m2", "fixed16.10", "bf16", "fp16"),  # the first is one that all dtypes hold
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VARIANCES = (0.0, 1e-6, 1e-4, 3e-2)  # below v_0 = Δ²/4 of most formats, and above


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return float32 numbers of many magnitudes: zeros, denormals and large ones in the first row, infinities and NaN below."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp2(torch.randint(-4, 3, shape, generator=generator).float())
    rows = x if x.dim() > 1 else x[None]
    special = torch.tensor([0.0, -0.0, 1e-42, -1e-42, 0.5, -0.5, 1.5, 60000.0, -60000.0])
    rows[0, : len(special)] = special
    if len(rows) > 2:
        rows[1, 3], rows[2, 5], rows[2, 6] = torch.nan, torch.inf, -torch.inf
    return x


def moderate_numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return `numbers` between -3 and 3."""
    return numbers(shape, seed).nan_to_num(1.0).clamp(-3, 3)


def quantize_cases(rounding: Rounding, shapes: Shapes) -> Iterator[Case]:
    """Yield Q^d or Q^s in all formats, dtypes and shapes."""
    for shape, format, dtype in product(shapes, FORMATS, DTYPES):
        if _can_hold(dtype, format):
            x = numbers(shape, 1).to(dtype)
            name = f"{format}, {str(dtype).removeprefix('torch.')}, shape {shape}"
            yield Case(name, partial(_quantize, x, format, rounding))


def _quantize(x: Tensor, format: str, rounding: Rounding, place: Place) -> list[Tensor]:
    return [quantize(x.to(place.device), format, rounding, Key(3, 1, 2))]


def _can_hold(dtype: torch.dtype, format: str) -> bool:
    try:
        check_holds(dtype, parse(format))
    except (TypeError, ValueError):
        return False
    return True


def corrected_cases(shapes: Shapes) -> Iterator[Case]:
    """Yield Q^vc in all formats, with one variance for all elements and with one for each."""
    for shape, format in product(shapes, FORMATS):
        x = moderate_numbers(shape, 2)
        for variance in VARIANCES:
            name = f"{format}, variance {variance:g}, shape {shape}"
            yield Case(name, partial(_correct, x, torch.tensor(variance), format))
        each = torch.rand(shape, generator=torch.Generator().manual_seed(5)) ** 4
        yield Case(f"{format}, a variance for each, shape {shape}", partial(_correct, x, each, format))


def _correct(x: Tensor, variance: Tensor, format: str, place: Place) -> list[Tensor]:
    return [corrected(x.to(place.device), variance.to(place.device), format, Key(4))]


def code_cases(shapes: Shapes) -> Iterator[Case]:
    """Yield codes, exponents and decoded numbers in all formats."""
    for shape, format in product(shapes, FORMATS):
        yield Case(f"{format}, shape {shape}", partial(_encode, moderate_numbers(shape, 6), format))


def _encode(x: Tensor, format: str, place: Place) -> list[Tensor]:
    q = encode(x.to(place.device), format, "stochastic", Key(8))
    return [q.codes, q.decode()] if q.exponents is None else [q.codes, q.exponents, q.decode()]
