"""Runs that activation checkpointing repeats: a recomputation draws the random bits of the forward that it stands for.

`torch.utils.checkpoint.checkpoint` drops the activations of a region, and runs it once more when backward needs them. The layers
in it must get the numbers of their first runs, not new ones:

    first forward    n = count of the layer + 1, recorded by each region that encloses the run
    recomputation    n = the next one that its region has recorded for the layer; nothing is counted

A region is known by the object that PyTorch keeps for it from forward to backward: the context of the autograd function
(``use_reentrant=True``) or the frame of the saved-tensor hooks (``False``). PyTorch has no question for it, so it is read from
the local variables of `checkpoint`, which runs further up the stack. The stack is walked only where a region is possible:
without gradients, within backward, or within hooks for saved tensors that are not ours.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import graph
from torch.utils import checkpoint

__all__ = [
    "Regions",
    "check_counted",
    "enclosing_regions",
    "innermost",
    "mark_counted",
    "number_of_run",
    "repeat",
    "top_pack_hook",
]

Number: TypeAlias = "int | Tensor"  # of a run; a tensor if a device counts

T = TypeVar("T")

_serials = itertools.count(1)


class Record:
    """Findings of layers in a region's first forward, above all the numbers of their runs; how many a recomputation has taken."""

    def __init__(self) -> None:
        self.serial = next(_serials)
        self.begun_by: Any = None  # the forward that began the region; see `running_forwards`
        self._found: dict[Hashable, list[Any]] = {}
        self._taken: dict[Hashable, int] = {}
        self._backward: object = None

    def add(self, layer: Hashable, found: Any) -> None:
        """Record one more run of a layer."""
        self._found.setdefault(layer, []).append(found)

    def take(self, layer: Hashable, backward: object) -> Any:
        """Return the record of the next run of a layer, beginning anew in each backward pass; None if there was none."""
        if self._backward != backward:
            self._backward, self._taken = backward, {}
        found, i = self._found.get(layer, []), self._taken.get(layer, 0)
        self._taken[layer] = i + 1
        return found[i] if i < len(found) else None


class Region(NamedTuple):
    """A checkpointed region in its first forward, or in the recomputation of one backward pass."""

    record: Record
    backward: object = None  # None in the first forward
    has_hooks: bool = False  # for saved tensors: the region drops or takes up all of them
    is_complete: bool = True  # the first forward has ended

    @property
    def serial(self) -> int:
        """The number of the region: the same in forward and recomputation."""
        return self.record.serial


Regions: TypeAlias = tuple[Region, ...]  # innermost first; a recomputation is the last

_records: weakref.WeakKeyDictionary[Any, Record] = weakref.WeakKeyDictionary()  # by the object that PyTorch keeps


def number_of_run(regions: Regions, layer: Any, count: Callable[[], Number]) -> Number:
    """Return the number of one run of a layer within regions, counted by ``count`` unless the run is a repetition."""

    def refuse(region: Region) -> Number:
        if not region.is_complete:
            return 0  # asked for from within the first forward, and not needed
        raise RuntimeError(
            f"the lowered layer {layer.name!r} runs more often in the recomputation of a checkpointed region than in its "
            "forward, so that the random bits of a run are not known: the function given to checkpoint must do the same twice"
        )

    return repeat(regions, layer, count, refuse)


def repeat(regions: Regions, place: Hashable, find: Callable[[], T], find_unrecorded: Callable[[Region], T]) -> T:
    """Return what ``find`` does at a place of a first forward; in a recomputation what it returned there, if that is recorded."""
    found = None
    if regions and (last := regions[-1]).backward is not None:
        regions, found = regions[:-1], last.record.take(place, last.backward)
        found = find_unrecorded(last) if found is None else found
    result: T = find() if found is None else found
    for region in regions:
        region.record.add(place, result)
    return result


def mark_counted(number: Tensor) -> Tensor:
    """Note on the number of a run that this module has seen to it, which compiled code does not ask; return it."""
    number._qlangevin_counted = True  # type: ignore[attr-defined]
    return number


def check_counted(number: Tensor) -> None:
    """Raise RuntimeError for a run of compiled code within backward: it repeats a run, with the number of another one."""
    if torch._C._current_graph_task_id() != -1 and not hasattr(number, "_qlangevin_counted"):
        raise RuntimeError(
            "compiled code recomputes a lowered layer in backward, and would draw other random bits than its forward did: use "
            "torch.compile or activation checkpointing, not both. A compiler saves memory by itself with "
            "torch._functorch.config.activation_memory_budget; or round to nearest, lower(..., rounding='nearest')"
        )


