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

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .._warnings import warn_once
from ..quantization.random import Key
from . import attention
from .function_calls import call, follow
from .function_table import FUNCTIONS, Entry, find_entry
from .handler import Handler
from .operand_kinds import Kind, find_kind, set_kinds
from .patches import Patch, find_patch
from .replay import enclosing_regions, innermost, repeat

__all__ = [
    "EnterLayer", "Frame", "FunctionSettings", "LeaveLayer", "Recorder", "ScopedForward", "find_scope", "recording",
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
        thread = _thread
        frames, hidden, depth = thread.frames, thread.hidden, len(thread.frames)
        frames.append(Frame(self))
        begins = depth == 0 or hidden > 0  # there is no mode that sees this forward
        if begins:
            thread.hidden = 0
            _push(thread.mode)
        try:
            return self.call_replaced(*args, **kwargs)
        finally:
            if begins and thread.hidden == 0:
                _remove(thread.mode)
            elif not begins and thread.hidden > hidden:  # a layer has raised
                _push(thread.mode)
            thread.hidden = hidden
            del frames[depth:]

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
        return self.counts | {key: handler.runs for key, handler in self.handlers.items()}

    def load(self, state: dict[str, int]) -> None:
        """Resume the random bits of functions; one that the state does not have begins anew."""
        self.counts = {key: runs for key, runs in state.items() if key not in self.handlers}
        for key, handler in self.handlers.items():
            handler.runs = state.get(key, 0)


class Frame:
    """One running forward: its scope, how many calls of each function it has made, and the checkpointed regions it runs in."""

    __slots__ = ("module", "occurrences", "regions", "scope")

    def __init__(self, scope: ScopedForward) -> None:
        self.scope, self.module, self.regions = scope, scope.module, enclosing_regions()
        self.occurrences: dict[str, int] = {}

    def find_kinds(self, func: Any, operands: Iterable[Tensor]) -> list[Kind]:
        """Return the kinds of a function's operands; in a recomputation those they had: inputs of regions lose their marks."""

        def find(*_: Any) -> list[Kind]:
            return [find_kind(t, self.module) for t in operands]

        return repeat(self.regions, (self.scope, func), find, find) if self.regions else find()

    def count(self, name: str) -> int:
        """Count a call of a function; return how many were before."""
        before = self.occurrences.get(name, 0)
        self.occurrences[name] = before + 1
        return before

    def lowers(self, name: str) -> bool:
        """Return True if functions of this name are lowered here."""
        return name in self.scope.settings.names

    def handler(self, entry: Entry) -> Handler:
        """Return the handler of the call that was counted last."""
        return self.scope.handler(entry, self.occurrences[entry.name] - 1)


_warned: set[str] = set()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_compiler() -> None:
    """Warn once, while a model is compiled."""
    warn_once(
        _warned, "compiled",
        "torch.compile does not see the functions that a lowered model calls (F.relu, sums, ...): compiled code leaves them in "
        "full precision, and rounds layers as before. Write them as modules; or lower(..., functions=False), to compute the "
        "same compiled or not",
    )  # fmt: skip


# ---- the mode


class FunctionMode(TorchFunctionMode):
    """Gets each call of a function in the forward that runs innermost."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        frame = _thread.frames[-1]
        if func is F.multi_head_attention_forward:
            with self:
                return attention.expanded(*args, **kwargs)
        entry, recorder = find_entry(func), _thread.recorder
        if recorder is not None:
            return _record(recorder, frame, entry, func, args, kwargs)
        if entry is None:
            return follow(frame, func, args, kwargs)
        if innermost(enclosing_regions()) != innermost(frame.regions):
            return _call_in_region(frame, entry, func, args, kwargs)
        frame.count(entry.name)
        return call(frame, entry, func, args, kwargs)[0]


def _call_in_region(frame: Frame, entry: Entry, func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function straight from a region that is checkpointed in the forward of its own module: as if it were not lowered.

    No module runs there that a recomputation would run again, so that the mode would not see it.
    """
    if frame.lowers(entry.name):
        warn_once(
            _warned, "checkpointed",
            f"functions such as {entry.name} that are called straight from what is given to checkpoint(...) stay in full "
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


# ---- the mode's place on PyTorch's stack


class _Thread(threading.local):
    """The forwards that a thread runs, innermost last, and for how many layers within each other the mode is hidden."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.mode = FunctionMode()
        self.hidden = 0
        self.recorder: Recorder | None = None


_thread = _Thread()


def _push(mode: TorchFunctionMode) -> None:
    torch._C._push_on_torch_function_stack(mode)


def _remove(mode: TorchFunctionMode) -> None:
    """Take the mode off the stack, also from beneath modes that the user has entered."""
    above = []
    while torch._C._len_torch_function_stack():
        top = torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)


def _hide() -> None:
    thread = _thread
    if thread.frames:
        if thread.hidden == 0:
            _remove(thread.mode)
        thread.hidden += 1


def _show() -> None:
    thread = _thread
    if thread.frames:
        thread.hidden -= 1
        if thread.hidden == 0:
            _push(thread.mode)


@contextmanager
def without_functions() -> Iterator[None]:
    """Hide the mode from operations of ours."""
    _hide()
    try:
        yield
    finally:
        _show()


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
            _hide()


class LeaveLayer:
    """Shows the mode again, and marks what the layer returns as activations: a forward hook."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            _show()
            set_kinds(output, Kind.ACTIVATION)


def find_scope(module: nn.Module) -> ScopedForward | None:
    """Return the scope of a module's forward; None if its functions are not seen."""
    return find_patch(module, ScopedForward)
