"""A tensor that IS low precision: integer codes, and an exponent for each block; never a float copy.

The class of a format says what a code is, `codes` how two of up to 4 bits share a byte, and `qtensor_dispatch` what PyTorch's
operations do with a QTensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from . import operators
from .code_memory import CodeLayout, check_codes, check_layout, check_view, code_layout
from .codes import FLOATS, decode_values, encode_exactly, encode_op, pack_codes, unpack_codes
from .formats import FORMATS, Format, check_format, check_holds, parse
from .operators import Rounding
from .random import Key

__all__ = ["QTensor", "decoded", "decoded_as", "encode", "encode_on_grid", "encode_rounded", "one_code_a_byte"]


class QTensor(torch.Tensor):
    """Codes of a tensor of the given shape; `decode` gives it back in the given dtype, exactly unless that was changed.

    ``.to(dtype)`` keeps the codes. A block of floats below or above the range of a half precision decodes to the nearest
    numbers that it has, as for any tensor; what is written from then on is on the grid clipped to its range.

    It is a tensor to PyTorch: operations compute with the decoded numbers and return plain tensors, and what autograd saves
    is the codes. Views of it are QTensors over the same codes. What is written into it, by ``copy_`` or any other operation
    in place, is rounded to nearest.
    """

    codes: Tensor
    exponents: Tensor | None
    format: Format
    base_shape: torch.Size  # the shape of the tensor that the codes stand for; a view may have another one
    is_view: bool
    _layout: CodeLayout | None  # None for codes that have no memory
    _memory: Tensor  # of the decoded numbers, if it was asked for; see `qtensor_memory`

    dispatch: ClassVar[Callable[[Any, Any, Any], Any]]  # set by `qtensor_dispatch`
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, codes: Tensor, exponents: Tensor | None, format: Format, shape: torch.Size, dtype: torch.dtype,
        view: tuple[Sequence[int], Sequence[int], Any] | None = None, layout: CodeLayout | None = None,
    ) -> QTensor:  # fmt: skip
        if type(codes) is Tensor:
            layout = layout or _checked_layout(format, torch.Size(shape), dtype)
            check_layout(layout, codes, exponents, may_be_freed=True)
            if view is not None:
                check_view(view, layout.shape)
        else:
            check_codes(codes, exponents, format, torch.Size(shape))
        return cls._wrap(codes, exponents, format, torch.Size(shape), dtype, view, layout)

    @classmethod
    def _wrap(
        cls, codes: Tensor, exponents: Tensor | None, format: Format, shape: torch.Size, dtype: torch.dtype,
        view: tuple[Sequence[int], Sequence[int], Any] | None, layout: CodeLayout | None,
    ) -> QTensor:  # fmt: skip
        """Return a QTensor over codes that were checked."""
        if torch.is_inference_mode_enabled():  # views of it can be taken inside and outside of that mode
            with torch.inference_mode(False):
                return cls._wrap(codes, exponents, format, shape, dtype, view, layout)
        base_strides = contiguous_strides(shape)
        size, strides, offset = view or (shape, base_strides, 0)
        self: QTensor = torch.Tensor._make_wrapper_subclass(
            cls, size, strides=strides, storage_offset=offset, dtype=dtype, device=codes.device
        )
        self.codes, self.exponents, self.format, self.base_shape = codes, exponents, format, shape
        self._layout = layout
        self.is_view = view is not None and (tuple(size) != tuple(shape) or tuple(strides) != base_strides)
        return self

    def view_codes(self, size: Sequence[int], strides: Sequence[int], offset: Any) -> QTensor:
        """Return a view over the same codes, which are checked again before they are read."""
        make: Any = QTensor._wrap if type(self.codes) is Tensor else QTensor
        view = size, strides, offset
        return cast(
            QTensor, make(self.codes, self.exponents, self.format, self.base_shape, self.dtype, view, self._layout)
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if _find_compiler() is not None:  # eager code that a compiled function falls back to stays eager
            return _dispatch_untraced(func, args, kwargs or {})
        return cls.dispatch(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = ["codes"] if self.exponents is None else ["codes", "exponents"]
        return names, (self.format, self.base_shape, self.dtype, self.storage_offset())

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], about: tuple[Any, ...], size: Sequence[int], strides: Sequence[int]
    ) -> QTensor:
        format, base_shape, dtype, offset = about
        return cls(parts["codes"], parts.get("exponents"), format, base_shape, dtype, (size, strides, offset))

    def _stable_hash_for_caching(self) -> str:
        """Return what tells compiled code for this tensor from code for others; the compiler asks for it."""
        about = (self.base_shape, self.shape, self.stride(), self.storage_offset(), self.dtype, self.device)
        return f"QTensor {self.format} {about} {self.requires_grad}"

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

    def with_codes(self, codes: Tensor, exponents: Tensor | None, dtype: torch.dtype | None = None) -> QTensor:
        """Return a QTensor like this one, or a view like this one, over other codes."""
        view = (self.shape, self.stride(), self.storage_offset()) if self.is_view else None
        layout = self._layout if dtype is None else None
        return QTensor(codes, exponents, self.format, self.base_shape, dtype or self.dtype, view, layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> QTensor:
        if id(self) not in memo:
            self.check()
            other = self.with_codes(copy.deepcopy(self.codes, memo), copy.deepcopy(self.exponents, memo))
            memo[id(self)] = nn.Parameter(other, self.requires_grad) if isinstance(self, nn.Parameter) else other
            memo[id(self)].requires_grad_(self.requires_grad)
            memo[id(self)].grad = copy.deepcopy(self.grad, memo)
        return cast(QTensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        view = (tuple(self.shape), self.stride(), self.storage_offset()) if self.is_view else None
        self.check()
        about = (self.codes, self.exponents, self.format, tuple(self.base_shape), self.dtype, view)
        return _rebuild, (*about, self.requires_grad, isinstance(self, nn.Parameter))

    def share_memory_(self) -> Any:
        raise NotImplementedError("a QTensor has no memory of its own to share; share its codes and exponents")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a QTensor has no memory others could read; decode() it first")

    def check(self) -> None:
        """Raise ValueError if codes or exponents are not what format and shape need, RuntimeError if they were freed."""
        if self._layout is None:
            check_codes(self.codes, self.exponents, self.format, self.base_shape)
        else:
            check_layout(self._layout, self.codes, self.exponents)

    def unpacked(self) -> Tensor:
        """Return the codes, one an element, in `base_shape`. Raise if their memory has changed since they were given."""
        self.check()
        return unpack_codes(self.codes, self.base_shape, self.format)

    def decode_base(self) -> Tensor:
        """Return all numbers that the codes stand for, in `base_shape`; no gradients pass."""
        codes = self.codes
        if self.format.storage_bits <= 4 or codes.shape != self.base_shape or not codes.is_contiguous():
            codes = self.unpacked()
        try:
            return decode_values(codes, self.exponents, self.format, dtype=self.dtype)  # checks the same as `check`
        except ValueError:
            self.check()  # which may know a better reason
            raise

    def decode_detached(self) -> Tensor:
        """Return the numbers of this tensor or view; no gradients pass."""
        values = self.decode_base()
        return values.as_strided(self.shape, self.stride(), self.storage_offset()) if self.is_view else values

    def decode(self) -> Tensor:
        """Return the numbers the codes stand for as a plain tensor; gradients pass through."""
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self.decode_detached()
        tracked: Any = _Decode
        return cast(Tensor, tracked.apply(self))

    def overwrite(self, values: Tensor) -> None:
        """Replace all numbers of `base_shape` by others, rounded to nearest."""
        self.check()
        new = encode(values, self.format)
        self.codes.copy_(new.codes)
        if self.exponents is not None and new.exponents is not None:
            self.exponents.copy_(new.exponents)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"QTensor({self.format}, shape={tuple(self.shape)}, {self.nbytes} bytes, device={self.device}{grad})"


_dispatch_untraced = torch._disable_dynamo(lambda *args: QTensor.dispatch(*args))  # type: ignore[attr-defined]
_find_compiler: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: "unknown")


class _OneCodeAByte(QTensor):
    """Codes of up to 4 bits as kernels take them, not two in a byte."""

    def unpacked(self) -> Tensor:
        self.check()
        return self.codes


def one_code_a_byte(q: QTensor) -> QTensor:
    """Return q, or if two of its codes share a byte a copy with one in each, over the same exponents."""
    if q.format.storage_bits > 4:
        return q
    layout = code_layout(q.format, q.base_shape, packed=False)
    return _OneCodeAByte(q.unpacked().contiguous(), q.exponents, q.format, q.base_shape, q.dtype, layout=layout)


class _Decode(torch.autograd.Function):
    """Decoding, straight through for autograd."""

    @staticmethod
    def forward(ctx: Any, q: QTensor) -> Tensor:
        return q.decode_detached()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def decoded(t: Tensor) -> Tensor:
    """Return the numbers of a tensor, packed or not, as a plain tensor; gradients pass through."""
    return t.decode() if isinstance(t, QTensor) else t


def decoded_as(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a tensor in a dtype, those of a packed one exactly as its codes have them; no gradients pass."""
    if isinstance(t, QTensor):
        return (t if t.dtype is dtype else t.with_codes(t.codes, t.exponents, dtype)).decode_detached()
    return t.to(dtype)


