"""Registry of fused kernels: one backend for each type of device.

A package of kernels registers itself: `native` does for the CPU, and `gpu` offers to load kernels of other devices when the first
tensor there asks for them. Code that has a fast path asks `kernels_for` its tensors, and runs plain PyTorch if the answer is
None. Results are the same to the bit. `suspended` turns kernels off within a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .formats import Format
from .random import Key

__all__ = [
    "Kernels",
    "Moments",
    "TensorStep",
    "Velocity",
    "is_deferred",
    "kernels_for",
    "offer",
    "register",
    "suspended",
    "unregister",
]


class Moments(NamedTuple):
    """Running means of squared gradients, in units of 1/scale²: numbers of any dtype, or a QTensor.

    The scale is a float32 on the device for kernels that the host does not wait for.
    """

    values: Tensor
    scale: float | Tensor


class Velocity(NamedTuple):
    """Velocities in a unit: numbers of any dtype, or a QTensor; and the random bits of their own that they are drawn with."""

    values: Tensor
    unit: float
    key: Key


class TensorStep(NamedTuple):
    """One tensor of a step: all that the step reads and writes of it, on either path. What is optional comes last."""

    theta: Tensor  # numbers, or a QTensor
    gradient: Tensor
    key: Key
    accumulator: Tensor | None = None  # takes the update in theta's place; then theta = Q_W(accumulator)
    center: Tensor | None = None  # w0 of the localization: numbers of any dtype, or a QTensor
    mask: Tensor | None = None  # a bit a weight, in uint8; weights whose bit is 0 do not move
    moments: Moments | None = None  # of the preconditioner
    velocity: Velocity | None = None  # of underdamped dynamics

    @property
    def is_plain(self) -> bool:
        """True if the step has nothing beside weights, gradient and accumulator."""
        return self.center is None and self.mask is None and self.moments is None and self.velocity is None


class Rms(Protocol):
    """A preconditioner as kernels see it; see `sampling.preconditioner`."""

    decay: float
    eps: float
    format: Any
    freeze_after: int | None

    def is_frozen(self, step: int) -> bool: ...


class Dynamics(Protocol):
    """Settings of a step that is more than SGLD's, as kernels see them; see `sampling.settings`."""

    @property
    def pull(self) -> float: ...
    @property
    def rms(self) -> Rms | None: ...
    def velocity_format(self, theta: Tensor) -> str | None: ...
    def underdamped(self, unit: float) -> tuple[float, ...]: ...


