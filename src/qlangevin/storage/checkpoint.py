"""A run in one file: model, sampler, schedule, order of the data and counters. A killed run goes on as if it had not been.

The file is safetensors: tensors as tensors, and the rest as JSON in its header, with a SHA-256 over both. It is replaced as a
whole, so that there is always a checkpoint, the old one or the new one.
"""

from __future__ import annotations

import copy
import glob
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import lowering
from .._validate import describe_differences
from .._version import __version__
from . import files, model_tensors
from .files import DTYPES, DamagedError
from .hashing import sha256
from .manifest import TensorInfo, is_count
from .state_json import flatten, random_state, set_random_state, unflatten
from .store import SampleStore

__all__ = ["load_checkpoint", "save_checkpoint"]

VERSION = 1
FILE = "checkpoint.safetensors"
MODEL = "model."  # before the names of the model's tensors


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
    given = _named(model, sampler, schedule, loader)
    tensors, named = dict[str, Tensor](), model_tensors.named_tensors(model)
    info = model_tensors.describe(named)
    about = {
        "checkpoint": VERSION,
        "library": __version__,
        "tensors": {name: t.as_json() for name, t in info.items()},
        "layers": lowering.state_dict(model_tensors.unwrapped(model)),
        "lowered": lowering.settings(model_tensors.unwrapped(model)),
        "classes": {name: type(component).__name__ for name, component in given.items()},
        "states": flatten({name: c.state_dict() for name, c in given.items()}, tensors, "states"),
        "random": flatten(random_state(), tensors, "random"),
        "store": None if store is None else _about(store, len(store)),
        "counters": flatten(counters, tensors, "counters"),
    }
    parts = tensors | {f"{MODEL}{name}": t for name, t in model_tensors.gather(named, info).items()}
    text = json.dumps(about, separators=(",", ":"))
    file = _file(path)
    files.remove_leftovers(file.parent, glob.escape(file.name))
    files.write(file, files.tensor_parts(parts, {"qlangevin": text, "sha256": _hash(parts, text)}))


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
        missing_ok: a run that has no checkpoint yet begins, and its first is saved at once, so that from then on there is
            one; returns no counters. A store that has samples without a checkpoint is not touched, that is an error.
    """
    file, given = _file(path), _named(model, sampler, schedule, loader)
    if not file.exists():
        if not missing_ok:
            raise FileNotFoundError(f"there is no checkpoint {file}")
        if store is not None and len(store):
            raise FileNotFoundError(
                f"there is no checkpoint {file}, but {store.path} has {len(store)} samples of the run it was of; "
                "put it back, begin in another folder, or give the samples up with store.truncate(0)"
            )
        save_checkpoint(path, model, sampler, schedule, loader, store)
        return {}
    saved = _read(file)
    _check_fits(saved, model, given)
    samples = _common_samples(saved, store) if store is not None else 0
    _load(saved, model_tensors.unwrapped(model), given)
    if store is not None:
        store.truncate(samples)
    return saved.counters


def _check_fits(saved: Saved, model: nn.Module, given: Mapping[str, Stateful]) -> None:
    """Refuse a model or a component that is not of the kind that was saved."""
    here = model_tensors.describe(model_tensors.named_tensors(model))
    model_tensors.check_fits(here, saved.info, saved.what, formats=True)
    if "sampler" in given and (odd := [name for name in here if here[name].format != saved.info[name].format]):
        raise ValueError(f"{saved.what} is of a model packed as {saved.info[odd[0]].format}, not {here[odd[0]].format}")
    lowering.check_state(model_tensors.unwrapped(model), saved.layers)
    if "sampler" in given and (
        odd := describe_differences(saved.lowered, lowering.settings(model_tensors.unwrapped(model)))
    ):
        raise ValueError(f"{saved.what} is of a model lowered otherwise: {'; '.join(odd[:3])}")
    for name, component in given.items():
        kind, known = type(component).__name__, saved.classes.get(name)
        if kind != known:
            was = f"with a {known} as {name}" if known else f"without a {name}"
            raise ValueError(f"{saved.what} was saved {was}, not with a {kind}")


def _about(store: SampleStore, count: int) -> dict[str, Any]:
    """What tells a store and its first samples from others."""
    last = store.manifest.samples[count - 1].digest.sha256 if count else None
    return {"samples": count, "last": last, "settings": store.manifest.settings}


def _common_samples(saved: Saved, store: SampleStore) -> int:
    """How many samples the store had when the checkpoint was saved, if it is that store and still has them."""
    store.require_writable()
    if saved.store is None:
        raise ValueError(f"{saved.what} was saved without a store")
    count: Any = saved.store.get("samples")
    if not is_count(count):
        raise DamagedError(f"{saved.what} is damaged: an entry is of another kind than it should be")
    if count > len(store):
        raise ValueError(f"{saved.what} comes after {count} samples, but {store.path} has {len(store)}")
    if odd := describe_differences(saved.store, _about(store, count)):
        raise ValueError(f"{saved.what} is of another run than the store in {store.path}: {'; '.join(odd[:3])}")
    return int(count)


def _load(saved: Saved, model: nn.Module, given: Mapping[str, Stateful]) -> None:
    """Load everything, or nothing: if one part refuses, those before it go back to where they were."""
    with ExitStack() as undo:
        for name, component in given.items():
            undo.callback(component.load_state_dict, copy.copy(component.state_dict()))
            component.load_state_dict(saved.states[name])
        if "sampler" in given:
            undo.callback(set_random_state, random_state())
            try:
                set_random_state(saved.random)
            except Exception as error:
                raise DamagedError(f"{saved.what} is damaged: no state of random generators ({error})") from None
        undo.pop_all()
    model_tensors.load_into(model_tensors.named_tensors(model), saved.values)
    lowering.load_state_dict(model, saved.layers)


@dataclass(frozen=True)
class Saved:
    """What is in a checkpoint, checked."""

    what: str
    info: dict[str, TensorInfo]
    values: dict[str, Tensor]
    layers: dict[str, int]
    lowered: dict[str, str]
    classes: dict[str, str]
    states: dict[str, dict[str, Any]]
    random: dict[str, Any]
    store: dict[str, Any] | None
    counters: dict[str, Any]

    def __post_init__(self) -> None:
        objects: tuple[Any, ...] = (self.layers, self.lowered, self.classes, self.states, self.random, self.counters)
        good = all(isinstance(each, dict) and all(isinstance(name, str) for name in each) for each in objects)
        good = good and all(isinstance(state, dict) for state in self.states.values())
        good = (
            good and all(map(is_count, self.layers.values())) and (self.store is None or isinstance(self.store, dict))
        )
        if not good or self.classes.keys() != self.states.keys():
            raise TypeError("an entry is of another kind than it should be")


def _named(model: Any, sampler: Any, schedule: Any, loader: Any) -> dict[str, Stateful]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}; the first argument is the path")
    # The sampler last: it is the one that holds the learning rate a schedule sets.
    all_three = {"schedule": schedule, "loader": loader, "sampler": sampler}
    given = {name: component for name, component in all_three.items() if component is not None}
    for name, component in given.items():
        if not (hasattr(component, "state_dict") and hasattr(component, "load_state_dict")):
            hint = "; qlangevin.Loader is a DataLoader that has" if name == "loader" else ""
            raise TypeError(f"{name} must have a state_dict, which a {type(component).__name__} has not{hint}")
    return given


def _hash(parts: Mapping[str, Tensor], text: str) -> str:
    """Of all there is: the file that would be written if the hash were not in it."""
    return sha256(*files.tensor_parts(parts, {"qlangevin": text}))


def _file(path: str | os.PathLike[str]) -> Path:
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


def _open(file: Path, what: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON of a checkpoint and its tensors, mapped, if they are what was written."""
    with files.opened(file, what) as mapped:
        files.header_length(mapped, what)
    with files.library(what), safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    text = metadata.get("qlangevin", "")
    if any(t.dtype not in DTYPES for t in tensors.values()) or metadata.get("sha256") != _hash(tensors, text):
        raise DamagedError(f"{what} is damaged: its content is not what was written (SHA-256 differs)")
    about = files.parse_json(text, what)
    version = about.get("checkpoint") if isinstance(about, dict) else None
    if version != VERSION:
        raise DamagedError(f"{what} has version {version!r}; this release of qlangevin reads version {VERSION}")
    return about, tensors


def _read(file: Path) -> Saved:
    what = f"the checkpoint {file}"
    about, tensors = _open(file, what)
    try:
        info = {name: TensorInfo.of(t) for name, t in about["tensors"].items()}
        parts = {name.removeprefix(MODEL): t for name, t in tensors.items() if name.startswith(MODEL)}
        specs = {part: spec for name, each in info.items() for part, spec in each.parts(name).items()}
        files.check_same({name: (t.dtype, tuple(t.shape)) for name, t in parts.items()}, specs, what)
        return Saved(
            what=what,
            info=info,
            values=model_tensors.assemble(parts, info, what),
            layers=about["layers"],
            lowered=about["lowered"],
            classes=about["classes"],
            states=unflatten(about["states"], tensors),
            random=unflatten(about["random"], tensors),
            store=about["store"],
            counters=unflatten(about["counters"], tensors),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{what} is damaged: {error}") from None
