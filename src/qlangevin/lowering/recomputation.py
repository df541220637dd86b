"""Intermediate results of a leaf module, computed again in backward from the codes of its input.

A module of the user's without children, such as a GELU written out, is one layer: only its output is rounded. What its operations
save in between would be kept as floats, several for each number of its output. So the functions that its forward calls are
recorded, and a saved result of them is kept as its place in that record:

    forward    x_i = f_i(x_j, ...), recorded if f_i is one of `PURE` and all of its tensors are recorded or kept as codes
    backward   the calls are repeated, from codes on, when the first of the results is asked for

The graph is PyTorch's own, and the code of the module runs once: repeated are its calls of PyTorch, with the arguments they had.
Their results are the same bits, as long as the number of threads is the same. What is not recorded is saved as it was.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .handler import find_handler
from .kept_tensors import Kept, SavedCodes
from .saved_tensors import SavedAsCodes, identify

__all__ = ["PURE", "CallRecord", "SavedResult", "record_calls"]

_NAMES = (
    "add sub rsub mul multiply div divide true_divide pow neg negative abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square "
    "reciprocal sigmoid tanh sinh cosh sin cos atan erf erfc logit mean sum var amax amin clamp clamp_min clamp_max minimum "
    "maximum softmax softplus softsign silu gelu mish relu relu6 elu selu celu leaky_relu hardswish hardsigmoid hardtanh "
    "logsigmoid float double half bfloat16 type_as"
)
_METHODS = "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __abs__ __div__"


def _find_pure() -> frozenset[Any]:
    found = [getattr(place, name, None) for place in (F, torch, Tensor) for name in _NAMES.split()]
    found += [getattr(Tensor, name, None) for name in _METHODS.split()]
    return frozenset(f for f in found if callable(f))


PURE = _find_pure()
"""Functions that return new numbers, which follow from their arguments alone."""


def _is_pure(function: Any) -> bool:
    try:
        return function in PURE
    except TypeError:  # not hashable
        return False


class Operand(NamedTuple):
    """The place of a tensor among the inputs (below zero, from -1 on) or results of a record."""

    place: int


class Call(NamedTuple):
    """A call of a function, with operands in the place of tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class CallRecord:
    """The calls of functions in one forward of a leaf module."""

    def __init__(self, saving: SavedAsCodes) -> None:
        self._saving: SavedAsCodes | None = saving
        self._inputs: list[SavedCodes] = []
        self._calls: list[Call] = []
        self._places: dict[tuple[Any, ...], int | None] = {}  # None: not to be computed again
        self._saved = Counter[int]()
        self._unresolved: list[SavedResult] | None = None  # what the function that now runs has saved
        self._values: dict[int, Tensor] = {}
        self._left = Counter[int]()

    # ---- forward

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and record it if it can be repeated."""
        call = self._describe(function, args, kwargs) if self._saving is not None else None
        if call is None:
            return function(*args, **kwargs)
        self._unresolved = []
        try:
            result = function(*args, **kwargs)
            if type(result) is Tensor and not result._is_view() and not any(result is a for a in args):
                self._places[identify(result)] = len(self._calls)
                self._calls.append(call)
        finally:
            unresolved, self._unresolved = self._unresolved, None
            for saved in unresolved:
                saved.settle()
        return result

    def close(self) -> None:
        """End the recording, when the forward ends."""
        self._saving = None
        self._places.clear()

    def _describe(self, function: Any, args: Any, kwargs: Any) -> Call | None:
        """Return a call as it is to be recorded; None if it cannot be repeated."""
        if not _is_pure(function) or "out" in kwargs or kwargs.get("inplace"):
            return None
        values = [self._operand(value) for value in (*args, *kwargs.values())]
        if any(value is None for value in values):
            return None
        given = [value[0] for value in values if value is not None]
        return Call(function, tuple(given[: len(args)]), dict(zip(kwargs, given[len(args) :], strict=True)))

    def _operand(self, value: Any) -> tuple[Any] | None:
        """Return what stands for an argument; None if it is a tensor that backward would not have."""
        if not isinstance(value, Tensor):
            return None if isinstance(value, (list, dict)) else (value,)
        if type(value) is not Tensor:
            return None
        key = identify(value)
        if key not in self._places:
            self._places[key] = self._add_input(value)
        place = self._places[key]
        return None if place is None else (Operand(place),)

    def _add_input(self, value: Tensor) -> int | None:
        assert self._saving is not None
        with torch._C.DisableTorchFunction():
            codes = self._saving.find_codes(value)
        if codes is None:
            return None
        self._inputs.append(codes)
        return -len(self._inputs)

    def keep(self, t: Tensor, otherwise: Any) -> SavedResult | None:
        """Return what stands for a tensor that autograd saves now; None if it is no result of a recorded call."""
        place = self._places.get(identify(t))
        if place is not None and place >= 0:
            return SavedResult(self, place)
        if place is not None or self._unresolved is None:
            return None
        saved = SavedResult(self, None, t, otherwise)  # it may be the result of the call that now runs
        self._unresolved.append(saved)
        return saved

    def find_place(self, t: Tensor) -> int | None:
        """Return the place of a result; None if it is none."""
        place = self._places.get(identify(t))
        return None if place is None or place < 0 else place

    def count(self, place: int) -> None:
        """Count that a result is saved once more."""
        self._saved[place] += 1

    # ---- backward

    def compute(self, place: int) -> Tensor:
        """Return a result; all that were saved are computed at once, and held until each was asked for."""
        if place not in self._values:
            self._values, self._left = self._repeat(), self._saved.copy()
        self._left[place] -= 1
        return self._values[place] if self._left[place] > 0 else self._values.pop(place)

    def _repeat(self) -> dict[int, Tensor]:
        """Return the saved results, by place, computed from the inputs."""
        last = max(self._saved)
        uses = Counter(o.place for call in self._calls[: last + 1] for o in _operands(call))
        values: dict[int, Tensor] = {}
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for place, call in enumerate(self._calls[: last + 1]):
                for operand in _operands(call):
                    if operand.place not in values:
                        values[operand.place] = self._inputs[-1 - operand.place].decode()
                args = [values[a.place] if isinstance(a, Operand) else a for a in call.args]
                kwargs = {k: values[a.place] if isinstance(a, Operand) else a for k, a in call.kwargs.items()}
                values[place] = call.function(*args, **kwargs)
                for operand in _operands(call):
                    uses[operand.place] -= 1
                    if not uses[operand.place] and not self._saved[operand.place]:
                        del values[operand.place]
        return {place: values[place] for place in self._saved if self._saved[place]}


def _operands(call: Call) -> list[Operand]:
    """Return the operands of a call, each once."""
    return list(dict.fromkeys(a for a in (*call.args, *call.kwargs.values()) if isinstance(a, Operand)))


class Keeper(Protocol):
    """A way to keep a tensor."""

    def __call__(self, t: Tensor, /) -> Kept:
        """Return what stands for a tensor."""


class SavedResult:
    """A saved tensor that is computed again; or, once it is known to be no result, what it is kept as instead."""

    def __init__(
        self, record: CallRecord, place: int | None, t: Tensor | None = None, otherwise: Keeper | None = None
    ) -> None:
        self._record, self._place, self._tensor, self._otherwise = record, place, t, otherwise
        self._kept: Kept | None = None
        if place is not None:
            record.count(place)

    def settle(self) -> None:
        """Decide, after the function that saved it has returned."""
        t, self._tensor, otherwise, self._otherwise = self._tensor, None, self._otherwise, None
        assert t is not None
        assert otherwise is not None
        self._place = self._record.find_place(t)
        if self._place is None:
            self._kept = otherwise(t)
        else:
            self._record.count(self._place)

    def decode(self) -> Tensor:
        """Return the tensor that was saved."""
        if self._place is not None:
            return self._record.compute(self._place)
        assert self._kept is not None
        return self._kept.decode()


def record_calls(module: nn.Module) -> CallRecord | None:
    """Return a record for the forward of a module that now begins; None if nothing of it is to be computed again."""
    handler = find_handler(module)
    if handler is None or not handler.recomputes or not torch.is_grad_enabled():
        return None
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):  # backward computes without it
        return None
    saving = SavedAsCodes.innermost()
    return None if saving is None else CallRecord(saving)
