"""Kernels that the host must not wait for, on the CPU: by the PyTorch path, with every call counted; and a check for waiting."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from qlangevin.quantization import backend, rounding
from qlangevin.quantization.backend import NO_ERROR, Kernels, TensorStep
from qlangevin.quantization.codes import _encode_exactly
from qlangevin.quantization.formats import Format
from qlangevin.quantization.qtensor import QTensor
from qlangevin.quantization.random import Key
from qlangevin.sampling.settings import StepSettings
from qlangevin.sampling.step import _step_by_pytorch

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Count the calls of a kernel, and let it look at numbers: it runs on the device."""

    @wraps(function)
    def run(self: "DeferredKernels", *args: Any, **kwargs: Any) -> Any:
        self.calls[function.__name__] += 1
        with _disable_current_modes(), backend.suspended(cast(Kernels, self)):
            return function(self, *args, **kwargs)

    return cast(F, run)


class DeferredKernels:
    """Stand-in for the kernels of a GPU."""

    deferred = True
    floats = frozenset({torch.float32, torch.bfloat16, torch.float16})

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    @kernel
    def begin_step(self, gradients: list[Tensor], slots: list[int], counts: Tensor, flags: Tensor) -> None:
        assert all(g.dtype in self.floats and g.is_contiguous() for g in gradients)
        if flags[1] == NO_ERROR:
            counts[slots] += 1
            bad = [slot for g, slot in zip(gradients, slots, strict=True) if not g.isfinite().all()]
            flags[0] = min([int(flags[0]), *bad])

    @kernel
    def sgld(
        self, tensors: Sequence[TensorStep], *, weights: Format | None, gradients: Format | None,
        accumulator: Format | None, rounding: Any, lr: float, weight_decay: float, variance: float, maximize: bool,
        dynamics: StepSettings | None = None, slots: list[int] | None = None, counts: Tensor | None = None,
        flags: Tensor | None = None,
    ) -> None:  # fmt: skip
        if flags is not None and flags[0] != NO_ERROR:
            flags[1] = flags[0]
            return
        kind = type("Settings", (StepSettings,), {"variance": variance})
        for i, t in enumerate(tensors):
            assert t.gradient.dtype in self.floats
            own = t.theta.format if isinstance(t.theta, QTensor) else weights
            names = [None if f is None else str(f) for f in (own, gradients, accumulator)]
            if dynamics is None:
                settings = kind(lr, 1, 0.0, weight_decay, *names, rounding=rounding, maximize=maximize)
            else:
                settings = replace(dynamics, weights=names[0])
            step = t.key.step if counts is None or slots is None else int(counts[slots[i]])
            velocity = None if t.velocity is None else t.velocity._replace(key=t.velocity.key.at(step))
            self._step_one(t._replace(key=t.key.at(step), velocity=velocity), settings)

    def _step_one(self, t: TensorStep, settings: StepSettings) -> None:
        q = t.theta
        if not isinstance(q, QTensor):
            _step_by_pytorch(t, settings)
            return
        values = q.format.decode(q.unpacked(), q.exponents)
        _step_by_pytorch(t._replace(theta=values), settings)
        codes, exponents = q.format.encode(values)
        q.codes.copy_(codes)  # one to a byte, or `unpacked` would have raised
        if q.exponents is not None:
            q.exponents.copy_(exponents)

    @kernel
    def quantize(
        self, x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, variance: Tensor | None = None,
        out: Tensor | None = None, positive: Tensor | None = None, move: Tensor | None = None, *,
        step: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert (out, positive, move) == (None, None, None)
        key = key if step is None else key.at(int(step))
        if variance is not None:
            return rounding.corrected_values(x.float(), variance, format, "exact", key).to(x.dtype)
        return rounding.quantize_values(x.float(), format, rounding_, key, purpose).to(x.dtype)

    @kernel
    def encode(self, values: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> None:
        new, block = format.encode(values)
        codes.copy_(new)
        exponents.copy_(block)

    @kernel
    def decode(
        self, values: Tensor, codes: Tensor, exponents: Tensor | None, format: Format, *, spoiled: Tensor | None = None
    ) -> None:
        assert spoiled is None, "weights are never spoiled"
        values.copy_(format.decode(codes, exponents))

    @kernel
    def encode_exactly(self, values: Tensor, codes: Tensor, exponents: Tensor, format: Format) -> bool:
        found = _encode_exactly(values, format)
        if found is not None:
            codes.copy_(found[0])
            exponents.copy_(found[1])
        return found is not None

    @kernel
    def first_not_finite(self, tensors: list[Tensor]) -> int:
        return next((i for i, t in enumerate(tensors) if not t.isfinite().all()), -1)


@contextmanager
def deferred_kernels(device_type: str = "cpu") -> Iterator[DeferredKernels]:
    """Make the stand-in the kernels of a type of device."""
    before, kernels = backend.unregister(device_type), DeferredKernels()
    backend.register(device_type, cast(Kernels, kernels))
    try:
        yield kernels
    finally:
        backend.unregister(device_type)
        if before is not None:
            backend.register(device_type, before)


class NoWaiting(TorchDispatchMode):
    """A context in which reading a number from a device is an error."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    WAITING = frozenset(
        {"_local_scalar_dense", "item", "nonzero", "nonzero_static", "masked_select", "is_nonzero", "equal", "unique2"}
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in self.WAITING:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))
