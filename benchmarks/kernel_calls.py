"""Random and adversarial calls of the kernels, for `benchmarks.kernel_fuzz`: through the compiled module itself, through
`qlangevin.native`, through PyTorch's operators, and through QTensors whose memory is changed.

A call that is refused raises ValueError or TypeError, or RuntimeError if the memory of codes was freed. A call that is not
refused must compute what the PyTorch path computes of the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from qlangevin import native
from qlangevin.quantization import random as bits
from qlangevin.quantization import rounding as plain
from qlangevin.quantization.code_memory import FREED
from qlangevin.quantization.formats import FP32, BlockFloat, Format, parse
from qlangevin.quantization.laws import Mean
from qlangevin.quantization.random import Key

REFUSED, COMPUTED = "refused", "computed"
NAMES = (
    "fixed8.3", "fixed4.1", "fixed16.12", "fixed25.20", "fixed8.126", "bfp8", "bfp8/tensor", "bfp8/32", "bfp8/7", "bfp4",
    "bfp2", "bfp16", "bfp24e7", "bfp8e3", "e4m3", "e8m1", "e3m0", "e8m21", "fp8_e4m3", "bf16", "fp16", "fp32",
)  # fmt: skip
SHAPES = ((), (0,), (3, 0), (1,), (5,), (3, 5), (2, 3, 4), (64,), (7, 33), (6, 32), (3, 257), (2, 3, 7))
ROUNDINGS = ("nearest", "stochastic", "corrected")
INTEGERS = (
    -(2**63),
    -(2**31),
    -5,
    -1,
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    9,
    64,
    255,
    1000,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    2**64,
    2**70,
)
GARBAGE: tuple[Any, ...] = (
    "x",
    1.5,
    (1,),
    (1, 2, 3),
    (-1, 4),
    (2**70, 4),
    (0, 2**70),
    [0, 0],
    (None, 4),
    b"",
    object(),
)


class WrongError(Exception):
    """A call that did neither."""


def attempt(call: Callable[[], Any]) -> tuple[bool, Any]:
    """Return (True, result), or (False, the error) of a call that was refused; what is neither is raised."""
    try:
        return True, call()
    except (ValueError, TypeError) as error:
        if not str(error):
            raise WrongError("refused without a word") from error
        return False, error
    except RuntimeError as error:
        if str(error) != FREED:
            raise
        return False, error


def expect(good: bool, message: str) -> None:
    if not good:
        raise WrongError(message)


def same(a: Tensor, b: Tensor) -> bool:
    """Return True for equal bits; a NaN equals a NaN."""
    return a.shape == b.shape and bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


@dataclass(frozen=True)
class Case:
    """A tensor, a format and random bits."""

    format: Format
    shape: torch.Size
    x: Tensor
    key: Key
    rounding: str
    purpose: int
    variance: float

    @classmethod
    def draw(cls, rng: Random) -> Case:
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        shape = torch.Size(rng.choice(SHAPES))
        x = torch.randn(shape, generator=generator) * 10.0 ** rng.uniform(-5, 5)
        if x.numel() and rng.random() < 0.1:
            x.view(-1)[rng.randrange(x.numel())] = rng.choice((math.inf, -math.inf, math.nan, 3e38, 1e-45))
        key = Key(rng.getrandbits(64), rng.getrandbits(64), rng.getrandbits(40))
        purpose = rng.choice((bits.ROUNDING, bits.GRADIENT, bits.WEIGHT, bits.ACTIVATION, bits.ERROR))
        variance = rng.choice((0.0, 1e-6, 1e-3, 1.0, 1e6))
        return cls(parse(rng.choice(NAMES)), shape, x, key, rng.choice(ROUNDINGS), purpose, variance)

    def quantized(
        self, x: Tensor, format: Format | None = None, variances: Tensor | None = None, move: Tensor | None = None
    ) -> Tensor:
        """Return what the PyTorch path makes of x, or of x + move."""
        format = format or self.format
        if self.rounding == "corrected":
            v = torch.tensor(self.variance) if variances is None else variances
            return plain.corrected_values(Mean(x, move), v, format, "exact", self.key)
        if move is None:
            return plain.quantize_values(x, format, self.rounding, self.key, self.purpose)
        return x + move if format == FP32 else plain.stochastic(Mean(x, move), format, self.key, self.purpose)

    def coded(self) -> tuple[Tensor, Tensor]:
        """Return codes, one an element, and exponents; a few are those of no number."""
        x = self.x.nan_to_num(0.0, 1.0, -1.0)
        codes, exponents = self.format.encode(
            (x if self.format == FP32 else plain.nearest(x, self.format)).view(-1 if not x.dim() else x.shape)
        )
        return codes.view(self.shape), exponents


def randomize_codes(codes: Tensor, exponents: Tensor, rng: Random) -> None:
    """Replace codes and exponents by any bits."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    for t in (codes, exponents):
        t.view(-1).view(torch.uint8).random_(0, 256, generator=generator)
    exponents[:1] = rng.choice((-128, 127))


