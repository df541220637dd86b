"""Q_A and Q_E of plain tensors: the kernels of their device write in place, hooks on tensors round their errors.

A tensor quantized here is marked with its format and its version: numbers on a grid need not be rounded to it again. The bits
are those of `operator`, which is for all other tensors.

Nothing here waits for a device whose kernels are deferred. Which tensors are on the grid is known from the layers that rounded
them, not from their numbers (see `saved_tensors`), and an error is rounded into new memory, because only the CPU's references
tell who holds it (see `tensor_owners`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..quantization import random
from ..quantization.backend import Kernels, kernels_for
from ..quantization.formats import parse
from ..quantization.random import Key
from .memory_order import block_order, quantize_in_memory_order, reorder_dims
from .replay import enclosing_regions, innermost
from .saved_tensors import SavedAsCodes
from .tensor_owners import only_autograd_holds

__all__ = [
    "QuantizationSpec",
    "apply_function",
    "find_saving",
    "has_overflowed",
    "is_deferred",
    "is_on_grid",
    "is_plain_cpu_tensor",
    "kernels_to_write",
    "mark_on_grid",
    "quantize_activation",
    "quantize_error",
]


class QuantizationSpec(NamedTuple):
    """Settings for one output of a layer: the formats of Q_A and Q_E (None for full precision) and the random bits.

    ``step``, a number on the device, takes the place of that of the key in CUDA graphs (see `graph_count`). ``region`` is the
    number of the checkpointed region that the layer runs in, 0 for none (see `replay`).
    """

    activations: str | None
    errors: str | None
    rounding: str
    key: Key
    step: Tensor | None = None
    region: int = 0


def is_plain_cpu_tensor(x: Tensor) -> bool:
    """Return True for a float32 tensor on the CPU that is no subclass, not traced and not in `vmap`."""
    return x.dtype == torch.float32 and x.is_cpu and _is_plain(x)


def _is_plain(x: Tensor) -> bool:
    """Return True for a tensor that is no subclass, such as a fake one, not traced and not in `vmap`."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def kernels_to_write(x: Tensor) -> Kernels | None:
    """Return the kernels that may write to the memory of x; None if it is not plain, or if they do not take its dtype."""
    if not _is_plain(x):
        return None
    kernels = kernels_for(x)
    return kernels if kernels is not None and x.dtype in kernels.floats else None


def mark_on_grid(x: Tensor, format: str | None, region: int = 0) -> None:
    """Note on x that it is on the grid of a format, until it is written to; ``region`` as in `QuantizationSpec`."""
    if format is not None and not x.is_inference():
        x._qlangevin_grid = (format, x._version, region)  # type: ignore[attr-defined]


def is_on_grid(x: Tensor, format: str | None) -> bool:
    """Return True if x is marked as on the grid of a format and has not been written to since.

    In a checkpointed region marks from outside do not count: its inputs have lost them when it is recomputed.
    """
    mark = getattr(x, "_qlangevin_grid", None)
    if mark is None or mark[:2] != (format, x._version):
        return False
    return (region := innermost(enclosing_regions())) == 0 or region == mark[2]


def _is_error_on_grid(e: Tensor, format: str) -> bool:
    """Return True if an error is marked as on the grid of a format; backward has no regions."""
    mark = getattr(e, "_qlangevin_grid", None)
    return mark is not None and mark[:2] == (format, e._version)


# ---- any layer


def quantize_activation(
    x: Tensor, spec: QuantizationSpec, kernels: Kernels, *, may_overwrite: bool, already_on_grid: bool, producer: Hashable
) -> Tensor:  # fmt: skip
    """Return Q_A(x), with a hook on it that applies Q_E to its error.

    Args:
        x: the output of a layer.
        spec: the formats and the random bits.
        kernels: `kernels_to_write` to x.
        may_overwrite: write Q_A(x) into x: only the caller refers to it, and its own backward does not read it.
        already_on_grid: the caller knows that Q_A(x) = x.
        producer: identifies the layer, the same in every forward.
    """
    y, saving = x, find_saving(x, spec, kernels)
    if spec.activations is not None and not already_on_grid:
        if not may_overwrite and _makes_codes_of_copy(x, saving, kernels, producer):
            y, may_overwrite = x.clone(), True
        if may_overwrite:
            _overwrite(y.detach(), spec, kernels, saving, producer)
        else:
            y = apply_function(QuantizeFunction, x, spec.activations, spec, random.ACTIVATION)
    mark_on_grid(y, spec.activations, spec.region)
    if saving is not None and kernels.deferred:
        saving.note_output(y, producer)
    if spec.errors is not None and y.requires_grad:
        _hook_error(y, ErrorHook(spec), before_others=already_on_grid)
    return y


