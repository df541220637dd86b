"""Functions that a model's forward calls, lowered like layers: F.relu, sums, products, pooling, attention.

    forward    y = Q_A(f(a, b, ...))
    backward   e_y is rounded by Q_E before f's own backward

`ScopedForward` runs the forward of a module that has children within a `TorchFunctionMode`, which gets every function that is
called there. Inside of a lowered layer the mode is hidden: the layer's output is rounded once, by its handler.
`function_table` says which functions are lowered, and when. The random bits of a call follow from the seed, the name of the
module whose forward calls it, the name of the function, and how many calls of it the same forward has made before.

Compilers see functions without the mode: a compiled model rounds its layers, and says once that it does not round functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .._warnings import warn_once
from ..quantization.random import Key
from . import attention
from .function_calls import call, follow
from .function_table import FUNCTIONS, Entry, find_entry, is_question
from .handler import Handler
from .operand_kinds import Kind, set_kinds
from .patches import Patch, find_patch
from .running_forwards import Frame, RunningForwards

__all__ = [
    "EnterLayer", "FunctionSettings", "LeaveLayer", "Recorder", "ScopedForward", "find_scope", "recording",
    "without_functions",
]  # fmt: skip


class FunctionSettings(NamedTuple):
    """Formats, rounding, random stream and names of the functions that a call of `lower` lowers."""

    activations: str | None
    errors: str | None
    rounding: str
    chain: Key
    names: frozenset[str]
    prefix: str = ""  # the name of the lowered model in the network that it is a part of


class Recorder(Protocol):
    """Watches the calls of one forward; see `summary`."""

    def call(self, key: str, name: str) -> None:
        """Begin a call of a function, known by its key."""

    def done(self, args: Any, result: Any, reason: str | None) -> None:
        """End the call, which was lowered unless there is a reason why not."""


class ScopedForward(Patch):
    """The forward of a module, whose calls of functions are lowered; with no names of functions, only followed."""

    method = "forward"

    def __init__(self, module: nn.Module, name: str, settings: FunctionSettings) -> None:
        super().__init__(module)
        self.name, self.settings, self.replica = name, settings, 0
        self.handlers: dict[str, Handler] = {}
        self.counts: dict[str, int] = {}  # of functions that have not been called since they were loaded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if self.settings.names:
                _warn_compiler()
            return self.call_replaced(*args, **kwargs)
        with _thread.entered(self):
            return self.call_replaced(*args, **kwargs)

    def lowers(self, name: str) -> bool:
        """Return True if functions of this name are lowered here."""
        return name in self.settings.names

    def handler(self, entry: Entry, occurrence: int) -> Handler:
        """Return the handler of a call, by the name of the function and its number in this forward."""
        key = f"{entry.name}/{occurrence}"
        if (found := self.handlers.get(key)) is not None:
            return found
        with torch.inference_mode(False), _disable_current_modes():  # its count is a tensor
            name = ".".join(filter(None, (self.settings.prefix, self.name)))
            handler = Handler(*self.settings[:4], f"{name}/{key}")
            if self.replica:
                handler.set_replica(self.replica)
            handler.runs = self.counts.pop(key, 0)
        self.handlers[key] = handler
        return handler

    def set_replica(self, replica: int) -> None:
        """Draw the random bits of one of several copies of the model."""
        self.replica = replica
        for handler in self.handlers.values():
            handler.set_replica(replica)

    def text(self) -> str:
        """Return all settings but the replica as text."""
        activations, errors, rounding, chain, names, _ = self.settings
        stream = f", stream={chain.stream}" if chain.stream else ""
        which = "all functions" if len(names) == len(FUNCTIONS) else ", ".join(sorted(names))
        formats = f"activations={activations or 'fp32'}, errors={errors or 'fp32'}"
        return f"{formats}, rounding={rounding}, seed={chain.seed}{stream}, functions: {which}"

    def state(self) -> dict[str, int]:
        """Return how often each function has run in training."""
        return self.counts | {key: runs for key, handler in self.handlers.items() if (runs := handler.runs)}

    def load(self, state: dict[str, int]) -> None:
        """Resume the random bits of functions; one that the state does not have begins anew."""
        self.counts = {key: runs for key, runs in state.items() if key not in self.handlers}
        for key, handler in self.handlers.items():
            handler.runs = state.get(key, 0)


_warned: set[str] = set()


def _warn_compiler() -> None:
    """Warn once, while a model is compiled."""
    warn_once(
        _warned, "compiled",
        "torch.compile does not see the functions that a lowered model calls (F.relu, sums, ...): compiled code leaves them in "
        "full precision, and rounds layers as before. Write them as modules; or lower(..., functions=False), to compute the "
        "same compiled or not",
    )  # fmt: skip


# As torch.compiler.assume_constant_result does, which would import the compiler here.
_warn_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- the mode


class FunctionMode(TorchFunctionMode):
    """Gets each call of a function in the forward that runs innermost."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            is_question(func) or not _thread.frames
        ):  # autograd brings the modes of an outer backward back after an inner one
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return attention.expanded(*args, **kwargs)
        entry, recorder = find_entry(func), _thread.recorder
        if entry is None and recorder is None:
            return follow(_thread.frames[-1], func, args, kwargs)
        frame, is_in_its_region = _thread.current()
        if frame is None:  # a region has been recomputed, and backward goes on
            return func(*args, **kwargs)
        if recorder is not None:
            return _record(recorder, frame, entry, func, args, kwargs)
        assert entry is not None
        if not is_in_its_region:
            return _call_in_region(frame, entry, func, args, kwargs)
        frame.count(entry.name)
        return call(frame, entry, func, args, kwargs)[0]


def _call_in_region(frame: Frame, entry: Entry, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function between the beginning of a checkpointed region and its first layer: as if it were not lowered.

    The recomputation does not see it either.
    """
    if frame.lowers(entry.name):
        warn_once(
            _warned, "checkpointed",
            f"functions such as {entry.name} that what is given to checkpoint(...) calls before its first layer stay in full "
            "precision: have them called by the forward of a module, and give the module to checkpoint",
        )  # fmt: skip
    return func(*args, **kwargs)


def _record(recorder: Recorder, frame: Frame, entry: Entry | None, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function while a recorder watches."""
    name = entry.name if entry is not None else getattr(func, "__name__", str(func))
    recorder.call(f"{frame.scope.name}/{name}/{frame.count(name)}", name)
    reason: str | None = "no rule for it"
    result = None
    try:
        if entry is None:
            result = follow(frame, func, args, kwargs)
        else:
            result, reason = call(frame, entry, func, args, kwargs)
    finally:
        recorder.done((args, kwargs), result, reason)
    return result


# ---- layers


_thread = RunningForwards(FunctionMode)


@contextmanager
def without_functions() -> Iterator[None]:
    """Hide the mode from operations of ours."""
    _thread.hide()
    try:
        yield
    finally:
        _thread.show()


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Have a recorder watch the calls of this thread."""
    before, _thread.recorder = _thread.recorder, recorder
    try:
        yield
    finally:
        _thread.recorder = before


class EnterLayer:
    """Hides the mode while a layer of PyTorch runs: a forward pre-hook."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            _thread.settle()
            _thread.hide()


class LeaveLayer:
    """Shows the mode again, and marks what the layer returns as activations: a forward hook."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            set_kinds(output, Kind.ACTIVATION)  # before the mode sees what that calls
            _thread.show()


def find_scope(module: nn.Module) -> ScopedForward | None:
    """Return the scope of a module's forward; None if its functions are not seen."""
    return find_patch(module, ScopedForward)
