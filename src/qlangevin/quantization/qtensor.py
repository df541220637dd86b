"""A tensor that IS low precision: integer codes, and an exponent for each block; never a float copy.

`codes` says what a code is. Up to 4 bits two of them share a byte, the first in the low half.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import operators
from .codes import encode_exactly, encode_op, values_of
from .formats import BlockFloat, FixedPoint, Float, Format, check_holds, parse
from .operators import Rounding
from .random import Key

__all__ = ["QTensor", "encode", "encode_on_grid", "encode_rounded"]

aten = torch.ops.aten


class QTensor(torch.Tensor):
    """Codes of a tensor of the given shape; `decode` gives it back, exactly, in the given dtype.

    It is a tensor to PyTorch: operations compute with the decoded numbers and return plain tensors, and what autograd saves
    is the codes. Views of it are QTensors over the same codes. What is written into it, by ``copy_`` or any other operation
    in place, is rounded to nearest.
    """

    codes: Tensor
    exponents: Tensor | None
    format: Format
    whole: torch.Size  # the shape of what the codes stand for; of a view, that of the tensor it looks at
    is_view: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, codes: Tensor, exponents: Tensor | None, format: Format, shape: torch.Size, dtype: torch.dtype,
        view: tuple[Sequence[int], Sequence[int], Any] | None = None,
    ) -> QTensor:  # fmt: skip
        size, strides, offset = view or (shape, _contiguous_strides(shape), 0)
        with torch.inference_mode(False):  # so that views of it can be taken inside and outside of that mode
            self: QTensor = torch.Tensor._make_wrapper_subclass(
                cls, size, strides=strides, storage_offset=offset, dtype=dtype, device=codes.device
            )
        self.codes, self.exponents, self.format, self.whole = codes, exponents, format, torch.Size(shape)
        self.is_view = view is not None and (
            self.shape != self.whole or self.stride() != _contiguous_strides(self.whole)
        )
        return self

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = ["codes"] if self.exponents is None else ["codes", "exponents"]
        return names, (self.format, self.whole, self.dtype, self.storage_offset())

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], about: tuple[Any, ...], size: Sequence[int], strides: Sequence[int]
    ) -> QTensor:
        format, whole, dtype, offset = about
        return cls(parts["codes"], parts.get("exponents"), format, whole, dtype, (size, strides, offset))

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of codes and exponents: all the memory the numbers take."""
        return self.codes.nbytes + (self.exponents.nbytes if self.exponents is not None else 0)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        if new.shape != self.shape:
            raise ValueError(f"data must keep the shape {tuple(self.shape)} of a QTensor, got {tuple(new.shape)}")
        with torch.no_grad():
            self.copy_(new)

    def __deepcopy__(self, memo: dict[int, Any]) -> QTensor:
        if id(self) not in memo:
            codes, exponents = copy.deepcopy(self.codes, memo), copy.deepcopy(self.exponents, memo)
            other = _like(self, codes, exponents)
            memo[id(self)] = nn.Parameter(other, self.requires_grad) if isinstance(self, nn.Parameter) else other
            memo[id(self)].requires_grad_(self.requires_grad)
            memo[id(self)].grad = copy.deepcopy(self.grad, memo)
        return cast(QTensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        view = (tuple(self.shape), self.stride(), self.storage_offset()) if self.is_view else None
        about = (self.codes, self.exponents, self.format, tuple(self.whole), self.dtype, view)
        return _rebuild, (*about, self.requires_grad, isinstance(self, nn.Parameter))

    def share_memory_(self) -> Any:
        raise NotImplementedError("a QTensor has no memory of its own to share; share its codes and exponents")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a QTensor has no memory others could read; decode() it first")

    def unpacked(self) -> Tensor:
        """The codes, one an element, in the shape of `whole`."""
        if self.format.storage_bits > 4:
            return self.codes.view(self.whole)
        low, high = (self.codes << 4) >> 4, self.codes >> 4  # arithmetic shifts extend the sign
        return torch.stack((low, high), 1).view(-1)[: self.whole.numel()].view(self.whole)

    def decode_whole(self) -> Tensor:
        codes = self.unpacked()
        if type(codes) is Tensor and codes.data_ptr() == 0 and codes.numel() > codes.untyped_storage().nbytes():
            raise RuntimeError("the codes of these weights were let go of: a sharded layer has them while it computes")
        values = values_of(codes, self.exponents, self.format)
        return values if self.dtype == torch.float32 else values.to(self.dtype)

    def decode(self) -> Tensor:
        """The numbers the codes stand for, as a plain tensor; gradients pass through."""
        tracked: Any = _Decode
        return cast(Tensor, tracked.apply(self)) if self.requires_grad and torch.is_grad_enabled() else _plain(self)

    def overwrite(self, values: Tensor) -> None:
        """Put other numbers in place of all of `whole`, rounded to nearest."""
        new = encode(values, self.format)
        self.codes.copy_(new.codes)
        if self.exponents is not None and new.exponents is not None:
            self.exponents.copy_(new.exponents)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"QTensor({self.format}, shape={tuple(self.shape)}, {self.nbytes} bytes, device={self.device}{grad})"

    @classmethod
    @torch._disable_dynamo  # type: ignore[attr-defined]  # eager code that a compiled function falls back to stays eager
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if (special := _SPECIAL.get(func)) is not None and isinstance(args[0], QTensor):
            result = special(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if func.is_view:
            return _view(func, *args, **kwargs)
        if func._schema.is_mutable:
            return _write(func, args, kwargs)
        return func(*_decoded(args, _plain), **{name: _decoded([a], _plain)[0] for name, a in kwargs.items()})


def encode(x: Tensor, format: str | Format, rounding: Rounding = "nearest", key: Key | None = None) -> QTensor:
    """x rounded to a format, as codes. For numbers already on the grid nothing is rounded: decoding gives back x."""
    parsed = parse(format)
    return encode_rounded(operators.quantize(x.detach(), parsed, rounding, key), parsed)


def encode_rounded(x: Tensor, format: Format) -> QTensor:
    """Return the codes of numbers that were rounded to the format; they are not rounded again."""
    codes, exponents = encode_op(x.to(torch.float32).contiguous(), str(format))
    return _packed(codes, exponents, format, x)


def encode_on_grid(x: Tensor, format: Format) -> QTensor | None:
    """Codes of numbers that should be on the grid already; None if one of them is not. Zeros may lose their sign."""
    values = x.detach().to(torch.float32).contiguous()
    if x.dtype == torch.float64 and not torch.equal(values.double(), x):
        return None
    found = encode_exactly(values, format) or encode_exactly(values + 0.0, format)  # which makes -0 a 0
    return None if found is None else _packed(*found, format, x)


def _packed(codes: Tensor, exponents: Tensor, format: Format, x: Tensor) -> QTensor:
    """Codes, one an element, as a QTensor like x."""
    if format.storage_bits == 4:
        pairs = torch.nn.functional.pad(codes.view(-1), (0, codes.numel() % 2)).view(-1, 2)
        codes = (pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)
    return QTensor(codes, exponents if isinstance(format, BlockFloat) else None, format, x.shape, x.dtype)


def _rebuild(*parts: Any) -> Tensor:
    """What `QTensor.__reduce_ex__` took apart."""
    codes, exponents, format, whole, dtype, view, requires_grad, is_parameter = parts
    q = QTensor(codes, exponents, format, torch.Size(whole), dtype, view)
    return nn.Parameter(q, requires_grad) if is_parameter else q.requires_grad_(requires_grad)


class _Decode(torch.autograd.Function):
    """Decoding, straight through for autograd."""

    @staticmethod
    def forward(ctx: Any, q: QTensor) -> Tensor:
        return _plain(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _plain(q: QTensor) -> Tensor:
    values = q.decode_whole()
    return values.as_strided(q.shape, q.stride(), q.storage_offset()) if q.is_view else values


def _decoded(arguments: Any, decode: Callable[[QTensor], Tensor]) -> list[Any]:
    """Arguments of an operation, plain tensors for QTensors; also in lists of tensors."""
    plain = []
    for a in arguments:
        if isinstance(a, QTensor):
            a = decode(a)
        elif type(a) in (list, tuple) and any(isinstance(one, QTensor) for one in a):
            a = _decoded(a, decode)
        plain.append(a)
    return plain


# ---- what PyTorch's operations do with a QTensor, unless it is to decode it


def _like(q: QTensor, codes: Tensor, exponents: Tensor | None, dtype: torch.dtype | None = None) -> QTensor:
    view = (q.shape, q.stride(), q.storage_offset()) if q.is_view else None
    return QTensor(codes, exponents, q.format, q.whole, dtype or q.dtype, view)


def _alias(func: Any, q: QTensor) -> QTensor:
    return _like(q, q.codes, q.exponents)


def _clone(func: Any, q: QTensor, *, memory_format: Any = torch.preserve_format) -> Tensor:
    strides = q.stride()
    order = sorted(range(q.dim()), key=lambda d: -strides[d])
    permuted = tuple(strides[d] for d in order) == _contiguous_strides([q.shape[d] for d in order])
    if q.is_view and not (memory_format == torch.preserve_format and permuted and q.numel() == q.whole.numel()):
        return _plain(q).clone(memory_format=memory_format)  # parts of it may be the same numbers
    return _like(q, q.codes.clone(), None if q.exponents is None else q.exponents.clone())


def _to(func: Any, q: QTensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented  # then it is decoded
    if dtype is not None:
        check_holds(dtype, q.format)
    exponents = None if q.exponents is None else q.exponents.to(device, copy=True)
    return _like(q, q.codes.to(device, copy=True), exponents, dtype)


def _copy(func: Any, q: QTensor, source: Tensor, non_blocking: bool = False) -> Any:
    """Codes into codes of the same format; anything else is rounded, like every other number written."""
    alike = isinstance(source, QTensor) and source.format == q.format and source.whole == q.whole
    if not alike or q.is_view or source.is_view:  # type: ignore[attr-defined]
        return NotImplemented
    q.codes.copy_(source.codes, non_blocking)  # type: ignore[attr-defined]
    if q.exponents is not None:
        q.exponents.copy_(source.exponents, non_blocking)  # type: ignore[attr-defined]
    return q


def _embedding(func: Any, q: QTensor, indices: Tensor, *_: Any) -> Any:
    """Only the rows asked for are decoded."""
    if q.is_view:
        return NotImplemented
    at, exponents = indices.reshape(-1), q.exponents
    if isinstance(q.format, BlockFloat) and q.format.block != "tensor" and exponents is not None:
        exponents = exponents.view(q.whole[0], -1).index_select(0, at).reshape(-1)
    values = values_of(q.unpacked().index_select(0, at), exponents, q.format).to(q.dtype)
    return values.view(*indices.shape, q.whole[1])


def _new_zeros(func: Any, q: QTensor, *_: Any, **__: Any) -> Any:
    if hasattr(q, "_fsdp_orig_uid"):  # the first thing `fully_shard` leaves on a parameter
        raise TypeError(
            "fully_shard would make floats of packed parameters; qlangevin.distributed.shard(model) keeps the codes"
        )
    return NotImplemented


_SPECIAL: dict[Any, Any] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten._to_copy.default: _to,
    aten.copy_.default: _copy,
    aten.embedding.default: _embedding,
    aten.new_zeros.default: _new_zeros,
}


def _view(func: Any, q: QTensor, *args: Any, **kwargs: Any) -> Any:
    """A view is found on a tensor without numbers; it looks at the same codes."""
    blank = torch.empty(q.whole.numel(), dtype=q.dtype, device="meta")
    seen = func(blank.as_strided(q.shape, q.stride(), q.storage_offset()), *args, **kwargs)

    def over_codes(v: Tensor) -> QTensor:
        view = (v.shape, v.stride(), v.storage_offset())
        return QTensor(q.codes, q.exponents, q.format, q.whole, q.dtype, view)

    if isinstance(seen, Tensor) and seen.dtype != q.dtype:  # other bits of the same memory, which there is not
        return func(_plain(q), *args, **kwargs)
    return over_codes(seen) if isinstance(seen, Tensor) else [over_codes(v) for v in seen]


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations in place: done on the decoded numbers, which are then rounded to nearest."""
    if torch.Tag.inplace_view in func.tags or func is aten.resize_.default:
        raise NotImplementedError(
            f"{func} changes the shape of a tensor in place, which a QTensor cannot do; decode() it"
        )
    arguments = func._schema.arguments
    given = {a.name: kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(arguments)}
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    written = {id(t.codes): t for name in names for t in _tensors(given[name]) if isinstance(t, QTensor)}
    values = {key: q.decode_whole() for key, q in written.items()}  # one for all views of the same codes

    def open_up(q: QTensor) -> Tensor:
        if id(q.codes) not in values:
            return _plain(q)
        return values[id(q.codes)].as_strided(q.shape, q.stride(), q.storage_offset())

    result = func(*_decoded(args, open_up), **{name: _decoded([a], open_up)[0] for name, a in kwargs.items()})
    for key, q in written.items():
        q.overwrite(values[key])
    return args[0] if isinstance(result, Tensor) and isinstance(args[0], QTensor) else result


def _tensors(argument: Any) -> list[Any]:
    return list(argument) if isinstance(argument, (list, tuple)) else [argument]


torch.serialization.add_safe_globals([_rebuild, BlockFloat, FixedPoint, Float])  # torch.load may take these for data
