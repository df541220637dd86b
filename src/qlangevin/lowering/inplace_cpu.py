"""Q_A on what flows forward through a network, Q_E on what flows back.

There are two ways to the same bits. `lower_op` is an operator with a backward of its own: for every device, and opaque to
compilers. The other is for plain float32 tensors on the CPU: the kernels write the rounded numbers where the others were, and
a hook on the tensor rounds its error, again in place if nobody else has it.

A tensor rounded here is marked with its format and version: numbers that are on a grid need not be rounded to it again.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from .. import native
from ..quantization import operators, random
from ..quantization.formats import Format, parse
from ..quantization.random import Key
from .saved_tensors import Codes, Maker, SavedAsCodes, in_order, memory_order

__all__ = ["Step", "know_sole_owners", "marked", "passed", "relu", "simple"]


class Step(NamedTuple):
    """What is done at one place of a network, one time: formats by name (None for full precision), and the random bits."""

    activations: str | None
    errors: str | None
    rounding: str
    key: Key


def simple(x: Tensor) -> bool:
    """Whether x is memory the kernels can write to, and no stand-in for a tensor."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.dtype != torch.float32:
        return False
    return native.enabled_for(x) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def mark(x: Tensor, format: str | None) -> None:
    if format is not None and not x.is_inference():
        x._qlangevin_grid = (format, x._version)  # type: ignore[attr-defined]


def marked(x: Tensor, format: str | None) -> bool:
    """Whether x is known to be on a grid, and has not been written to since."""
    known = getattr(x, "_qlangevin_grid", None)
    return known is not None and known == (format, x._version)


# ---- plain tensors on the CPU


def passed(x: Tensor, step: Step, fresh: bool, on_grid: bool, maker: Maker) -> Tensor:
    """Q_A(x), and Q_E on its error. ``fresh``: nobody else has x, and its own backward does not need it."""
    y, saving = x, SavedAsCodes.innermost() if x.requires_grad else None
    if step.activations is not None and not on_grid:
        if fresh:
            in_place(x.detach(), step, saving, maker)
        else:
            y = _apply(Rounded, x, step.activations, step, random.ACTIVATION)
    mark(y, step.activations)
    if step.errors is not None and y.requires_grad:
        y.register_hook(ErrorHook(step.errors, step))
    return y


def block_order(x: Tensor, format: Format) -> tuple[int, ...] | None:
    """`memory_order` if blocks are the same in it: examples must come first, groups along the last dim stay last.

    Channels-last activations are worked on in the order of their memory, which is also that of their random numbers.
    """
    order = memory_order(x)
    return order if not order or format.keeps_blocks(order) else None


def in_place(x: Tensor, step: Step, saving: SavedAsCodes | None, maker: Maker) -> None:
    """Q_A(x) where x was; with its codes, if those were asked for the last time."""
    assert step.activations is not None
    format, codes = parse(step.activations), None
    order = block_order(x, format)
    if saving is not None and saving.format == format and order is not None:
        codes = saving.room(x, order) if maker.saved else None
        saving.makers[StorageWeakRef(x.untyped_storage())] = maker
    if codes is None or order is None or saving is None:
        rounded(x, step.activations, step, random.ACTIVATION, in_place=True)
        torch.autograd.graph.increment_version(x)
        return
    flat, parts = in_order(x, order), (codes.codes, codes.exponents)
    coded = native.quantize_with_codes(flat, format, step.rounding, step.key, random.ACTIVATION, parts)
    torch.autograd.graph.increment_version(x)
    if coded:
        saving.known[saving.place(x)] = codes


def rounded(
    x: Tensor, format: str, step: Step, purpose: int, in_place: bool = False, positive: Tensor | None = None
) -> Tensor:
    """x on a grid, in the order of its memory; zero where ``positive``, 8-bit codes in the same order, is not."""
    order = block_order(x, parse(format))
    if order is None:
        y = operators.quantize_op(x, format, step.rounding, *operators.key_bits(step.key), purpose)
        return (x if in_place else torch.empty_like(x)).copy_(y)
    out = x if in_place else torch.empty_like(x)
    flat, target = in_order(x, order), in_order(out, order)
    if native.enabled_for(x) and x.dtype == torch.float32:
        native.quantize(flat, parse(format), step.rounding, step.key, purpose, out=target, positive=positive)
    else:
        target.copy_(operators.quantize_op(flat, format, step.rounding, *operators.key_bits(step.key), purpose))
    return out