def encode(x: Tensor, format: str | Format, rounding: Rounding = "nearest", key: Key | None = None) -> QTensor:
    """Round x to a format and return its codes. Numbers already on the grid are not changed: decoding gives back x."""
    parsed = parse(format)
    return encode_rounded(operators.quantize(x.detach(), parsed, rounding, key), parsed)


def encode_rounded(x: Tensor, format: Format) -> QTensor:
    """Return the codes of numbers that were rounded to the format; they are not rounded again."""
    values = x if x.dtype in FLOATS else x.to(torch.float32)
    codes, exponents = encode_op(values.contiguous(), str(format))
    return _from_codes(codes, exponents, format, x)


def encode_on_grid(x: Tensor, format: Format) -> QTensor | None:
    """Return the codes of numbers that should be on the grid already; None if one is not. Zeros may lose their sign."""
    values = x.detach().contiguous()
    if x.dtype not in FLOATS:
        values = values.to(torch.float32)
        if x.dtype == torch.float64 and not torch.equal(values.double(), x):
            return None
    found = encode_exactly(values, format) or encode_exactly(values + 0.0, format)  # which makes -0 a 0
    return None if found is None else _from_codes(*found, format, x)


def _from_codes(codes: Tensor, exponents: Tensor, format: Format, x: Tensor) -> QTensor:
    """Return a QTensor like x over unpacked codes."""
    packed = pack_codes(codes, format)
    return QTensor(packed, exponents if format.has_exponents else None, format, x.shape, x.dtype)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _rebuild(*parts: Any) -> Tensor:
    """Return the tensor that `QTensor.__reduce_ex__` took apart; raise ValueError if a file holds anything else."""
    try:
        codes, exponents, format, base_shape, dtype, view, requires_grad, is_parameter = parts
        format, shape = check_format(format), torch.Size(base_shape)
        if not (isinstance(dtype, torch.dtype) and type(requires_grad) is bool and type(is_parameter) is bool):
            raise ValueError(f"dtype and two flags are expected, got {dtype!r}, {requires_grad!r}, {is_parameter!r}")
        if not (view is None or (type(view) is tuple and len(view) == 3)):
            raise ValueError(f"a view must be size, strides and offset, got {view!r}")
        check_codes(codes, exponents, format, shape)
        q = QTensor(codes, exponents, format, shape, dtype, view)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"a stored QTensor is damaged: {error}") from error
    if type(codes) is Tensor and not codes.is_meta and not format.are_codes(q.unpacked(), exponents):
        raise ValueError(f"a stored QTensor is damaged: some of its codes stand for no number of {format}")
    return nn.Parameter(q, requires_grad) if is_parameter else q.requires_grad_(requires_grad)


@lru_cache(maxsize=4096)
def _checked_layout(format: Format, shape: torch.Size, dtype: torch.dtype) -> CodeLayout:
    """Return the layout of a QTensor; raise if its dtype cannot hold the numbers of the format."""
    layout = code_layout(format, shape)
    check_holds(dtype, format)
    return layout


torch.serialization.add_safe_globals([_rebuild, *FORMATS])  # torch.load may take these for data
