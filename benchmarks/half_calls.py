"""Calls of the compiled module with bfloat16 and float16 tensors, for `benchmarks.kernel_fuzz`; see `kernel_calls`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from qlangevin import native
from qlangevin.quantization import rounding as plain
from qlangevin.quantization.formats import FP32, fit_dtype

from .kernel_calls import COMPUTED, REFUSED, ROUNDINGS, Case, attempt, expect, memory, raw_grid, spoil

HALVES = (torch.bfloat16, torch.float16)


def typed(t: Tensor) -> Any:
    """Return the memory of floating numbers with their type."""
    return (*memory(t), native.kernels.FLOAT_TYPES[str(t.dtype).removeprefix("torch.")])


def same(a: Tensor, b: Tensor) -> bool:
    """Return True for equal bits; a NaN equals a NaN."""
    return a.shape == b.shape and bool(((a.view(torch.int16) == b.view(torch.int16)) | (a.isnan() & b.isnan())).all())


def draw_case(rng: Random) -> tuple[Case, Tensor]:
    """Return a case whose format a half precision holds, and its numbers in that."""
    while True:
        case, dtype = Case.draw(rng), rng.choice(HALVES)
        try:
            format = fit_dtype(case.format, dtype)
        except ValueError:
            continue
        if format != FP32:
            x = (case.x * 2.0 ** rng.choice((0, 0, 0, -130, -20, 100))).to(dtype)
            return replace(case, format=format, x=x.float()), x


def half_call(rng: Random) -> str:
    """Call a kernel with half-precision tensors, one argument changed more often than not."""
    case, x = draw_case(rng)
    name = rng.choice(("quantize", "encode", "decode", "encode_exactly", "relu_with_codes", "first_not_finite", "sgld"))
    if name == "sgld":
        return _step(case, x, rng)
    codes, exponents = case.coded()
    out, kept, threads = torch.empty_like(x), (codes.clone(), exponents.clone()), rng.choice((1, 2))
    coded = {"codes": memory(codes), "exponents": memory(exponents), "code_bytes": codes.itemsize}
    shared: dict[str, Any] = {"numel": x.numel(), "grid": raw_grid(case.format, case.shape), "threads": threads}
    bits = {"seed": case.key.seed, "stream": case.key.stream, "step": case.key.step, "purpose": case.purpose}
    law = {"rounding": ROUNDINGS.index(case.rounding), "variance": case.variance, **bits}
    arguments: dict[str, Any] = {
        "quantize": {"x": typed(x), "out": typed(out), **law, **shared},
        "encode": {"values": typed(x), **coded, **shared},
        "decode": {"values": typed(out), **coded, **shared},
        "encode_exactly": {"values": typed(x), **coded, **shared},
        "relu_with_codes": {"x": typed(x), "out": typed(out), **coded, **shared},
        "first_not_finite": {"tensors": [typed(out.zero_()), typed(x)], "threads": threads},
    }[name]
    if (spoiled := rng.random() < 0.6) and name != "first_not_finite":
        spoil(arguments, rng)
    fine, result = attempt(partial(getattr(native.kernels, name), **arguments))
    if not fine:
        expect(spoiled, f"a sound {name} was refused: {result}")
        return REFUSED
    if spoiled:
        return COMPUTED
    expected = {
        "quantize": lambda: case.quantized(case.x),
        "decode": lambda: case.format.decode(kept[0].view(case.shape or 1), kept[1]).view(case.shape),
        "relu_with_codes": lambda: torch.where(case.x < 0, 0.0, case.x),
    }
    if name in expected:
        expect(same(out, expected[name]().to(x.dtype)), f"{name} of {case} differs")
    if name == "first_not_finite":
        expect(result == (-1 if bool(x.isfinite().all()) else 1), "it is not the first")
    return COMPUTED


def _step(case: Case, x: Tensor, rng: Random) -> str:
    """Step half-precision weights with gradients of any dtype."""
    gradient = torch.randn(case.shape).to(rng.choice((torch.float32, *HALVES)))
    theta = plain.nearest(case.x.nan_to_num(0.0, 1.0, -1.0), case.format).to(x.dtype)
    accumulator = theta.float() if rng.random() < 0.3 else None
    none = raw_grid(FP32, case.shape)
    arguments: dict[str, Any] = {
        "theta": typed(theta), "codes": None, "exponents": None, "code_bytes": 0, "accumulator": memory(accumulator),
        "gradient": typed(gradient), "numel": theta.numel(), "weights": raw_grid(case.format, case.shape), "gradients": none,
        "accumulators": none, "seed": case.key.seed, "stream": case.key.stream, "step": case.key.step,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "rounding": ROUNDINGS.index(case.rounding), "lr": 0.1, "weight_decay": 1e-3, "variance": case.variance,
        "maximize": False, "threads": rng.choice((1, 2)),
    }  # fmt: skip
    spoiled = rng.random() < 0.6
    if spoiled:
        spoil(rng.choice((arguments, settings)), rng)
    fine, error = attempt(lambda: native.kernels.sgld([native.kernels.Step(**arguments)], **settings))
    expect(fine or spoiled, f"a sound step was refused: {error}")
    if fine and not spoiled:
        expect(
            same(theta, plain.nearest(theta.float(), case.format).to(theta.dtype)),
            f"a step left the grid of {case.format}",
        )
    return COMPUTED if fine else REFUSED