class Rounded(torch.autograd.Function):
    """`rounded` as a new tensor, straight through for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, step: Step, purpose: int) -> Tensor:
        return rounded(x, format, step, purpose)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Any, ...]:
        return error, None, None, None


class ErrorHook:
    """Q_E, as a hook on the tensor whose error it is."""

    def __init__(self, format: str, step: Step) -> None:
        self.format, self.step = format, step

    def __call__(self, e: Tensor) -> Tensor:
        if marked(e, self.format):
            return e
        if e.requires_grad:  # the derivative of a derivative is wanted
            return _apply(Rounded, e, self.format, self.step, random.ERROR)
        alone = _owners(e) == _sole_owner(ErrorHook)
        out = rounded(e, self.format, self.step, random.ERROR, alone)
        mark(out, self.format)
        return out


def relu(x: Tensor, step: Step, inplace: bool, saving: SavedAsCodes | None) -> Tensor:
    """relu(x) for x on the grid of the activations, which it does not leave; Q_E on its error."""
    if saving is not None and str(saving.format) != step.activations:
        saving = None  # it keeps numbers of another grid as codes: these it has to try for itself
    kept: list[Codes] = []
    y = _apply(ReLU, x, step, inplace, saving, kept)
    if saving is not None and kept:  # autograd has counted a change in place by now: the next layer knows it as this
        saving.known[saving.place(y)] = kept[0]
    mark(y, step.activations)
    return y


class ReLU(torch.autograd.Function):
    """Keeps the codes of its result, which the layer after it keeps too, or else the result; Q_E and the mask are one pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Step, inplace: bool, saving: SavedAsCodes | None, kept: list[Codes]
    ) -> Tensor:
        y, ctx.step, ctx.codes = x if inplace else torch.empty_like(x), step, None
        if inplace:
            ctx.mark_dirty(x)
        codes = _rectified(x, y, saving) if saving is not None and ctx.needs_input_grad[0] else None
        if codes is not None:
            kept.append(codes)
            ctx.codes = codes.about
            ctx.save_for_backward(codes.codes, codes.exponents)
        else:
            torch.clamp_min(x, 0, out=y)
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        format, codes = ctx.step.errors, Codes(*ctx.saved_tensors, *ctx.codes) if ctx.codes is not None else None
        fused = codes is not None and codes.codes.dtype == torch.int8 and codes.order == memory_order(e)
        if codes is not None and format is not None and fused and not e.requires_grad:
            alone = _owners(e) == _sole_owner(ReLU)
            out = rounded(e, format, ctx.step, random.ERROR, alone, codes.codes)
        else:
            y = codes.decode() if codes is not None else ctx.saved_tensors[0]
            q = e if format is None else _apply(Rounded, e, format, ctx.step, random.ERROR)
            out = torch.ops.aten.threshold_backward(q, y, 0)
        mark(out, format)
        return out, None, None, None, None


def _rectified(x: Tensor, y: Tensor, saving: SavedAsCodes) -> Codes | None:
    """y = relu(x), and its codes; None if it has none."""
    order = block_order(x, saving.format)
    codes = saving.room(x, order) if order is not None else None
    if codes is None or order is None:
        return None
    parts = (codes.codes, codes.exponents)
    return codes if native.relu_with_codes(in_order(x, order), in_order(y, order), *parts, saving.format) else None


def _apply(function: Any, *arguments: Any) -> Tensor:
    return cast(Tensor, function.apply(*arguments))


def _owners(e: Tensor) -> tuple[int, ...]:
    """How many refer to a tensor, from C++ and from Python, and to its memory; nothing of the kind for a view."""
    if e._is_view() or memory_order(e) is None:
        return ()
    return e._use_count(), torch._C._storage_Use_Count(e.untyped_storage()._cdata), sys.getrefcount(e)  # type: ignore[attr-defined]


def know_sole_owners() -> None:
    """Find out while nothing else is going on."""
    for caller in (ErrorHook, ReLU):
        _sole_owner(caller)


@cache
def _sole_owner(caller: type) -> tuple[int, ...]:
    """What `_owners` gives, in this version of PyTorch and Python, for an error that only autograd itself and the caller have.

    A tensor autograd is about to throw away may be overwritten; it does so itself when it adds up errors.
    """
    seen: list[tuple[int, ...]] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, e: Tensor) -> Tensor:
            if caller is ReLU:
                seen.append(_owners(e))
            return e * 1.0

    class Hook:
        def __call__(self, e: Tensor) -> None:
            if caller is ErrorHook:
                seen.append(_owners(e))

    with _disable_current_modes(), torch.enable_grad():
        x = _apply(Probe, torch.ones(2, requires_grad=True))
        x.register_hook(Hook()) if caller is ErrorHook else None
        (x * torch.ones(2)).backward(torch.ones(2))
    return seen[0]


# ---- all others


@operators.operator("lower")
def lower_op(
    x: Tensor, activations: str | None, errors: str | None, rounding: str, seed: int, stream: int, step: Tensor
) -> Tensor:
    """Q_A; its backward is Q_E. The step is a tensor, because compiled code must not depend on its value."""
    return _rounded_at(x, activations, random.ACTIVATION, rounding, seed, stream, step)


@operators.operator("lower_error")
def error_op(e: Tensor, errors: str | None, rounding: str, seed: int, stream: int, step: Tensor) -> Tensor:
    """Q_E."""
    return _rounded_at(e, errors, random.ERROR, rounding, seed, stream, step)


@torch._disable_dynamo  # type: ignore[attr-defined]  # where compiled code falls back to eager, this is not to be compiled
def _rounded_at(
    x: Tensor, format: str | None, purpose: int, rounding: str, seed: int, stream: int, step: Tensor
) -> Tensor:
    if format is None:
        return x.clone()
    return rounded(x, format, Step(format, format, rounding, operators.key_of(seed, stream, int(step))), purpose)


@operators.fake("lower")
@operators.fake("lower_error")
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.how, ctx.step = inputs[2:6], inputs[6]


def _error(ctx: Any, e: Tensor) -> tuple[Any, ...]:
    return (error_op(e, *ctx.how, ctx.step), *[None] * 6)


torch.library.register_autograd("qlangevin::lower", _error, setup_context=_remember, lib=operators._library)
torch.library.register_autograd("qlangevin::lower_error", lambda ctx, e: (e, *[None] * 5), lib=operators._library)


def _lower_many(info: Any, dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """`lower_op` of many tensors at once, each as if it were alone, for `torch.vmap`."""
    activations, _, rounding = rest[:3]
    many = x.movedim(dims[0], 0)
    if rounding != "nearest" or activations is None:  # one after the other, with the same random bits
        return torch.stack([lower_op(one, *rest) for one in many.unbind(0)]), 0
    format, shape = parse(activations).stacked(many.shape)
    return lower_op(many.reshape(shape), str(format), *rest[1:]).reshape(many.shape), 0


torch.library.register_vmap("qlangevin::lower", _lower_many, lib=operators._library)
