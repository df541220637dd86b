"""Forwards that run, innermost last, and the place of the function mode on PyTorch's stack.

A frame stands for a forward of a module whose calls of functions are lowered (`functions.ScopedForward`). If that forward begins
a checkpointed region (see `replay`) without another module, as transformers' layers do, the part inside of the region has a frame
of its own, from its first layer on: recomputation runs that part without the forward, and its first layer opens the frame again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .function_table import Entry
from .handler import Handler
from .operand_kinds import Kind, find_kind
from .recomputation import CallRecord, record_calls
from .replay import Regions, enclosing_regions, repeat
from .saved_tensors import recording_into

__all__ = ["Frame", "RunningForwards", "Scope"]


class Scope(Protocol):
    """A module's forward whose functions are lowered."""

    module: nn.Module
    name: str

    def lowers(self, name: str) -> bool:
        """Return True if functions of this name are lowered here."""

    def handler(self, entry: Entry, occurrence: int) -> Handler:
        """Return the handler of a call, by the name of the function and its number in this forward."""


class Frame:
    """One running forward, or the part of it in a checkpointed region: how many calls of each function it has made."""

    __slots__ = ("hidden", "is_region", "module", "occurrences", "pushed", "record", "regions", "scope", "task")

    def __init__(self, scope: Scope, regions: Regions, occurrences: dict[str, int], is_region: bool = False) -> None:
        self.scope, self.module, self.regions, self.is_region = scope, scope.module, regions, is_region
        self.occurrences = occurrences
        self.hidden, self.pushed = 0, False
        self.record: CallRecord | None = None
        self.task = torch._C._current_graph_task_id()  # the backward pass that opened it; -1 in forward

    @property
    def place(self) -> tuple[int, object] | None:
        """The innermost region that it runs in, in forward or in a backward pass; None outside of regions."""
        return _place(self.regions)

    def count(self, name: str) -> int:
        """Count a call of a function; return how many were before."""
        before = self.occurrences.get(name, 0)
        self.occurrences[name] = before + 1
        return before

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and record it if what it saves is to be computed again."""
        return func(*args, **kwargs) if self.record is None else self.record.call(func, args, kwargs)

    def lowers(self, name: str) -> bool:
        """Return True if functions of this name are lowered here."""
        return self.scope.lowers(name)

    def handler(self, entry: Entry) -> Handler:
        """Return the handler of the call that was counted last."""
        return self.scope.handler(entry, self.occurrences[entry.name] - 1)

    def find_kinds(self, func: Any, operands: Iterable[Tensor]) -> list[Kind]:
        """Return the kinds of a function's operands; in a recomputation those they had: inputs of regions lose their marks."""
        if not self.regions:
            return [find_kind(t, self.module) for t in operands]

        def find(*_: Any) -> list[Kind]:
            return [find_kind(t, self.module) for t in operands]

        return repeat(self.regions, (self.scope, func), find, find)


def _place(regions: Regions) -> tuple[int, object] | None:
    return (regions[0].serial, regions[0].backward) if regions else None


class RunningForwards(threading.local):
    """The frames of a thread, and for how many layers within each other the mode is hidden."""

    def __init__(self, make_mode: type[TorchFunctionMode]) -> None:
        self.frames: list[Frame] = []
        self.mode = make_mode()
        self.hidden = 0
        self.above = 0  # modes of the user above ours when it was hidden
        self.recorder: Any = None

    def current(self) -> tuple[Frame | None, bool]:
        """Return the frame that runs, and True if it is in the region that runs."""
        regions = enclosing_regions(must_know=False)  # functions are also called by PyTorch's checkpointing itself
        running = {(r.serial, r.backward) for r in regions}
        for frame in reversed(self.frames):
            if not frame.is_region or frame.place in running:
                return frame, frame.place == _place(regions)
        return None, False

    # ---- scopes and regions

    @contextmanager
    def entered(self, scope: Scope) -> Iterator[None]:
        """Run the forward of a scope."""
        self.settle()
        frame, depth = Frame(scope, enclosing_regions(), {}), len(self.frames)
        self._open(frame)
        frame.record = record_calls(scope.module)
        try:
            with recording_into(frame.record):
                yield
        finally:
            if frame.record is not None:
                frame.record.close()
            while len(self.frames) > depth:
                self._close()

    def settle(self) -> None:
        """Close the frames of regions that have ended; open that of the region which runs, if a forward has begun it."""
        regions = enclosing_regions()
        running = {(r.serial, r.backward) for r in regions}
        now = torch._C._current_graph_task_id()  # of a backward within another, frames of the outer one are not for us
        while self.frames and self._has_ended(self.frames[-1], now, running):
            self._close()
        top = self.frames[-1] if self.frames else None
        if not regions or (top is not None and top.place == _place(regions)):
            return
        record, is_first = regions[0].record, regions[0].backward is None
        if is_first and top is not None:
            record.begun_by = record.begun_by or (top.scope, dict(top.occurrences))
            self._open(Frame(top.scope, regions, top.occurrences, is_region=True))
        elif not is_first and record.begun_by is not None:
            scope, occurrences = record.begun_by
            frame = Frame(scope, regions, dict(occurrences), is_region=True)
            self._open(frame)
            # The end of a recomputation is not seen, that of backward is.
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, frame))

    @staticmethod
    def _has_ended(frame: Frame, task: int, running: set[tuple[int, object]]) -> bool:
        """Return True for a region that does not run any more, unless its backward may be an outer one of this ``task``."""
        is_ours = task == -1 or frame.task in (task, -1)
        return frame.is_region and is_ours and frame.place not in running

    def _finish(self, frame: Frame) -> None:
        """Close a frame, and those above it, if that has not been done."""
        while frame in self.frames:
            self._close()

    def _open(self, frame: Frame) -> None:
        frame.hidden, frame.pushed = self.hidden, not self.frames or self.hidden > 0
        self.frames.append(frame)
        if frame.pushed:  # there is no mode that sees this forward
            self.hidden = 0
            _push(self.mode)

    def _close(self) -> None:
        frame = self.frames.pop()
        if frame.pushed and self.hidden == 0:
            _remove(self.mode)
        elif not frame.pushed and self.hidden > frame.hidden:  # a layer has raised
            _push(self.mode)
        self.hidden = frame.hidden

    # ---- layers

    def hide(self) -> None:
        """Hide the mode while a layer runs, or an operation of ours."""
        if self.frames:
            if self.hidden == 0:
                self.above = _remove(self.mode)
            self.hidden += 1

    def show(self) -> None:
        """Undo `hide`."""
        if self.frames:
            self.hidden -= 1
            if self.hidden == 0:
                _push(self.mode, self.above)


def _push(mode: TorchFunctionMode, below: int = 0) -> None:
    """Put the mode on the stack, beneath so many others."""
    count = min(below, torch._C._len_torch_function_stack())
    above = [torch._C._pop_torch_function_stack() for _ in range(count)]
    for each in (mode, *reversed(above)):
        torch._C._push_on_torch_function_stack(each)


def _remove(mode: TorchFunctionMode) -> int:
    """Take the mode off the stack, also from beneath modes that the user has entered; return how many these are."""
    above = []
    while torch._C._len_torch_function_stack():
        top = torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)
    return len(above)