class Kernels(Protocol):
    """Kernels of one type of device, for contiguous tensors. Codes are unpacked: one integer an element.

    Deferred kernels run behind the host's back, and the host must not wait for them: what they cannot return they note in
    flags on the device. ``spoiled`` is an int32, 0 before and 1 after if a tensor holds a NaN, which has no code.
    """

    deferred: bool
    floats: frozenset[torch.dtype]  # of numbers that are rounded and of parameters that are stepped

    def quantize(
        self, x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, variance: Tensor | None = None,
        out: Tensor | None = None, positive: Tensor | None = None, move: Tensor | None = None, *, step: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return Q(x), or Q(x + move), written to ``out`` if given, which may be x.

        It is zero where ``positive``, int8 codes, is zero or less. The sum is a `Mean`, which is not rounded first. ``step``, an
        int64 on the device, takes the place of the key's.
        """

    def sgld(self, *args: Any, **kwargs: Any) -> None:
        """Step several tensors of a sampler, in place, in one call; `native.sgld` names the arguments.

        Deferred kernels also take ``slots``, ``counts`` and ``flags`` of `begin_step`: the number of a step is then the count,
        and nothing changes unless flags[0] is NO_ERROR; flags[1] = flags[0] afterwards.
        """

    def begin_step(self, gradients: list[Tensor], slots: list[int], counts: Tensor, flags: Tensor, /) -> None:
        """Begin a step of tensors that have numbers, their slots: count it, and look for gradients that are not finite.

        ``counts`` is int64, ``flags`` two int32, (now, before). If flags[1] is NO_ERROR, count up counts[slot], and lower
        flags[0] to the slot of a gradient that holds an infinity or a NaN. Deferred kernels only.
        """

    def quantize_with_codes(
        self, x: Tensor, format: Format, rounding_: str, key: Key, purpose: int, codes: tuple[Tensor, Tensor], /, *,
        spoiled: Tensor | None = None, step: Tensor | None = None,
    ) -> bool:  # fmt: skip
        """Round x in place and write codes and exponents of the result; return False if it holds a NaN, which has no code."""

    def relu_with_codes(
        self,
        x: Tensor,
        out: Tensor,
        codes: Tensor,
        exponents: Tensor,
        format: Format,
        /,
        *,
        spoiled: Tensor | None = None,
    ) -> bool:
        """Write relu(x) to ``out``, and its codes, for x on the grid; return False if it holds a NaN."""

    def encode(self, values: Tensor, codes: Tensor, exponents: Tensor, format: Format, /) -> None:
        """Write codes and exponents of values on the grid."""

    def decode(
        self,
        values: Tensor,
        codes: Tensor,
        exponents: Tensor | None,
        format: Format,
        /,
        *,
        spoiled: Tensor | None = None,
    ) -> None:
        """Write the values that codes and exponents stand for; NaN throughout if they were spoiled."""

    def encode_exactly(self, values: Tensor, codes: Tensor, exponents: Tensor, format: Format, /) -> bool:
        """Write codes and exponents of any values; return True if they decode to the same bits."""

    def first_not_finite(self, tensors: list[Tensor], /) -> int:
        """Return the index of the first tensor that holds an infinity or a NaN, or -1."""


NO_ERROR = 2**31 - 1  # in flags, where there could be the slot of a tensor

_backends: dict[str, Kernels] = {}
_loaders: list[Callable[[str], Kernels | None]] = []
_without: set[str] = {"cpu", "meta"}  # types of devices for which there is nothing to load
_FLOAT64 = torch.float64


def register(device_type: str, kernels: Kernels) -> None:
    """Make these the kernels of a type of device, such as "cpu"."""
    _backends[device_type] = kernels


def unregister(device_type: str) -> Kernels | None:
    """Remove and return the kernels of a type of device."""
    return _backends.pop(device_type, None)


def is_deferred(device_type: str) -> bool:
    """Return True if a type of device has kernels that the host must not wait for."""
    kernels = _backends.get(device_type) or _load(device_type)
    return kernels is not None and kernels.deferred


class _Suspension:
    """One entered `suspended`."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels


# The suspensions that a context has entered or inherited, and those of all contexts that have not ended. A suspension ends
# for all who inherited it, in whatever order and wherever it ends: nothing is restored that another one has changed.
_entered: ContextVar[tuple[_Suspension, ...]] = ContextVar("suspended kernels", default=())
_lasting: set[_Suspension] = set()


@contextmanager
def suspended(kernels: Kernels) -> Iterator[None]:
    """Have `kernels_for` return None for these kernels, in this thread and in what inherits its `contextvars`."""
    suspension = _Suspension(kernels)
    _lasting.add(suspension)
    _entered.set((*(s for s in _entered.get() if s in _lasting), suspension))
    try:
        yield
    finally:
        _lasting.discard(suspension)


def _unless_suspended(kernels: Kernels | None) -> Kernels | None:
    return None if any(s in _lasting and s.kernels is kernels for s in _entered.get()) else kernels


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """Return the kernels of the device that these tensors are on; None for float64, which no kernel computes in.

    Raise ValueError if they are on several devices.
    """
    first, is_float64 = tensors[0], False
    on_cpu = first.is_cpu  # this runs at every operation, and is_cpu is faster than device.type
    for t in tensors:
        if t is not first and (not t.is_cpu if on_cpu else t.device != first.device):
            raise ValueError(
                f"the tensors of one operation must be on one device, got {first.device} and {t.device}; move one of them, "
                f"with .to({str(first.device)!r}) or .to({str(t.device)!r})"
            )
        is_float64 = is_float64 or t.dtype is _FLOAT64
    if is_float64:
        return None
    found = _backends.get("cpu") if on_cpu else _backends.get(first.device.type) or _load(first.device.type)
    return _unless_suspended(found) if _lasting else found


def offer(load: Callable[[str], Kernels | None]) -> None:
    """Have the kernels of a type of device that has none loaded by this function when they are first asked for."""
    _loaders.append(load)


def _load(device_type: str) -> Kernels | None:
    """Load the kernels of a type of device when its first tensor asks for them."""
    if device_type in _without:
        return None
    for load in _loaders:
        if (kernels := load(device_type)) is not None:
            register(device_type, kernels)
            return kernels
    _without.add(device_type)
    return None