def innermost(regions: Regions) -> int:
    """Return the number of the innermost region; 0 if there is none."""
    return regions[0].serial if regions else 0


def enclosing_regions(must_know: bool = True) -> Regions:
    """Return the checkpointed regions that the caller runs in.

    With ``must_know``, raise RuntimeError for a caller in PyTorch's checkpointing that is in none: its code is not as expected.
    """
    if torch.compiler.is_compiling():  # after a graph break, functions that eager code calls are traced one by one
        return _untraced(partial(enclosing_regions, must_know))  # type: ignore[no-any-return]
    if torch._C._current_graph_task_id() == -1 and torch.is_grad_enabled():
        hook = top_pack_hook()
        if hook is None or getattr(getattr(hook, "__self__", None), "is_outside_of_regions", False):
            return ()
    return _walk(sys._getframe(1), must_know)


def top_pack_hook() -> Any:
    """Return the hook that packs tensors saved by autograd now; None if there is none."""
    if torch.compiler.is_compiling():
        return _untraced(top_pack_hook)
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


@torch._disable_dynamo  # type: ignore[attr-defined]
def _untraced(function: Callable[[], Any]) -> Any:
    return function()


# ---- regions on the stack


_CHECKPOINT, _GRAPH = (inspect.getfile(module) for module in (checkpoint, graph))


def _walk(frame: FrameType | None, must_know: bool) -> Regions:
    """Return the regions that enclose a Python frame, up to a recomputation or to a backward pass."""
    found, is_known = list[Region](), True
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _CHECKPOINT:
            region = _read(code.co_name, frame.f_locals) if code.co_name in _READERS else None
            is_known = bool(found) or region is not None
            if region is not None:
                found.append(region)
                if region.backward is not None:
                    break
        elif code.co_filename == _GRAPH and code.co_name == "_engine_run_backward":
            break
        frame = frame.f_back
    if must_know and not is_known:
        _refuse()
    return tuple(found) or _region_of_hook()


def _region_of_hook() -> Regions:
    """Return the region of the hooks for saved tensors that are in place; `checkpoint` itself need not be on the stack."""
    hook = top_pack_hook()
    if hook is None or getattr(hook, "__module__", None) != checkpoint.__name__:
        return ()
    hook = inspect.unwrap(hook)
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    if "frame" not in cells:
        _refuse()
    return (Region(_record_of(cells["frame"].cell_contents), has_hooks=True),)


def _refuse() -> NoReturn:
    raise RuntimeError(
        f"lowered models do not know the activation checkpointing of PyTorch {torch.__version__}, and could not repeat the "
        "random bits of a forward; use a version that they are tested with, or do without checkpointing"
    )


def _read(function: str, variables: dict[str, Any]) -> Region | None:
    try:
        return _READERS[function](variables)
    except KeyError:
        _refuse()


def _record_of(key: Any) -> Record:
    return _records.setdefault(key, Record())


def _read_forward(variables: dict[str, Any]) -> Region | None:
    """Read `CheckpointFunction.forward`, the first run with ``use_reentrant=True``; None for `checkpoint_sequential`'s."""
    return Region(_record_of(variables["ctx"])) if "ctx" in variables else None


def _read_backward(variables: dict[str, Any]) -> Region | None:
    """Read `CheckpointFunction.backward`, which recomputes once in a backward pass."""
    return Region(_record_of(variables["ctx"]), torch._C._current_graph_task_id())


def _read_checkpoint(variables: dict[str, Any]) -> Region | None:
    """Read `checkpoint`, which holds the frame of the first run with ``use_reentrant=False`` in a generator."""
    generator = variables.get("gen")
    if generator is None or generator.gi_frame is None:
        return None
    return Region(_record_of(generator.gi_frame.f_locals["new_frame"]), has_hooks=True)


def _read_unpack(variables: dict[str, Any]) -> Region | None:
    """Read the hook that unpacks a saved tensor, and recomputes all of a region for the first of them."""
    frame = variables["frame"]
    return Region(_record_of(frame), variables["gid"], True, getattr(frame, "forward_completed", True))


_READERS: dict[str, Callable[[dict[str, Any]], Region | None]] = {
    "forward": _read_forward,
    "backward": _read_backward,
    "checkpoint": _read_checkpoint,
    "unpack_hook": _read_unpack,
}
