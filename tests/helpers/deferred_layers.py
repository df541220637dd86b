"""Kernels as a GPU has them, on the CPU: what a host may ask them and what it must not wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from qlangevin import Format, Key
from qlangevin.lowering.functions import find_scope
from qlangevin.lowering.handler import find_handler
from qlangevin.quantization import backend, rounding

F = TypeVar("F", bound=Callable[..., Any])
aten = torch.ops.aten


def counted(method: F) -> F:
    """Note the call, and hide what it does from `NoWaiting`: a device would do it."""

    @wraps(method)
    def call(self: DeferredKernels, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(method.__name__)
        with _disable_current_modes(), torch.no_grad():
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]


class DeferredKernels:
    """`Kernels` by the PyTorch path. Like kernels they write behind autograd's back, which counts up no version."""

    deferred = True
    floats = frozenset((torch.float32, torch.bfloat16, torch.float16))

    def __init__(self) -> None:
        self.calls: list[str] = []

    @counted
    def quantize(
        self, x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, variance: Tensor | None = None,
        out: Tensor | None = None, positive: Tensor | None = None, move: Tensor | None = None, *,
        step: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert x.is_contiguous()
        assert move is None
        key = key if step is None else replace(key, step=int(step))
        values = x.float()
        if rounding_ == "corrected":
            assert variance is not None
            q = rounding.corrected_values(values, variance, format, "exact", key)
        else:
            q = rounding.quantize_values(values, format, rounding_, key, purpose)
        if positive is not None:
            assert positive.dtype == torch.int8
            q = torch.where(positive > 0, q, 0.0)
        return write(torch.empty_like(x) if out is None else out, q)

    @counted
    def quantize_with_codes(
        self, x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, codes: tuple[Tensor, Tensor], /, *,
        spoiled: Tensor | None = None, step: Tensor | None = None,
    ) -> bool:  # fmt: skip
        key = key if step is None else replace(key, step=int(step))
        q = rounding.quantize_values(x.float(), format, rounding_, key, purpose)
        return write_codes(q, x, codes, format, spoiled)

    @counted
    def relu_with_codes(
        self, x: Tensor, out: Tensor, codes: Tensor, exponents: Tensor, format: Format, /, *, spoiled: Tensor | None = None
    ) -> bool:  # fmt: skip
        return write_codes(x.clamp_min(0), out, (codes, exponents), format, spoiled)

    @counted
    def encode(self, values: Tensor, codes: Tensor, exponents: Tensor, format: Format, /) -> None:
        write_codes(values, torch.empty_like(values), (codes, exponents), format, None)

    @counted
    def decode(
        self, values: Tensor, codes: Tensor, exponents: Tensor | None, format: Format, /, *, spoiled: Tensor | None = None
    ) -> None:  # fmt: skip
        write(values, format.decode(codes, exponents))
        if spoiled is not None and bool(spoiled):
            write(values, torch.full_like(values, torch.nan))

    def encode_exactly(self, *_: Any) -> bool:
        raise AssertionError("the host would wait for the device")

    def first_not_finite(self, *_: Any) -> int:
        raise AssertionError("the host would wait for the device")

    def sgld(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("no step is taken with these")

    def begin_step(self, *_: Any) -> None:
        raise NotImplementedError("no step is taken with these")


def write(target: Tensor, values: Tensor) -> Tensor:
    target.data.copy_(values)  # .data has a version counter of its own
    return target


def write_codes(
    values: Tensor, out: Tensor, codes: tuple[Tensor, Tensor], format: Format, spoiled: Tensor | None
) -> bool:
    assert values.is_contiguous()
    assert spoiled is None or spoiled.shape == (1,)
    write(out, values)
    if bool(values.isnan().any()):
        if spoiled is not None:
            write(spoiled, torch.ones(1))
        values = torch.zeros_like(values)  # any codes will do
    for target, part in zip(codes, format.encode(values.float()), strict=True):
        assert target.shape == part.shape
        write(target, part)
    return True


@contextmanager
def deferred_cpu() -> Iterator[DeferredKernels]:
    """Make `DeferredKernels` the kernels of the CPU within this context."""
    before, kernels = backend.unregister("cpu"), DeferredKernels()
    backend.register("cpu", kernels)
    try:
        yield kernels
    finally:
        backend.unregister("cpu")
        if before is not None:
            backend.register("cpu", before)


class NoWaiting(TorchDispatchMode):
    """Raise where a host would wait for numbers of a device. Those of a lowered model's counts are the host's own."""

    WAITS = (
        aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2,
        aten.bincount, aten.repeat_interleave,
    )  # fmt: skip

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model

    def is_count(self, t: Tensor) -> bool:
        handlers = [find_handler(module) for module in self.model.modules()]
        scopes = [find_scope(module) for module in self.model.modules()]  # functions are known once they are called
        handlers += [handler for scope in scopes if scope is not None for handler in scope.handlers.values()]
        return any(t.data_ptr() == handler.count.data_ptr() for handler in handlers if handler is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.WAITS and not self.is_count(args[0]):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
