"""All that the library does by GPU kernels, as operations on small tensors; `recording` writes down their launches.

``bytes`` is the least that an operation has to read and write for each element: an exponent of a block counts as nothing. Blocks
that no multiprocessor can hold, whole tensors, have to be read twice: for their exponent, and to be drawn. ``scratch`` is what
goes through memory beyond that because two launches share the work: gradients that are rounded for, or to, blocks are written
and read again, and weights that are blocks are rounded from an accumulator that was just written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor

import qlangevin as ql
from qlangevin import gpu
from qlangevin.gpu import split
from qlangevin.quantization import random
from qlangevin.quantization.backend import Kernels, TensorStep, kernels_for
from qlangevin.quantization.operators import Rounding

from .dynamics import steps_beside

__all__ = ["Operation", "operations"]

# Formats by kernel, with a shape: elements on their own; blocks of several lengths, that of a ResNet's middle layers being 2304.
LAYOUTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "fixed8.6": ("fixed8.6", (8, 256)),
    "fp8_e4m3": ("fp8_e4m3", (8, 256)),
    "bf16": ("bf16", (8, 256)),
    "bfp8, rows of 576": ("bfp8", (2, 576)),
    "bfp8, rows of 2304": ("bfp8", (2, 2304)),
    "bfp8, rows of 20000": ("bfp8", (1, 20000)),
    "bfp8/32": ("bfp8/32", (8, 256)),
    "bfp8/tensor": ("bfp8/tensor", (1, 70000)),  # which programs share
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IMPORTANT = ("fixed8.6", "bfp8, rows of 2304")


class Operation(NamedTuple):
    """An operation with its name and its least bytes an element; a row is the length of its blocks, if it has blocks."""

    name: str
    bytes: float
    run: Callable[[], object]
    row: int = 0
    elements: int = 0
    again: float = 0.0  # bytes that are read twice if a block is long
    scratch: float = 0.0


def operations(quick: bool) -> Iterator[Operation]:
    """Yield all operations, or those that have a budget."""
    with gpu.interpreted():
        for name, (format, shape) in LAYOUTS.items():
            if quick and name not in IMPORTANT:
                continue
            row = 32 if format == "bfp8/32" else shape[1] if "bfp8" in format else 0
            found = [_quantizers(name, format, torch.randn(shape), quick), _steps(name, format, shape, quick)]
            if not quick:
                beside = (Operation(*step) for step in steps_beside(name, format, shape))
                found += [_with_codes(name, format, torch.randn(shape)), beside]
            yield from (_finish(operation, row, math.prod(shape)) for operation in chain.from_iterable(found))


def _finish(operation: Operation, row: int, elements: int) -> Operation:
    """Return an operation with the length of its blocks and the number of its elements."""
    least = operation.bytes + (operation.again if row > split.LONGEST else 0.0)
    return operation._replace(row=row, elements=elements, bytes=least)


def _quantizers(name: str, format: str, x: Tensor, quick: bool) -> Iterator[Operation]:
    roundings: tuple[Rounding, ...] = ("stochastic",) if quick else ("nearest", "stochastic")
    for rounding, (dtype, torch_dtype) in product(roundings, DTYPES.items()):
        values = x.to(torch_dtype)
        if not quick or dtype == "float32":
            size = 2 * values.itemsize
            yield Operation(
                f"quantize, {rounding}, {name}, {dtype}",
                size,
                partial(_quantize, values, format, rounding),
                again=size / 2,
            )
    for variance in () if quick else (1e-6, torch.full_like(x, 0.01)):
        each = isinstance(variance, Tensor)
        label = f"corrected, {name}, {'a variance for each' if each else 'one variance'}"
        yield Operation(
            label, 12 if each else 8, partial(ql.corrected, x, variance, format, ql.Key(0)), again=8 if each else 4
        )


def _quantize(x: Tensor, format: str, rounding: Rounding) -> None:
    """Round by the kernels, which take any dtype; operators ask if the dtype can hold the format's numbers."""
    kernels = _kernels(x)
    kernels.quantize(x, ql.parse(format), rounding, ql.Key(0), random.ROUNDING)


