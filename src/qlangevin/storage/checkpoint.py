"""Checkpoints: model, sampler, schedule, order of the data and counters in one file. Loading it resumes a run bit for bit.

The file is safetensors: tensors as tensors, everything else as JSON in its header, with a SHA-256 over both. It is replaced
atomically, so that there is always a checkpoint, the old one or the new one.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from .. import lowering
from .._validate import describe_differences
from .._version import __version__
from . import files, model_tensors
from .cleaning import CHECKPOINT
from .errors import DamagedError, explain_errors, explained, is_explained
from .files import Bytes
from .folders import Folder, exists, is_folder, make_folder
from .leftovers import remove_leftovers
from .locking import check_locks_of
from .manifest import TensorInfo, count_steps, is_count
from .state_json import flatten, random_state, set_random_state, unflatten
from .store import SampleStore, writers_of
from .tensor_file import check_specs, read_tensors, tensor_chunks

__all__ = ["load_checkpoint", "save_checkpoint"]

VERSION = 1
SUFFIX = ".safetensors"  # of a path that names a file, not a folder
MODEL = "model."  # prefix of the names of the model's tensors
LONGEST = 1000  # characters of a message: a file can hold any names


class Stateful(Protocol):
    """A scheduler, a `Loader`, or anything else with a state dict."""

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
    """Save all that is needed to resume a run, in one file that is replaced atomically.

    Args:
        path: a folder, in which the file is ``checkpoint.safetensors``; it is made if it is missing. A path that ends in
            ``.safetensors``, or is that of a file, is the file itself.
        model: its parameters, buffers, and how often each layer of a lowered model has run are saved.
        sampler, schedule, loader: their states are saved.
        store: the number of its samples is saved; `load_checkpoint` truncates it to that many.
        counters: anything else: numbers, strings, tensors, and lists, tuples and dicts of them.
    """
    given = _check_components(model, sampler, schedule, loader)
    tensors, named = dict[str, Tensor](), model_tensors.named_tensors(model)
    infos = model_tensors.describe(named)
    about = {
        "checkpoint": VERSION,
        "library": __version__,
        "tensors": {name: info.to_json() for name, info in infos.items()},
        "layers": lowering.state_dict(model_tensors.unwrap(model)),
        "lowered": lowering.settings(model_tensors.unwrap(model)),
        "classes": {name: type(component).__name__ for name, component in given.items()},
        "states": flatten({name: c.state_dict() for name, c in given.items()}, tensors, "states"),
        "random": flatten(random_state(), tensors, "random"),
        "store": None if store is None else _identify_store(store, len(store)),
        "counters": flatten(counters, tensors, "counters"),
    }
    tensors |= {f"{MODEL}{name}": t for name, t in model_tensors.encode_tensors(named, infos).items()}
    text = json.dumps(about, separators=(",", ":"))
    _write_file(path, store, tensor_chunks(tensors, {"qlangevin": text, "sha256": _hash_content(tensors, text)}))


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
    """Return a run to where it was when its checkpoint was saved; returns the counters.

    What is given must have been saved; what was saved need not be given. If a sampler is given, the random generators of
    torch, NumPy and Python are set too. If anything does not fit, an error is raised and nothing has changed.

    Args:
        path: as for `save_checkpoint`.
        model, sampler, schedule, loader: constructed as for the run.
        store: samples that came after the checkpoint are removed: the run will draw them again, the same to the byte. If the
            store is open for writing and has such samples, it must be given.
        missing_ok: if there is no checkpoint yet, save the first one and return no counters. A store that has samples but no
            checkpoint is an error, and stays as it is.
    """
    given = _check_components(model, sampler, schedule, loader)
    with explain_errors(path, "the checkpoint was not read"):
        file = _resolve_path(path)
        missing = not exists(file)
    if missing:
        if not missing_ok:
            raise FileNotFoundError(f"there is no checkpoint {file}")
        _refuse_orphans(file, store)
        save_checkpoint(path, model, sampler, schedule, loader, store)
        return {}
    saved = _read_checkpoint(file)
    _check_fits(saved, model, given)
    samples = _count_shared_samples(saved, store) if store is not None else 0
    if store is None and sampler is not None:
        _refuse_forgotten_store(saved, sampler)
    _load_all(saved, model_tensors.unwrap(model), given)
    if store is not None:
        store.truncate(samples)
    return saved.counters


def _refuse_orphans(file: Path, store: SampleStore | None) -> None:
    """Raise FileNotFoundError for a store with samples whose checkpoint is missing."""
    if store is not None and len(store):
        raise FileNotFoundError(
            f"there is no checkpoint {file}, but {store.path} has {len(store)} samples of the run it was of; "
            "put it back, begin in another folder, or give the samples up with store.truncate(0)"
        )


def _check_fits(saved: Saved, model: nn.Module, given: Mapping[str, Stateful]) -> None:
    """Raise ValueError for a model or a component that is not of the kind that was saved."""
    here = model_tensors.describe(model_tensors.named_tensors(model))
    model_tensors.check_fits(here, saved.infos, saved.what, formats=True)
    if "sampler" in given and (odd := [name for name in here if here[name].format != saved.infos[name].format]):
        raise ValueError(
            f"{saved.what} is of a model packed as {saved.infos[odd[0]].format}, not {here[odd[0]].format}"
        )
    with _name_file(saved, "the state of its layers"):
        lowering.check_state(model_tensors.unwrap(model), saved.layers)
    if "sampler" in given and (
        odd := describe_differences(saved.lowered, lowering.settings(model_tensors.unwrap(model)))
    ):
        raise ValueError(f"{saved.what} is of a model lowered otherwise: {'; '.join(odd[:3])[:LONGEST]}")
    for name, component in given.items():
        kind, known = type(component).__name__, saved.classes.get(name)
        if kind != known:
            was = f"with a {str(known)[:LONGEST]} as {name}" if known else f"without a {name}"
            raise ValueError(f"{saved.what} was saved {was}, not with a {kind}")


def _identify_store(store: SampleStore, count: int) -> dict[str, Any]:
    """Return what tells a store and its first ``count`` samples from others."""
    last = store.manifest.samples[count - 1].digest.sha256 if count else None
    return {"samples": count, "last": last, "settings": store.manifest.settings}


def _count_shared_samples(saved: Saved, store: SampleStore) -> int:
    """Return how many samples the store had when the checkpoint was saved; raise ValueError if it is another store."""
    store.require_writable()
    if saved.store is None:
        raise ValueError(f"{saved.what} was saved without a store")
    count: Any = saved.store.get("samples")
    if not is_count(count):
        raise DamagedError(f"{saved.what} is damaged: an entry is of another kind than it should be")
    if count > len(store):
        raise ValueError(f"{saved.what} comes after {count} samples, but {store.path} has {len(store)}")
    if odd := describe_differences(saved.store, _identify_store(store, count)):
        why = "; ".join(odd[:3])[:LONGEST]
        raise ValueError(f"{saved.what} is of another run than the store in {store.path}: {why}")
    return int(count)


def _refuse_forgotten_store(saved: Saved, sampler: Optimizer) -> None:
    """Raise ValueError if the run's store is open for writing, with samples that the run would draw a second time."""
    count: Any = None if saved.store is None else saved.store.get("samples")
    for store in writers_of(sampler) if is_count(count) else ():
        if len(store) > count and _identify_store(store, count) == saved.store:
            raise ValueError(
                f"{saved.what} comes after {count} samples, and the store in {store.path}, which is open for writing, has "
                f"{len(store)}: pass it as store=, so that those are removed that the run will draw again"
            )