# ---- the compiled module


def memory(t: Tensor | None) -> Any:
    return None if t is None else (t.data_ptr(), t.nbytes)


def raw_grid(format: Format, shape: torch.Size) -> Any:
    return native.kernels.Grid(**format.kernel_grid(shape)._asdict())


def spoil(arguments: dict[str, Any], rng: Random) -> str:
    """Change an argument to one that does not fit. Lengths never exceed the memory that is there: no kernel could tell."""
    name = rng.choice(list(arguments))
    value = arguments[name]
    if isinstance(value, tuple) or value is None:
        given = (0, 0) if value is None or not all(type(n) is int for n in value) else value
        address, size = given[:2] if len(given) in (2, 3) else (0, 0)
        cut = rng.choice((1, 2, 4, 8)) if address and size > 8 else 0
        honest = (
            (address, size - cut),
            (address + cut, size - cut),
            (address, 0),
            (0, size),
            (0, 0),
            (address, -size),
            (address, 2**61 + 1),
            (address, size, rng.choice((-1, 0, 1, 2, 3))),
        )
        arguments[name] = rng.choice((None, rng.choice(GARBAGE), *honest))
    elif isinstance(value, float):
        arguments[name] = rng.choice((math.nan, math.inf, -1.0, 1e39, "x", None, 3.0))
    elif isinstance(value, bool):
        arguments[name] = rng.choice((2, None, "x"))
    elif isinstance(value, int):
        arguments[name] = rng.choice((*INTEGERS, value + 1, value - 1, 2 * value, "x", None))
    else:  # a grid
        other = Case.draw(rng)
        arguments[name] = rng.choice((None, 0, raw_grid(other.format, other.shape), raw_grid(FP32, other.shape)))
    return name


