"""Q_A with Q_E as its backward, as one PyTorch operator: for every device and dtype, opaque to compilers.

    forward    y = Q_A(x)
    backward   e_x = Q_E(e_y)

The number of the step is a tensor, because compiled code must not depend on its value. `plain_tensors` computes the same bits
for plain tensors whose device has kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quantization import operators, random
from ..quantization.formats import parse
from .graph_count import is_capturing
from .memory_order import quantize_in_memory_order
from .replay import check_counted

__all__ = ["error_op", "lower_op"]


@operators.operator("lower")
def lower_op(
    x: Tensor, activations: str | None, errors: str | None, rounding: str, seed: int, stream: int, step: Tensor
) -> Tensor:
    """Return Q_A(x); backward applies Q_E to its error. A format of None is full precision."""
    return _quantize_at_step(x, activations, random.ACTIVATION, rounding, seed, stream, step)


@operators.operator("lower_error")
def error_op(e: Tensor, errors: str | None, rounding: str, seed: int, stream: int, step: Tensor) -> Tensor:
    """Return Q_E(e)."""
    return _quantize_at_step(e, errors, random.ERROR, rounding, seed, stream, step)


@torch._disable_dynamo  # type: ignore[attr-defined]  # compiled code that falls back to eager must not compile this
def _quantize_at_step(
    x: Tensor, format: str | None, purpose: int, rounding: str, seed: int, stream: int, step: Tensor
) -> Tensor:
    if format is None:
        return x.clone()
    if purpose == random.ACTIVATION and rounding != "nearest":
        check_counted(step)
    if not step.is_cpu:
        return quantize_in_memory_order(x, format, rounding, operators.key_of(seed, stream, 0), purpose, step=step)
    if rounding != "nearest" and is_capturing(x):
        raise RuntimeError(
            "a compiled model cannot be captured in a CUDA graph: every replay would draw the same random bits; capture the "
            "model without torch.compile"
        )
    return quantize_in_memory_order(x, format, rounding, operators.key_of(seed, stream, int(step)), purpose)


@operators.fake("lower")
@operators.fake("lower_error")
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _keep_error_arguments(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.settings, ctx.step = inputs[2:6], inputs[6]


def _lower_backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
    return (error_op(e, *ctx.settings, ctx.step), *[None] * 6)


def _error_backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
    return (e, *[None] * 5)


torch.library.register_autograd(
    "qlangevin::lower", _lower_backward, setup_context=_keep_error_arguments, lib=operators._library
)
torch.library.register_autograd("qlangevin::lower_error", _error_backward, lib=operators._library)


def _lower_batch(info: Any, dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """Apply `lower_op` to each of many tensors as if it were alone, for `torch.vmap`."""
    activations, _, rounding = rest[:3]
    batch = x.movedim(dims[0], 0)
    if rounding != "nearest" or activations is None:  # every tensor gets the same random bits
        return torch.stack([lower_op(tensor, *rest) for tensor in batch.unbind(0)]), 0
    format, shape = parse(activations).stacked(batch.shape)
    return lower_op(batch.reshape(shape), str(format), *rest[1:]).reshape(batch.shape), 0


torch.library.register_vmap("qlangevin::lower", _lower_batch, lib=operators._library)
