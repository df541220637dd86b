"""One call of a function inside a lowered model: computed, judged by its operands, and rounded or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import plain_tensors
from .bit_masks import drop_out, relu_with_mask
from .function_table import Entry, why_not
from .handler import Handler
from .operand_kinds import Kind, float_operands, note_write, propagate, set_kinds

__all__ = ["RunningForward", "call", "follow"]


class RunningForward(Protocol):
    """The forward of a module, which calls functions; see `running_forwards.Frame`."""

    module: nn.Module

    def find_kinds(self, func: Any, operands: Iterable[Tensor]) -> list[Kind]:
        """Return the kinds of a function's operands."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and record it if what it saves is to be computed again."""

    def lowers(self, name: str) -> bool:
        """Return True if functions of this name are lowered here."""

    def handler(self, entry: Entry) -> Handler:
        """Return the handler of the call that is going on."""


def follow(frame: RunningForward, func: Any, args: Any, kwargs: Any, is_sum: bool = False) -> Any:
    """Call a function that is not lowered, and note the kind of what it returns."""
    result = frame.run(func, args, kwargs)
    if isinstance(result, (Tensor, tuple, list)) or result is None:
        operands = list(float_operands(args, kwargs))
        kinds = frame.find_kinds(func, operands)
        if not any(result is t for t in operands):  # else it keeps its kind: data are not marked
            set_kinds(result, propagate(func, kinds, is_sum))
        note_write(func, args[0] if args else None, kinds, len(operands))
    return result


def call(frame: RunningForward, entry: Entry, func: Any, args: Any, kwargs: Any) -> tuple[Any, str | None]:
    """Call a function of the table; return its result, and the reason if it was not lowered."""
    operands = list(float_operands(args, kwargs))
    kinds = frame.find_kinds(func, operands)
    chosen = frame.lowers(entry.name)
    if chosen and entry.name in _MASKED_FUNCTIONS and kinds and kinds[0] in (Kind.ACTIVATION, Kind.MASKED):
        result = _MASKED_FUNCTIONS[entry.name](frame, entry, func, args, kwargs)
        if result is not None:
            set_kinds(result, Kind.ACTIVATION)
            return result, None
    result = frame.run(func, args, kwargs)
    first = result[0] if isinstance(result, tuple) else result
    reason = why_not(entry, kinds, first)
    if reason is not None:
        set_kinds(result, propagate(func, kinds, entry.rule in ("sum", "biased")))
        return result, reason
    set_kinds(result, Kind.ACTIVATION)
    in_place = bool(operands) and first is operands[0]
    if "out" in kwargs or not first.is_floating_point():
        return result, "written to a given tensor"
    if in_place and not entry.own_output:
        return result, "unchanged, or in place where its backward reads it"
    if not chosen:
        return result, "not chosen"
    rounded = _round(frame, entry, first, operands, in_place)
    return (rounded, *result[1:]) if isinstance(result, tuple) else rounded, None


def _round(frame: RunningForward, entry: Entry, x: Tensor, operands: list[Tensor], in_place: bool) -> Tensor:
    """Return Q_A(x), in x itself if the function has worked in place."""
    handler = frame.handler(entry)
    format = handler.activations
    on_grid = entry.keeps_grid and "/" not in str(format) and plain_tensors.is_on_grid(operands[0], format)
    y = handler.quantize(frame.module, x, on_grid, is_own=entry.own_output)
    if in_place and y is not x:
        y = _write(x, y)
    return _finish(handler, frame.module, y)


class WriteFunction(torch.autograd.Function):
    """Write y into x; the error, which is that of y, keeps its layout, as it does not in ``x.copy_(y)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.copy_(y)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Any, ...]:
        return None, e


def _write(x: Tensor, y: Tensor) -> Tensor:
    if x._is_view() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return x.copy_(y)
    function: Any = WriteFunction
    result: Tensor = function.apply(x, y)
    return result


def _finish(handler: Handler, module: nn.Module, y: Tensor) -> Tensor:
    set_kinds(y, Kind.ACTIVATION)
    if handler.bits.are_shared and module.training and handler.rounding != "nearest":
        handler.bits.watch(handler, handler.name, y)
    return y


def _relu(frame: RunningForward, entry: Entry, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    in_place = getattr(func, "__name__", "") == "relu_" or bool(
        kwargs.get("inplace", args[1] if len(args) > 1 else False)
    )
    x = args[0] if args else kwargs["input"]
    handler = frame.handler(entry)
    return _finish(handler, frame.module, relu_with_mask(handler, frame.module, x, in_place))


def _dropout(frame: RunningForward, entry: Entry, func: Any, args: Any, kwargs: Any) -> Tensor | None:
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    training = given.get("training", given.get("train", func is F.dropout))
    x, p = given["input"], given.get("p", 0.5)
    if not training or p <= 0 or given.get("inplace", False) or getattr(func, "__name__", "") == "dropout_":
        return None
    handler = frame.handler(entry)
    return _finish(handler, frame.module, handler.quantize(frame.module, drop_out(x, p), is_own=True))


_MASKED_FUNCTIONS = {"relu": _relu, "dropout": _dropout}
