"""A run in one file: model, sampler, schedule, order of the data and counters. A killed run goes on as if it had not been.

The file is safetensors: tensors as tensors, and the rest as JSON in its header, with a SHA-256 over both. It is replaced as a
whole, so that there is always a checkpoint, the old one or the new one.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from . import contents, files, lowering
from .files import DamagedError
from .manifest import TensorInfo
from .store import SampleStore
from .trees import flatten, random_state, set_random_state, unflatten
from .version import __version__

__all__ = ["load_checkpoint", "save_checkpoint"]

VERSION = 1
FILE = "checkpoint.safetensors"


class Stateful(Protocol):
    """A scheduler, a `Loader`, or anything else that can say where it is and be put there."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    sampler: Optimizer | None = None,
    schedule: Stateful | None = None,
    loader: Stateful | None = None,
    store: SampleStore | None = None,
    **counters: Any,
) -> None:
    """Save all that a run needs to go on, in one file that is replaced as a whole.

    Args:
        path: the file; in a folder, ``checkpoint.safetensors``.
        model: parameters, buffers, and how often each layer of a lowered model has run.
        sampler, schedule, loader: their states.
        store: how many samples it has; `load_checkpoint` takes it back to that many.
        counters: whatever else: numbers, words, tensors, and lists, tuples and dicts of them.
    """
    tensors, info = dict[str, Tensor](), contents.describe(model)
    states = {name: s.state_dict() for name, s in _named(sampler, schedule, loader).items()}
    about = {
        "checkpoint": VERSION,
        "library": __version__,
        "tensors": {name: [t.kind, list(t.shape), t.dtype, t.format] for name, t in info.items()},
        "layers": lowering.state_dict(contents.unwrapped(model)),
        "states": flatten(states, tensors, "states"),
        "random": flatten(random_state(), tensors, "random"),
        "samples": None if store is None else len(store),
        "counters": flatten(counters, tensors, "counters"),
    }
    parts = {f"model.{name}": t for name, t in contents.gather(model, info).items()}
    text, memory = json.dumps(about, separators=(",", ":")), files.tensor_parts(parts | tensors)[1:]
    metadata = {"qlangevin": text, "sha256": files.sha256(text.encode(), *memory)}
    files.write(_file(path), files.tensor_parts(parts | tensors, metadata))


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    sampler: Optimizer | None = None,
    schedule: Stateful | None = None,
    loader: Stateful | None = None,
    store: SampleStore | None = None,
    *,
    missing_ok: bool = False,
) -> dict[str, Any]:
    """Put a run where it was when its checkpoint was saved; returns the counters.

    What is given must have been saved; what was saved need not be given. The states of the random generators of torch, NumPy
    and Python are put back if there is a sampler. If anything does not fit, that is an error, and nothing has changed.

    Args:
        path: as for `save_checkpoint`.
        model, sampler, schedule, loader: made as they were for the run.
        store: samples that came after the checkpoint are dropped: the run will draw them again, the same to the byte.
        missing_ok: a run that has no checkpoint yet starts from the beginning, and so does its store; returns no counters.
    """
    file = _file(path)
    if not file.exists():
        if not missing_ok:
            raise FileNotFoundError(f"there is no checkpoint {file}")
        if store is not None:
            store.truncate(0)
        return {}
    what = f"the checkpoint {file}"
    about, tensors = _read(file, what)
    parts = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    try:
        info = {name: TensorInfo.of(dict(zip(_FIELDS, t, strict=True))) for name, t in about["tensors"].items()}
        values = contents.assemble(parts, info, what)
        states, random, counters = (unflatten(about[name], tensors) for name in ("states", "random", "counters"))
        samples, layers = about["samples"], about["layers"]
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{what} is damaged: {error!r}") from None
    contents.check_fits(model, info, what, formats=True)
    given = _named(sampler, schedule, loader)
    if lost := [name for name in given if name not in states]:
        raise ValueError(f"{what} was saved without the {lost[0]}")
    if store is not None and (samples is None or samples > len(store)):
        raise ValueError(f"{what} was saved with {samples} samples in its store, but {store.path} has {len(store)}")
    lowering.check_state(contents.unwrapped(model), layers)
    _load_all(given, states)
    contents.load_into(model, values)
    lowering.load_state_dict(contents.unwrapped(model), layers)
    if sampler is not None:
        set_random_state(random)
    if store is not None:
        store.truncate(samples)
    return dict(counters)


_FIELDS = ("kind", "shape", "dtype", "format")


def _named(sampler: Any, schedule: Any, loader: Any) -> dict[str, Stateful]:
    # The sampler last: it is the one that holds the learning rate a schedule sets.
    all_three = {"schedule": schedule, "loader": loader, "sampler": sampler}
    return {name: component for name, component in all_three.items() if component is not None}


def _load_all(given: Mapping[str, Stateful], states: Mapping[str, Any]) -> None:
    """Load each, or none: those that came before one that refuses go back to where they were."""
    done: list[tuple[Stateful, dict[str, Any]]] = []
    try:
        for name, component in given.items():
            done.append((component, {} if name == "sampler" else copy.deepcopy(component.state_dict())))
            component.load_state_dict(states[name])
    except BaseException:
        for component, before in done[:-1]:
            component.load_state_dict(before)
        raise


def _file(path: str | os.PathLike[str]) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def _read(file: Path, what: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON of a checkpoint and its tensors, mapped."""
    with files.library(what), files.opened(file, what) as mapped:
        start = 8 + files.header_length(mapped, what)
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            text = metadata.get("qlangevin", "")
            with memoryview(mapped) as everything, everything[start:] as memory:
                if metadata.get("sha256") != files.sha256(text.encode(), memory):
                    raise DamagedError(f"{what} is damaged: its content is not what was written (SHA-256 differs)")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    about = files.parse_json(text, what)
    version = about.get("checkpoint") if isinstance(about, dict) else None
    if version != VERSION:
        raise DamagedError(f"{what} has version {version!r}; this release of qlangevin reads version {VERSION}")
    return about, tensors