def as_gridded(format: Format, shape: torch.Size, numel: int) -> tuple[Format, torch.Size]:
    """Return format and shape of a tensor of so many elements on the grid of another shape."""
    if not isinstance(format, BlockFloat):
        return format, torch.Size((numel,))
    line, size = format.layout(shape)
    return replace(format, block="row" if size == line else size), torch.Size((numel // line, line))


def raw_quantize(rng: Random) -> str:
    case, threads = Case.draw(rng), rng.choice((1, 2, 3))
    out, before = torch.full(case.shape, 7.0), case.x.clone()
    variances = torch.rand(case.shape) * case.variance if rng.random() < 0.3 and case.rounding == "corrected" else None
    codes, exponents = case.coded() if rng.random() < 0.4 and case.format != FP32 else (None, None)
    has_move = rng.random() < 0.3 and case.rounding != "nearest"
    move = torch.randn(case.shape) * 10.0 ** rng.uniform(-9, 5) if has_move else None
    other = Case.draw(rng)
    format, shape = (case.format, case.shape) if rng.random() < 0.7 else (other.format, other.shape)
    arguments: dict[str, Any] = {
        "x": memory(case.x), "out": memory(out), "numel": case.x.numel(), "grid": raw_grid(format, shape),
        "rounding": ROUNDINGS.index(case.rounding), "seed": case.key.seed, "stream": case.key.stream, "step": case.key.step,
        "purpose": case.purpose, "variance": case.variance, "variances": memory(variances), "move": memory(move),
        "codes": memory(codes), "exponents": memory(exponents), "code_bytes": codes.itemsize if codes is not None else 0,
        "threads": threads,
    }  # fmt: skip
    spoiled = rng.random() < 0.6
    if spoiled:
        spoil(arguments, rng)
    fine, _ = attempt(partial(native.kernels.quantize, **arguments))
    if not fine:
        expect(spoiled or shape != case.shape or format != case.format, "a sound call was refused")
        return REFUSED
    if not spoiled:
        gridded = as_gridded(format, shape, before.numel())
        v = None if variances is None else variances.view(gridded[1])
        by = None if move is None else move.view(gridded[1])
        expect(
            same(out.view(gridded[1]), case.quantized(before.view(gridded[1]), gridded[0], v, by)), f"{case} differs"
        )
    return COMPUTED


def raw_codes(rng: Random) -> str:
    """Call decode, encode, encode_exactly or relu_with_codes."""
    case, name = Case.draw(rng), rng.choice(("decode", "encode", "encode_exactly", "relu_with_codes"))
    codes, exponents = case.coded()
    wild = rng.random() < 0.3
    if wild:
        randomize_codes(codes, exponents, rng)
    other = Case.draw(rng)
    format, shape = (case.format, case.shape) if rng.random() < 0.7 else (other.format, other.shape)
    values, kept = case.x.clone(), (codes.clone(), exponents.clone())
    arguments: dict[str, Any] = {
        "values": memory(values), "codes": memory(codes), "exponents": memory(exponents), "code_bytes": codes.itemsize,
        "numel": codes.numel(), "grid": raw_grid(format, shape), "threads": rng.choice((1, 2)),
    }  # fmt: skip
    if name == "relu_with_codes":
        arguments = {"x": memory(case.x), "out": arguments.pop("values")} | arguments
    spoiled = rng.random() < 0.6
    if spoiled:
        spoil(arguments, rng)
    fine, _ = attempt(partial(getattr(native.kernels, name), **arguments))
    if not fine:
        expect(
            spoiled or shape != case.shape or format != case.format or case.format == FP32, "a sound call was refused"
        )
        return REFUSED
    if name == "decode" and not spoiled and codes.dtype == format.code_dtype:
        like, size = as_gridded(format, shape, codes.numel())
        expected = like.decode(kept[0].view(size), kept[1])
        expect(same(values.view(size), expected), f"{like} {size} decodes differently")
    return COMPUTED


def raw_step(rng: Random) -> str:
    case = Case.draw(rng)
    gradient, theta = torch.randn(case.shape), case.x.nan_to_num(0.0, 1.0, -1.0)
    accumulator = theta.clone() if rng.random() < 0.3 else None
    codes, exponents = case.coded() if rng.random() < 0.5 and case.format != FP32 else (None, None)
    if codes is not None and exponents is not None and rng.random() < 0.3:
        randomize_codes(codes, exponents, rng)
    grids = {n: raw_grid(parse(rng.choice(NAMES)), case.shape) for n in ("gradients", "accumulators")}
    arguments: dict[str, Any] = {
        "theta": memory(theta) if codes is None else None, "codes": memory(codes), "exponents": memory(exponents),
        "code_bytes": 0 if codes is None else codes.itemsize, "accumulator": memory(accumulator),
        "gradient": memory(gradient), "numel": theta.numel(), "weights": raw_grid(case.format, case.shape), **grids,
        "seed": case.key.seed, "stream": case.key.stream, "step": case.key.step,
    }  # fmt: skip
    settings: dict[str, Any] = {
        "rounding": ROUNDINGS.index(case.rounding), "lr": 0.1, "weight_decay": 1e-3, "variance": case.variance,
        "maximize": rng.random() < 0.5, "threads": rng.choice((1, 2)),
    }  # fmt: skip
    spoiled = rng.random() < 0.6
    if spoiled:
        spoil(rng.choice((arguments, settings)), rng)
    beside = [draw_beside(name, case, rng) for name in ("center", "moments", "velocity") if rng.random() < 0.3]
    bits = torch.full((-(-theta.numel() // 8),), 0x5A, dtype=torch.uint8)
    mask = {"mask": memory(bits)}
    if spoiled:
        spoil(rng.choice([kept for _, kept, _, _ in beside] or [mask]), rng)
    masked = rng.random() < 0.3

    def step() -> None:
        made = native.kernels.Step(**arguments)
        for name, kept, numbers, _ in beside:
            getattr(made, f"set_{name}")(tuple(kept.values()), **numbers)
        if masked:
            made.set_mask(mask["mask"])
        native.kernels.sgld([made], **settings)

    fine, error = attempt(step)
    odd = any(format != FP32 for *_, format in beside)  # lines of several grids must divide one another
    expect(fine or spoiled or odd, f"a sound step was refused: {error}")
    return COMPUTED if fine else REFUSED


def draw_beside(name: str, case: Case, rng: Random) -> tuple[str, dict[str, Any], dict[str, Any], Format]:
    """Return numbers that a step keeps beside the weights, as the kernels take them, and what comes with them."""
    values, format = case.x.nan_to_num(0.0, 1.0, -1.0).abs(), FP32 if rng.random() < 0.5 else case.format
    kept: dict[str, Any] = {"numbers": memory(values), "codes": None, "exponents": None, "code_bytes": 0}
    if format != FP32:
        codes, exponents = case.coded()
        kept = {"numbers": None, "codes": memory(codes), "exponents": memory(exponents), "code_bytes": codes.itemsize}
        values = codes if exponents is None else exponents  # kept alive below
        KEPT_ALIVE.append(codes)
    KEPT_ALIVE.append(values)
    del KEPT_ALIVE[:-64]
    numbers: dict[str, dict[str, Any]] = {
        "center": {"pull": 0.1},
        "moments": {
            "decay": 0.9,
            "fresh": 0.1,
            "eps": 1e-3,
            "scale": 4.0,
            "unscale": 0.25,
            "frozen": rng.random() < 0.3,
        },
        "velocity": {"seed": 1, "stream": 2, "step": 3, "coefficients": [-0.1, -0.2, 0.1, -0.01, 0.05, 0.2, 1e-3]},
    }
    return name, {**kept, "grid": raw_grid(format, case.shape)}, numbers[name], format


KEPT_ALIVE: list[Tensor] = []  # tensors whose memory was handed over by address


def raw_rest(rng: Random) -> str:
    """Call draw, first_not_finite, or the constructor of a grid."""
    case, name = Case.draw(rng), rng.choice(("draw", "first_not_finite", "Grid"))
    numbers = case.x.clone()
    arguments: dict[str, Any]
    if name == "Grid":
        arguments = dict(case.format.kernel_grid(case.shape)._asdict())
    elif name == "draw":
        arguments = {
            "out": memory(numbers), "numel": numbers.numel(), "normal": rng.random() < 0.5, "seed": case.key.seed,
            "stream": case.key.stream, "step": case.key.step, "purpose": case.purpose, "threads": rng.choice((1, 2)),
        }  # fmt: skip
    else:
        arguments = {"tensors": [memory(numbers), memory(case.x)], "threads": 2}
    for _ in range(rng.choice((0, 1, 1, 2))):
        if name == "first_not_finite" and rng.random() < 0.7:
            entries = {"t": arguments["tensors"][0]} if isinstance(arguments["tensors"], list) else {"t": None}
            spoil(entries, rng)
            arguments["tensors"] = [entries["t"], memory(case.x)]
        else:
            spoil(arguments, rng)
    fine, made = attempt(partial(getattr(native.kernels, name), **arguments))
    if fine and name == "Grid":  # then kernels are safe on it, whatever it is
        _use_grid(made, case, rng)
    return COMPUTED if fine else REFUSED


def _use_grid(grid: Any, case: Case, rng: Random) -> None:
    out, (codes, exponents) = torch.empty(case.shape), case.coded()
    shared: dict[str, Any] = {"numel": codes.numel(), "grid": grid, "threads": 1}
    key: dict[str, Any] = {"variance": 0.5, "seed": 1, "stream": 2, "step": 3, "purpose": 0}
    rounding = rng.randrange(3)
    attempt(lambda: native.kernels.quantize(x=memory(case.x), out=memory(out), rounding=rounding, **key, **shared))
    randomize_codes(codes, exponents, rng)
    parts = {"codes": memory(codes), "exponents": memory(exponents), "code_bytes": codes.itemsize}
    attempt(lambda: native.kernels.decode(values=memory(out), **parts, **shared))
    attempt(lambda: native.kernels.encode(values=memory(case.x), **parts, **shared))