def _hook_error(y: Tensor, hook: ErrorHook, before_others: bool) -> None:
    """Have a hook get the error of y; with ``before_others`` ahead of that of another layer, whose output y may be, too."""
    others = list(y._backward_hooks or ()) if before_others else []
    y.register_hook(hook)
    for key in others:  # autograd goes through them in the order of insertion
        hooks = cast(dict[int, Any], y._backward_hooks)
        hooks[key] = hooks.pop(key)


def find_saving(x: Tensor, spec: QuantizationSpec, kernels: Kernels) -> SavedAsCodes | None:
    """Return the context that keeps what is saved of a layer's output as codes of the same grid; None if there is none."""
    if not (torch.is_grad_enabled() if kernels.deferred else x.requires_grad):
        return None
    saving = SavedAsCodes.innermost()
    if saving is None or spec.activations is None or saving.format != parse(spec.activations):
        return None  # the codes of another grid, which the output need not be on
    return saving


def _makes_codes_of_copy(x: Tensor, saving: SavedAsCodes | None, kernels: Kernels, producer: Hashable) -> bool:
    """Return True if x is to be copied and overwritten: the copy and the codes cost less than codes made afterwards."""
    if saving is None or not kernels.deferred or not saving.wants_codes(x, producer):
        return False
    return block_order(x, saving.format) is not None


def _overwrite(
    x: Tensor, spec: QuantizationSpec, kernels: Kernels, saving: SavedAsCodes | None, producer: Hashable
) -> None:
    """Write Q_A(x) into x, and its codes in the same pass if an output of this producer was saved before."""
    assert spec.activations is not None
    codes = None
    if saving is not None and (order := block_order(x, saving.format)) is not None:
        codes = saving.begin_output(x, order, producer, kernels.deferred)
    if saving is None or codes is None:
        quantize_in_memory_order(
            x, spec.activations, spec.rounding, spec.key, random.ACTIVATION, overwrite=True, step=spec.step
        )
        torch.autograd.graph.increment_version(x)
        return
    values, parts = reorder_dims(x, codes.order), (codes.codes, codes.exponents)
    has_codes = kernels.quantize_with_codes(
        values, codes.format, spec.rounding, spec.key, random.ACTIVATION, parts, spoiled=codes.spoiled, step=spec.step
    )
    torch.autograd.graph.increment_version(x)
    if has_codes:
        saving.set_codes(x, codes)


class QuantizeFunction(torch.autograd.Function):
    """x on a grid in a new tensor; the error passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, spec: QuantizationSpec, purpose: int) -> Tensor:
        return quantize_in_memory_order(x, format, spec.rounding, spec.key, purpose, step=spec.step)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Any, ...]:
        return error, None, None, None


class ErrorHook:
    """Q_E, as a hook on the tensor whose error it rounds."""

    def __init__(self, spec: QuantizationSpec) -> None:
        self.spec = spec

    def __call__(self, e: Tensor) -> Tensor:
        format, spec = self.spec.errors, self.spec
        assert format is not None
        if _is_error_on_grid(e, format) or has_overflowed(e):
            return e
        if e.requires_grad:
            return quantize_error(e, format, spec)
        overwrite = not is_deferred(e) and only_autograd_holds(e, "hook")
        out = quantize_in_memory_order(
            e, format, spec.rounding, spec.key, random.ERROR, overwrite=overwrite, step=spec.step
        )
        mark_on_grid(out, format)
        return out


def quantize_error(e: Tensor, format: str, spec: QuantizationSpec) -> Tensor:
    """Return Q_E(e) in new memory."""
    if e.requires_grad:  # autograd builds the graph of a second derivative
        return apply_function(QuantizeFunction, e, format, spec, random.ERROR)
    return quantize_in_memory_order(e, format, spec.rounding, spec.key, random.ERROR, step=spec.step)


def has_overflowed(e: Tensor) -> bool:
    """Return True for an error of float16 that holds an infinity, which a GradScaler must see: grids have none.

    Devices that the host must not wait for are not asked.
    """
    return e.dtype is torch.float16 and not is_deferred(e) and not bool(e.isfinite().all())


def is_deferred(x: Tensor) -> bool:
    """Return True if the host must not wait for the kernels that write to x."""
    kernels = kernels_for(x)
    return kernels is not None and kernels.deferred


def apply_function(function: Any, *arguments: Any) -> Tensor:
    return cast(Tensor, function.apply(*arguments))
