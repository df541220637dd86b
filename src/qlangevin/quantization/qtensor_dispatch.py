"""PyTorch's operations on QTensors: one handler for each that should not simply decode.

Views look at the same codes. Operations in place compute with the decoded numbers, which are then rounded to nearest. All
other operations without a handler get the decoded numbers and return plain tensors. Importing this module installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .codes import decode_values
from .formats import check_holds
from .qtensor import QTensor, contiguous_strides

__all__ = ["dispatch"]

aten = torch.ops.aten
Handler = TypeVar("Handler", bound=Callable[..., Any])
_HANDLERS: dict[Any, Callable[..., Any]] = {}


def implements(*operations: Any) -> Callable[[Handler], Handler]:
    """Register a handler of operations on a QTensor; it may return NotImplemented to have the tensor decoded."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(operations, handler))
        return handler

    return register


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation that has a QTensor among its arguments."""
    if (handler := _HANDLERS.get(func)) is not None and isinstance(args[0], QTensor):
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if func.is_view:
        return _view(func, *args, **kwargs)
    if func._schema.is_mutable:
        return _write(func, args, kwargs)
    return _call(func, args, kwargs, QTensor.decode_detached)


QTensor.dispatch = staticmethod(dispatch)


# ---- operations that keep the codes


@implements(aten.detach.default, aten.alias.default)
def _alias(q: QTensor) -> QTensor:
    return q.view_codes(q.shape, q.stride(), q.storage_offset())


@implements(aten.t.default)
def _transpose(q: QTensor) -> Any:
    if q.dim() > 2:
        return NotImplemented  # has PyTorch raise
    return q.view_codes(q.shape[::-1], q.stride()[::-1], q.storage_offset())


@implements(aten.clone.default)
def _clone(q: QTensor, *, memory_format: Any = torch.preserve_format) -> Tensor:
    if q.is_view and not (memory_format == torch.preserve_format and _is_permutation(q)):
        return q.decode_detached().clone(memory_format=memory_format)
    q.check()
    return q.with_codes(q.codes.clone(), None if q.exponents is None else q.exponents.clone())


def _is_permutation(q: QTensor) -> bool:
    """Return True if a view has every number of the base once, with its dims in another order."""
    strides = q.stride()
    order = sorted(range(q.dim()), key=lambda d: -strides[d])
    dense = tuple(strides[d] for d in order) == contiguous_strides([q.shape[d] for d in order])
    return dense and q.numel() == q.base_shape.numel()


@implements(aten._to_copy.default)
def _to_copy(q: QTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    if dtype is not None:
        check_holds(dtype, q.format)
    q.check()
    exponents = None if q.exponents is None else q.exponents.to(device, copy=True)
    return q.with_codes(q.codes.to(device, copy=True), exponents, dtype)


@implements(aten.copy_.default)
def _copy(q: QTensor, source: Tensor, non_blocking: bool = False) -> Any:
    """Copy codes into codes of the same format; anything else is rounded, like every other number written."""
    if not isinstance(source, QTensor) or q.is_view or source.is_view:
        return NotImplemented
    if source.format != q.format or source.base_shape != q.base_shape:
        return NotImplemented
    q.check()
    source.check()  # or one exponent, say, would be copied to all rows
    q.codes.copy_(source.codes, non_blocking)
    if q.exponents is not None:
        q.exponents.copy_(cast(Tensor, source.exponents), non_blocking)
    return q


@implements(aten.embedding.default)
def _embedding(q: QTensor, indices: Tensor, *_: Any) -> Any:
    """Decode only the rows that are asked for."""
    if q.is_view:
        return NotImplemented
    codes, rows, exponents = q.unpacked(), indices.reshape(-1), q.exponents
    if exponents is not None and not q.format.cuts_blocks(q.base_shape, (0,)):
        exponents = exponents.view(q.base_shape[0], -1).index_select(0, rows).reshape(-1)
    elif exponents is not None and rows.numel() == 0:
        exponents = exponents[:0]  # no numbers have no block
    values = decode_values(codes.index_select(0, rows), exponents, q.format, dtype=q.dtype)
    return values.view(*indices.shape, q.base_shape[1])


@implements(aten.new_zeros.default)
def _new_zeros(q: QTensor, *_: Any, **__: Any) -> Any:
    if hasattr(q, "_fsdp_orig_uid"):  # the first thing `fully_shard` leaves on a parameter
        raise TypeError(
            "fully_shard would make floats of packed parameters; qlangevin.distributed.shard(model) keeps the codes"
        )
    return NotImplemented


# ---- all views, all operations in place, and the rest


def _view(func: Any, q: QTensor, *args: Any, **kwargs: Any) -> Any:
    """Take a view of a tensor without numbers to find its strides; the result looks at the same codes."""
    blank = torch.empty(q.base_shape.numel(), dtype=q.dtype, device="meta")
    seen = func(blank.as_strided(q.shape, q.stride(), q.storage_offset()), *args, **kwargs)

    def over_codes(v: Tensor) -> QTensor:
        view = (v.shape, v.stride(), v.storage_offset())
        return QTensor(q.codes, q.exponents, q.format, q.base_shape, q.dtype, view, q._layout)

    if isinstance(seen, Tensor) and seen.dtype != q.dtype:  # other bits of the same memory, which does not exist
        return func(q.decode_detached(), *args, **kwargs)
    return over_codes(seen) if isinstance(seen, Tensor) else [over_codes(v) for v in seen]


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation in place on the decoded numbers and round them to nearest."""
    if torch.Tag.inplace_view in func.tags or func is aten.resize_.default:
        raise NotImplementedError(
            f"{func} changes the shape of a tensor in place, which a QTensor cannot do; decode() it"
        )
    written = {id(q.codes): q for q in _written(func, args, kwargs)}
    values = {codes: q.decode_base() for codes, q in written.items()}  # shared by all views of the same codes

    def decode(q: QTensor) -> Tensor:
        if id(q.codes) not in values:
            return q.decode_detached()
        return values[id(q.codes)].as_strided(q.shape, q.stride(), q.storage_offset())

    result = _call(func, args, kwargs, decode)
    for codes, q in written.items():
        q.overwrite(values[codes])
    return args[0] if isinstance(result, Tensor) and isinstance(args[0], QTensor) else result


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[QTensor]:
    """Yield the QTensors that an operation writes to, alone or in lists."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = kwargs.get(argument.name, args[i] if i < len(args) else None)
        for t in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(t, QTensor):
                yield t


def _call(func: Any, args: Any, kwargs: Any, decode: Callable[[QTensor], Tensor]) -> Any:
    """Call an operation with plain tensors in place of QTensors, also of those in lists."""

    def plain(argument: Any) -> Any:
        if isinstance(argument, QTensor):
            return decode(argument)
        if type(argument) in (list, tuple) and any(isinstance(one, QTensor) for one in argument):
            return [plain(one) for one in argument]
        return argument

    return func(*map(plain, args), **{name: plain(argument) for name, argument in kwargs.items()})