def _load_all(saved: Saved, model: nn.Module, given: Mapping[str, Stateful]) -> None:
    """Load all components, or none: if one raises, those before it get their old states back."""
    with ExitStack() as undo:
        for name, component in given.items():
            if isinstance(component, Optimizer):
                with suppress(FloatingPointError):  # of a step on a device, of which nothing will be left
                    count_steps(component)
            undo.callback(component.load_state_dict, copy.copy(component.state_dict()))
            with _name_file(saved, f"the state of the {name}"):
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


@contextmanager
def _name_file(saved: Saved, part: str) -> Iterator[None]:
    """Turn errors of a component about a state that is not its own into a ValueError that names the checkpoint."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{part} in {saved.what} does not fit: {str(error)[:LONGEST] or type(error).__name__}"
        ) from error


@dataclass(frozen=True)
class Saved:
    """Checked content of a checkpoint."""

    what: str
    infos: dict[str, TensorInfo]
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


def _check_components(model: Any, sampler: Any, schedule: Any, loader: Any) -> dict[str, Stateful]:
    """Return the components given, by name; raise TypeError for one without a state dict."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}; the first argument is the path")
    # The sampler is loaded last: it holds the learning rate, which loading a schedule sets.
    all_three = {"schedule": schedule, "loader": loader, "sampler": sampler}
    given = {name: component for name, component in all_three.items() if component is not None}
    for name, component in given.items():
        if isinstance(component, SampleStore):
            raise TypeError(f"{name} must have a state_dict, got a SampleStore: this is a store, pass it as store=")
        if not (hasattr(component, "state_dict") and hasattr(component, "load_state_dict")):
            hint = "; qlangevin.Loader is a DataLoader that has" if name == "loader" else ""
            raise TypeError(f"{name} must have a state_dict, which a {type(component).__name__} has not{hint}")
    return given


