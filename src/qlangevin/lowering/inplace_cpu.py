"""Q_A and Q_E of plain float32 tensors on the CPU: the kernels write in place, hooks on tensors round their errors.

A tensor quantized here is marked with its format and its version: numbers on a grid need not be rounded to it again. The bits
are those of `operator`, which is for all other tensors.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import native
from ..quantization import random
from ..quantization.formats import parse
from ..quantization.random import Key
from .memory_order import block_order, memory_order, quantize_in_memory_order, reorder_dims
from .saved_tensors import SavedAsCodes, SavedCodes
from .tensor_owners import only_autograd_holds

__all__ = [
    "QuantizationSpec",
    "is_on_grid",
    "is_plain_cpu_tensor",
    "kernels_can_write",
    "quantize_activation",
    "relu_on_grid",
]


class QuantizationSpec(NamedTuple):
    """Settings for one output of a layer: the formats of Q_A and Q_E (None for full precision) and the random bits."""

    activations: str | None
    errors: str | None
    rounding: str
    key: Key


def is_plain_cpu_tensor(x: Tensor) -> bool:
    """Return True for a float32 tensor on the CPU that is no subclass, not traced and not in `vmap`."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.dtype != torch.float32 or not x.is_cpu:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def kernels_can_write(x: Tensor) -> bool:
    """Return True if x is plain memory on the CPU and the kernels are on."""
    return is_plain_cpu_tensor(x) and native.enabled_for(x)


def mark_on_grid(x: Tensor, format: str | None) -> None:
    """Note on x that it is on the grid of a format, until it is written to."""
    if format is not None and not x.is_inference():
        x._qlangevin_grid = (format, x._version)  # type: ignore[attr-defined]


def is_on_grid(x: Tensor, format: str | None) -> bool:
    """Return True if x is marked as on the grid of a format and has not been written to since."""
    mark = getattr(x, "_qlangevin_grid", None)
    return mark is not None and mark == (format, x._version)


# ---- any layer


def quantize_activation(
    x: Tensor, spec: QuantizationSpec, *, may_overwrite: bool, already_on_grid: bool, producer: Hashable
) -> Tensor:
    """Return Q_A(x), with a hook on it that applies Q_E to its error.

    Args:
        x: the output of a layer.
        spec: the formats and the random bits.
        may_overwrite: write Q_A(x) into x: only the caller refers to it, and its own backward does not read it.
        already_on_grid: the caller knows that Q_A(x) = x.
        producer: identifies the layer, the same in every forward.
    """
    y, saving = x, SavedAsCodes.innermost() if x.requires_grad else None
    if spec.activations is not None and not already_on_grid:
        if may_overwrite:
            _overwrite(x.detach(), spec, saving, producer)
        else:
            y = _apply(QuantizeFunction, x, spec.activations, spec, random.ACTIVATION)
    mark_on_grid(y, spec.activations)
    if spec.errors is not None and y.requires_grad:
        y.register_hook(ErrorHook(spec))
    return y


def _overwrite(x: Tensor, spec: QuantizationSpec, saving: SavedAsCodes | None, producer: Hashable) -> None:
    """Write Q_A(x) into x, and its codes in the same pass if an output of this producer was saved before."""
    assert spec.activations is not None
    format, codes = parse(spec.activations), None
    if saving is not None and saving.format == format and (order := block_order(x, format)) is not None:
        codes = saving.begin_output(x, order, producer)
    if codes is None:
        quantize_in_memory_order(x, spec.activations, spec.rounding, spec.key, random.ACTIVATION, overwrite=True)
        torch.autograd.graph.increment_version(x)
        return
    values, parts = reorder_dims(x, codes.order), (codes.codes, codes.exponents)
    has_codes = native.quantize_with_codes(values, format, spec.rounding, spec.key, random.ACTIVATION, parts)
    torch.autograd.graph.increment_version(x)
    if saving is not None and has_codes:
        saving.set_codes(x, codes)


