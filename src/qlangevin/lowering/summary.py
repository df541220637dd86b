"""A table of what `lower` does to a model: for each layer and function, is it lowered, and what does it keep for backward.

One forward runs, in the mode that the model is in, and is undone: counts of random bits, buffers and random generators are as
before. A tensor that several operations save counts where it is saved first. Weights are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..quantization.qtensor import QTensor
from .functions import find_scope, recording
from .handler import Handler, find_handler
from .kept_tensors import Kept, SavedCodes
from .modules import LeafHandler
from .operand_kinds import Kind, find_mark
from .patches import find_patch
from .saved_tensors import SavingForward, watching

__all__ = ["Summary", "SummaryRow", "summary"]

# Functions that copy numbers as they are.
_MOVING = frozenset(("contiguous", "clone", "reshape", "flatten", "to", "float", "repeat", "repeat_interleave", "flip", "roll",
                     "__getitem__", "index_select", "gather", "type_as", "neg", "detach", "pad", "unfold", "tile"))  # fmt: skip


@dataclass
class SummaryRow:
    """A layer or a function in the forward of a model."""

    name: str
    """A module, or "module/function/number" for a call in the forward of a module."""
    what: str
    """The class of the module, or the function."""
    lowered: bool
    reason: str
    """Why it is not lowered."""
    elements: int = 0
    """Numbers that it returned."""
    code_bytes: int = 0
    """Kept for backward as codes, bits or integers."""
    float_bytes: int = 0
    """Kept for backward as floating-point numbers."""


@dataclass
class Summary:
    """The rows of a forward, in the order of their first run; ``str`` is a table with totals."""

    rows: list[SummaryRow] = field(default_factory=list)

    @property
    def code_bytes(self) -> int:
        """All that is kept for backward as codes."""
        return sum(row.code_bytes for row in self.rows)

    @property
    def float_bytes(self) -> int:
        """All that is kept for backward as floating-point numbers."""
        return sum(row.float_bytes for row in self.rows)

    def __str__(self) -> str:
        header = ("layer or function", "what", "lowered", "elements", "codes, kB", "floats, kB")
        lines = [header, *(_cells(row) for row in self.rows)]
        lowered = sum(row.lowered for row in self.rows)
        count = f"{lowered} of {len(self.rows)}"
        total = SummaryRow("total", "", True, "", sum(r.elements for r in self.rows), self.code_bytes, self.float_bytes)
        lines.append((*_cells(total)[:2], count, *_cells(total)[3:]))
        widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
        texts = ["  ".join(c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
                 for line in lines]  # fmt: skip
        return "\n".join(text.rstrip() for text in texts)


def _cells(row: SummaryRow) -> tuple[str, ...]:
    verdict = "yes" if row.lowered else f"no: {row.reason}"
    return (
        row.name,
        row.what,
        verdict,
        f"{row.elements:,}",
        f"{row.code_bytes / 1e3:,.1f}",
        f"{row.float_bytes / 1e3:,.1f}",
    )


def summary(model: nn.Module, batch: Any) -> Summary:
    """Run a model forward and return what each of its layers and functions does; print it, or look at its rows.

    Args:
        model: a lowered model, or any other, none of whose layers is lowered.
        batch: the input of the model: a tensor, a tuple of arguments or a dict of keyword arguments.
    """
    recorder = _Recorder(model, batch)
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device.index or 0 for device in devices]))
        stack.enter_context(_unchanged(model))
        stack.enter_context(recorder.watch_modules())
        stack.enter_context(recording(recorder))
        stack.enter_context(watching(recorder.saved))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda t: t))
        stack.enter_context(torch.enable_grad())
        output = (
            model(**batch)
            if isinstance(batch, Mapping)
            else model(*batch)
            if isinstance(batch, tuple)
            else model(batch)
        )
        del output
    return Summary([row for row in recorder.rows.values() if recorder.tells(row)])


class _Recorder:
    """Collects rows while a model runs; see `functions.Recorder`."""

    def __init__(self, model: nn.Module, batch: Any) -> None:
        # A batch may be a slice of a whole data set, which is there in any case.
        self.given = {_storage(t): t.nbytes for t in tree_leaves(batch) if isinstance(t, Tensor)}
        self.rows: dict[str, SummaryRow] = {}
        self.model, self.inside = model, [self._row("(model)", type(model).__name__, False, "a module with children")]
        self.storages: set[StorageWeakRef | int] = set()

    def _row(self, name: str, what: str, lowered: bool, reason: str) -> SummaryRow:
        return self.rows.setdefault(name, SummaryRow(name, what, lowered, reason))

    def tells(self, row: SummaryRow) -> bool:
        """Return True for a row that says something: lowered, or new numbers, or something kept."""
        return row.lowered or bool(row.code_bytes or row.float_bytes) or (row.elements > 0 and row.reason != "")

    # ---- modules

    @contextmanager
    def watch_modules(self) -> Iterator[None]:
        """Have hooks note which module runs."""
        handles = []
        for name, module in self.model.named_modules():
            is_leaf = next(module.children(), None) is None
            if (name and is_leaf) or find_handler(module) is not None:
                handles.append(module.register_forward_pre_hook(_Enter(self, name or "(layer)"), prepend=True))
                handles.append(module.register_forward_hook(_Leave(self)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def enter(self, name: str, module: nn.Module) -> None:
        lowered = find_handler(module) is not None
        self.inside.append(self._row(name, type(module).__name__, lowered, "" if lowered else "skipped, or no layer"))

    def leave(self, handler: Handler | None, args: Any, output: Any) -> None:
        row = self.inside.pop()
        if isinstance(handler, LeafHandler) and not handler.is_layer:
            row.lowered, row.reason = False, "returns no activation"
        given = {_storage(t) for t in tree_leaves(args) if isinstance(t, Tensor)}
        new = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        row.elements += sum(t.numel() for t in new if row.lowered or _storage(t) not in given)

    # ---- functions

    def call(self, key: str, name: str) -> None:
        self.inside.append(SummaryRow(key, name, True, ""))

    def done(self, args: Any, result: Any, reason: str | None) -> None:
        found = self.inside.pop()
        tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
        given = {_storage(t) for t in tree_leaves(args) if isinstance(t, Tensor)}
        new = [t for t in tensors if reason is None or _storage(t) not in given]
        outer = self.inside[-1]
        if reason is not None and outer.name != "(model)" and not _lowers_functions(self.model, outer.name):
            outer.code_bytes += found.code_bytes  # part of a module that is one layer
            outer.float_bytes += found.float_bytes
            return
        moves = found.what in _MOVING
        is_activation = not moves and any(find_mark(t) in (Kind.ACTIVATION, Kind.MASKED) for t in new)
        if not (reason is None or is_activation or found.code_bytes or found.float_bytes):
            return
        row = self._row(found.name, found.what, reason is None, reason or "")
        row.elements += sum(t.numel() for t in new)
        row.code_bytes += found.code_bytes
        row.float_bytes += found.float_bytes

    # ---- saved tensors

    def pack(self, t: Tensor) -> Tensor:
        self._note(t)
        return t

    def saved(self, kept: Kept) -> None:
        for part in (kept.codes, kept.exponents) if isinstance(kept, SavedCodes) else (kept.tensor,):
            self._note(part)

    def _note(self, t: Tensor) -> None:
        base = t if t._base is None else t._base
        if isinstance(base, QTensor) or (base.is_leaf and base.requires_grad):
            return
        storage = _storage(t)
        if storage in self.storages:
            return
        self.storages.add(storage)
        row, size = self.inside[-1], self.given.get(storage, t.untyped_storage().nbytes())
        if t.is_floating_point():
            row.float_bytes += size
        else:
            row.code_bytes += size


class _Enter:
    def __init__(self, recorder: _Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.recorder.enter(self.name, module)


class _Leave:
    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.recorder.leave(find_handler(module), args, output)


def _storage(t: Tensor) -> StorageWeakRef | int:
    return id(t) if isinstance(t, QTensor) else StorageWeakRef(t.untyped_storage())


def _lowers_functions(model: nn.Module, name: str) -> bool:
    scope = find_scope(model.get_submodule(name))
    return scope is not None and bool(scope.settings.names)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore what a forward changes of a model: counts of random bits, which functions are known, and buffers."""
    handlers = [(h, h.runs) for h in map(find_handler, model.modules()) if h is not None]
    scopes = [(s, dict(s.handlers), s.state()) for s in map(find_scope, model.modules()) if s is not None]
    saving = find_patch(model, SavingForward)
    producers = set() if saving is None else set(saving.saved_producers)
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not b.is_inference()]
    try:
        yield
    finally:
        for handler, runs in handlers:
            handler.runs = runs
        for scope, known, state in scopes:
            scope.handlers = known
            scope.load(state)
        if saving is not None:
            saving.saved_producers.intersection_update(producers)
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