def _with_codes(name: str, format: str, x: Tensor) -> Iterator[Operation]:
    parsed, kernels = ql.parse(format), _kernels(x)
    codes = torch.empty(x.shape, dtype=parsed.code_dtype)
    exponents = torch.zeros(max(1, x.numel() // 32), dtype=torch.int8)
    flag, byte = torch.zeros(1, dtype=torch.int32), codes.itemsize
    purposes = {"activations": random.ACTIVATION, "errors": random.ERROR}
    for what, purpose in purposes.items():
        run = partial(kernels.quantize, x, parsed, "stochastic", ql.Key(0), purpose, out=x)
        yield Operation(f"{what}, {name}", 8, run, again=4)
    masked = partial(run, positive=torch.ones(x.shape, dtype=torch.int8))
    yield Operation(f"errors with the mask, {name}", 9, masked, again=4)
    step = torch.zeros((), dtype=torch.int64)
    coded = partial(
        kernels.quantize_with_codes, x, parsed, "stochastic", ql.Key(0), random.ACTIVATION, (codes, exponents), spoiled=flag,
    )  # fmt: skip
    yield Operation(f"activations with codes, {name}", 8 + byte, coded, again=4)
    yield Operation(f"activations with codes, {name}, step on the device", 8 + byte, partial(coded, step=step), again=4)
    relu = partial(kernels.relu_with_codes, x, x, codes, exponents, parsed, spoiled=flag)
    yield Operation(f"ReLU with codes, {name}", 8 + byte, relu, again=4)
    yield Operation(f"encode, {name}", 4 + byte, partial(kernels.encode, x, codes, exponents, parsed), again=4)
    decode = partial(kernels.decode, x, codes, exponents, parsed)
    yield Operation(f"decode, {name}", 4 + byte, decode)
    yield Operation(f"decode, {name}, if not spoiled", 4 + byte, partial(decode, spoiled=flag))


def _steps(name: str, format: str, shape: tuple[int, ...], quick: bool) -> Iterator[Operation]:
    """Yield steps on codes, with 8-bit gradients and without, and on floats.

    A step reads weight and gradient, and writes the weight. It reads the gradient once more, before anything is changed, to see
    if it is finite.
    """
    # The usual case: the noise does not lift a block into the next binade.
    x = (torch.randn(shape) * 0.1).clamp(-0.12, 0.12)
    blocks = ql.parse(format).has_exponents
    for gradients in (None,) if quick else (None, "bfp8", "fixed8.6"):
        label = f"step on codes, {name}" + (f", gradients {gradients}" if gradients else "")
        byte = ql.parse(format).storage_bits / 8
        scratch = 8 if gradients and (blocks or ql.parse(gradients).has_exponents) else 0
        run = partial(_step, ql.encode(x, format), x * 1e-3, format, gradients, None)
        again = 4 + byte + (4 if gradients == "bfp8" and shape[1] > split.LONGEST else 0)
        yield Operation(label, 8 + 2 * byte, run, again=again, scratch=scratch)
    for dtype, torch_dtype in {} if quick else DTYPES.items():
        weights = x.to(torch_dtype)
        run = partial(_step, weights, weights * 1e-3, format, None, None)
        size = torch_dtype.itemsize
        yield Operation(f"step on {dtype}, {name}", 4 * size, run, again=2 * size)
    for accumulator in () if quick else ("fp32", "fixed16.10"):
        run = partial(_step, ql.encode(x, format), x * 1e-3, format, None, accumulator)
        byte = ql.parse(format).storage_bits / 8
        label = f"step on codes, {name}, accumulator {accumulator}"
        yield Operation(label, 16 + byte, run, again=4, scratch=4 if blocks else 0)


def _step(theta: Tensor, gradient: Tensor, format: str, gradients: str | None, accumulator: str | None) -> None:
    """Step one tensor as a sampler does: begin, then the step."""
    kernels = _kernels(gradient)
    counts, flags = torch.zeros(1, dtype=torch.int64), torch.full((2,), 2**31 - 1, dtype=torch.int32)
    kernels.begin_step([gradient], [0], counts, flags)
    copy = gradient.clone() if accumulator else None
    kernels.sgld(
        [TensorStep(theta, gradient, ql.Key(0), copy)], weights=ql.parse(format),
        gradients=None if gradients is None else ql.parse(gradients), accumulator=ql.parse(accumulator) if accumulator else None,
        rounding="corrected", lr=0.1, weight_decay=1e-4, variance=2e-4, maximize=False, slots=[0], counts=counts, flags=flags,
    )  # fmt: skip


def _kernels(x: Tensor) -> Kernels:
    found = kernels_for(x)
    if found is None:
        raise RuntimeError("there are no kernels in the interpreter")
    return found