def _hash_content(tensors: Mapping[str, Tensor], text: str) -> str:
    """Return the SHA-256 of the file as it would be without the hash in its header."""
    return files.sha256(*tensor_chunks(tensors, {"qlangevin": text}))


def _resolve_path(path: str | os.PathLike[str]) -> Path:
    """Return the file of a checkpoint; see `save_checkpoint`."""
    path = Path(path)
    named = not is_folder(path) and (path.suffix == SUFFIX or exists(path))
    return path if named else path / CHECKPOINT


def _write_file(path: str | os.PathLike[str], store: SampleStore | None, chunks: Sequence[Bytes]) -> None:
    """Write a checkpoint, unless its folder is one that this process locked and that has been replaced."""

    def check() -> None:
        if store is not None:
            store.check_lock()
        check_locks_of(file.parent)

    file = Path(path)
    try:
        file = _resolve_path(path)
        if file != Path(path) and not exists(file.parent):
            make_folder(file.parent)
        with Folder.open(file.parent) as folder:
            if (about := folder.status(file.name)) is not None:
                folder.require_file(file.name, about, f"the checkpoint {file}")
            remove_leftovers(folder, file.name)
            files.write_in(folder, file.name, chunks, check)
    except OSError as error:
        if is_explained(error):
            raise
        became = "the checkpoint was not saved; the one before it, if any, is as it was"
        if "in_place" in error.__dict__:
            became = "the checkpoint is in its place, but may not outlive a power failure"
        raise explained(error, file, became) from error


def _read_file(file: Path, what: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON of a checkpoint and its tensors, mapped; raise DamagedError if they are not what was written."""
    with explain_errors(file, "the checkpoint was not read"), Folder.open(file.parent) as folder:
        metadata, tensors = read_tensors(file, what, folder)
    text = metadata.get("qlangevin", "")
    if metadata.get("sha256") != _hash_content(tensors, text):
        raise DamagedError(f"{what} is damaged: its content is not what was written (SHA-256 differs)")
    about = files.parse_json(text, what)
    version = about.get("checkpoint") if isinstance(about, dict) else None
    if version != VERSION:
        raise DamagedError(f"{what} has version {version!r}; this release of qlangevin reads version {VERSION}")
    return about, tensors


def _read_checkpoint(file: Path) -> Saved:
    what = f"the checkpoint {file}"
    about, tensors = _read_file(file, what)
    try:
        infos = {name: TensorInfo.from_json(t) for name, t in about["tensors"].items()}
        stored = {name.removeprefix(MODEL): t for name, t in tensors.items() if name.startswith(MODEL)}
        specs = {each: spec for name, info in infos.items() for each, spec in info.stored_specs(name).items()}
        check_specs({name: (t.dtype, tuple(t.shape)) for name, t in stored.items()}, specs, what)
        return Saved(
            what=what,
            infos=infos,
            values=model_tensors.restore_tensors(stored, infos, what),
            layers=about["layers"],
            lowered=about["lowered"],
            classes=about["classes"],
            store=about["store"],
            **{name: unflatten(about[name], tensors) for name in ("states", "random", "counters")},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{what} is damaged: {str(error)[:LONGEST]}") from None
    except DamagedError as error:
        raise error if what in str(error) else DamagedError(f"{what} is damaged: {error}") from None