class QuantizeFunction(torch.autograd.Function):
    """x on a grid in a new tensor; the error passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, spec: QuantizationSpec, purpose: int) -> Tensor:
        return quantize_in_memory_order(x, format, spec.rounding, spec.key, purpose)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Any, ...]:
        return error, None, None, None


class ErrorHook:
    """Q_E, as a hook on the tensor whose error it rounds."""

    def __init__(self, spec: QuantizationSpec) -> None:
        self.spec = spec

    def __call__(self, e: Tensor) -> Tensor:
        format = self.spec.errors
        assert format is not None
        if is_on_grid(e, format):
            return e
        if e.requires_grad:  # autograd builds the graph of a second derivative
            return _apply(QuantizeFunction, e, format, self.spec, random.ERROR)
        overwrite = only_autograd_holds(e, "hook")
        out = quantize_in_memory_order(e, format, self.spec.rounding, self.spec.key, random.ERROR, overwrite=overwrite)
        mark_on_grid(out, format)
        return out


# ---- ReLU, which leaves numbers on the grid where they are


def relu_on_grid(x: Tensor, spec: QuantizationSpec, inplace: bool) -> Tensor:
    """Return relu(x) of x on the grid of the activations, where it stays; its backward applies Q_E."""
    saving = SavedAsCodes.innermost()
    if saving is not None and str(saving.format) != spec.activations:
        saving = None  # it keeps codes of another grid, which relu(x) need not be on
    made: list[SavedCodes] = []
    y = _apply(ReLUFunction, x, spec, inplace, saving, made)
    if saving is not None and made:  # only now: after a change in place autograd has just counted up the version of y
        saving.set_codes(y, made[0])
    mark_on_grid(y, spec.activations)
    return y


class ReLUFunction(torch.autograd.Function):
    """y = relu(x) and e_x = Q_E(e_y) · [y > 0], in one pass each.

    Saves the codes of y, which it shares with the layer that saves y as its input; y itself if it has no codes.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, spec: QuantizationSpec, inplace: bool, saving: SavedAsCodes | None, made: list[SavedCodes]
    ) -> Tensor:
        y, ctx.spec, ctx.about_codes = x if inplace else torch.empty_like(x), spec, None
        if inplace:
            ctx.mark_dirty(x)
        codes = _relu_with_codes(x, y, saving) if saving is not None and ctx.needs_input_grad[0] else None
        if codes is not None:
            made.append(codes)
            ctx.about_codes = (codes.format, codes.order)
            ctx.save_for_backward(codes.codes, codes.exponents)
        else:
            torch.clamp_min(x, 0, out=y)
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        spec, format = ctx.spec, ctx.spec.errors
        codes = SavedCodes(*ctx.saved_tensors, *ctx.about_codes) if ctx.about_codes is not None else None
        fused = codes is not None and codes.codes.dtype == torch.int8 and codes.order == memory_order(e)
        if codes is not None and format is not None and fused and not e.requires_grad:
            overwrite = only_autograd_holds(e, "backward")
            out = quantize_in_memory_order(
                e, format, spec.rounding, spec.key, random.ERROR, overwrite=overwrite, positive=codes.codes
            )
        else:
            y = codes.decode() if codes is not None else ctx.saved_tensors[0]
            q = e if format is None else _apply(QuantizeFunction, e, format, spec, random.ERROR)
            out = torch.ops.aten.threshold_backward(q, y, 0)
        mark_on_grid(out, format)
        return out, None, None, None, None


def _relu_with_codes(x: Tensor, y: Tensor, saving: SavedAsCodes) -> SavedCodes | None:
    """Write relu(x) into y and return its codes; return None and leave y to the caller if it has none."""
    order = block_order(x, saving.format)
    codes = saving.allocate_codes(x, order) if order is not None else None
    if codes is None:
        return None
    values, target = reorder_dims(x, codes.order), reorder_dims(y, codes.order)
    return codes if native.relu_with_codes(values, target, codes.codes, codes.exponents, saving.format) else None


def _apply(function: Any, *arguments: Any) -> Tensor:
    return cast(Tensor, function.apply(*arguments))
