"""Writing samples to disk, a byte a weight.

A sample is written and synced before the manifest that lists it: a process that dies at any moment leaves the samples listed
before as they were. A store holds nothing about when, where or with how many interruptions it was written: the same chain
gives the same bytes. `sample` describes the folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._validate import describe_differences
from .._version import __version__
from . import files, model_tensors
from .files import DamagedError
from .locking import Lock
from .manifest import Manifest, Record, count_steps, is_count, provenance
from .sample import FOLDER, FROZEN, MANIFEST, Sample, Samples
from .tensor_file import tensor_chunks

__all__ = ["SampleStore"]


class SampleStore(Samples):
    """A folder of samples, as a sequence of them. One process may write; any number may read, also while it grows.

    Made by `create` or `open`. A writer is a context manager that releases the folder at its end.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None, lock: Lock | None = None) -> None:
        super().__init__(path, manifest)
        self._lock, self._threads = lock, RLock()
        self._sampler: Optimizer | None = None

    # ---- creating and opening

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        sampler: Optimizer | None = None,
        schedule: LRScheduler | None = None,
        *,
        resume: bool = False,
    ) -> SampleStore:
        """Create a store for samples of a model.

        Args:
            path: the folder.
            model: its parameters and persistent buffers make up a sample.
            sampler: gives the formats of parameters that are not packed, and the step of each sample.
            schedule: its settings go into the manifest.
            resume: continue an existing store, which must be of the same model, sampler and schedule.
        """
        path, settings = Path(path), provenance(sampler, schedule, model_tensors.count_ranks(model))
        tensors = model_tensors.describe(model_tensors.named_tensors(model), sampler)
        new = Manifest(__version__, tensors, settings)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{path} is a file; a store is a folder")
        path.mkdir(parents=True, exist_ok=True)
        lock = Lock(path)
        try:
            exists = (path / MANIFEST).exists()
            if exists and not resume:
                raise FileExistsError(
                    f"{path} holds a store already; create(..., resume=True) continues it, open(..., write=True) adds to it"
                )
            if not exists and any((path / FOLDER).glob("*.safetensors")):
                raise FileExistsError(
                    f"{path} holds samples, but no manifest that describes them; choose another folder"
                )
            store = cls._resume(path, new, lock) if exists else cls._start(path, new, model, lock)
        except BaseException:
            lock.release()
            raise
        store._sampler = sampler
        return store

    @classmethod
    def _start(cls, path: Path, manifest: Manifest, model: nn.Module, lock: Lock) -> SampleStore:
        (path / FOLDER).mkdir(exist_ok=True)
        files.remove_leftovers(path)
        files.sync_folder(path.parent)
        if frozen := manifest.select("frozen"):
            stored = model_tensors.encode_tensors(model_tensors.named_tensors(model), frozen)
            manifest = replace(manifest, frozen=Record(None, files.write_hashed(path / FROZEN, tensor_chunks(stored))))
        files.write(path / MANIFEST, [manifest.to_json()])
        return cls(path, manifest, lock)

    @classmethod
    def _resume(cls, path: Path, new: Manifest, lock: Lock) -> SampleStore:
        store = cls._open_writer(path, lock)
        old = store.manifest
        if old.tensors != new.tensors:
            names = [*old.tensors, *(name for name in new.tensors if name not in old.tensors)]
            odd = [n for n in names if old.tensors.get(n) != new.tensors.get(n)]
            pairs = "; ".join(f"{n!r} is {old.tensors.get(n)} there, now {new.tensors.get(n)}" for n in odd[:5])
            raise ValueError(f"the store in {path} is of another model or sampler: {pairs}")
        if odd := describe_differences({"ranks": 1, **old.settings}, {"ranks": 1, **new.settings}):
            raise ValueError(f"the store in {path} was begun with other settings: {'; '.join(odd)}")
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, write: bool = False) -> SampleStore:
        """Open an existing store for reading; with ``write``, also for adding samples."""
        path = Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"there is no store in {path}: no such folder")
        if not (path / MANIFEST).exists():
            raise FileNotFoundError(f"there is no store in {path}: it has no {MANIFEST}")
        if not write:
            store = cls(path)
            store._refresh()
            return store
        lock = Lock(path)
        try:
            return cls._open_writer(path, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open_writer(cls, path: Path, lock: Lock) -> SampleStore:
        store = cls(path, cls._read_manifest(path), lock)
        (path / FOLDER).mkdir(exist_ok=True)
        store._remove_unlisted()
        return store

    def _remove_unlisted(self) -> None:
        """Remove what a killed writer left behind: temporary files, and samples that the manifest does not list."""
        files.remove_leftovers(self.path)
        files.remove_leftovers(self.path / FOLDER)
        for file in (self.path / FOLDER).iterdir():
            match = re.fullmatch(r"(\d{6,})\.safetensors", file.name)
            if match and int(match[1]) >= len(self.manifest.samples):
                file.unlink()

    def close(self) -> None:
        """Release the folder for other writers. The store can still be read."""
        if self._lock is not None:
            self._lock.release()
            self._lock, self._verified = None, {}

    def __enter__(self) -> SampleStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---- writing

    def append(self, model: nn.Module, step: int | None = None) -> Sample:
        """Add the model as it is now. On return the sample is on the disk; an error says what has become of it.

        ``step`` is the number of steps made; by default that of the sampler the store was created with.
        """
        with self._threads:
            return self._append(model, step)

    def _append(self, model: nn.Module, step: int | None) -> Sample:
        self.require_writable()
        step, index = self._check_step(step), len(self.manifest.samples)
        tensors = model_tensors.named_tensors(model)
        model_tensors.check_fits(
            model_tensors.describe(tensors), self.manifest.tensors, f"the store in {self.path}", formats=True
        )
        self._check_frozen(tensors)
        chunks = tensor_chunks(model_tensors.encode_tensors(tensors, self.manifest.select("parameter", "buffer")))
        try:
            record = Record(step, files.write_hashed(self._sample_file(index), chunks))
            self._write_manifest((*self.manifest.samples, record))
        except BaseException as error:
            self._recover()
            if not isinstance(error, OSError):
                raise
            became = "was not stored" if len(self.manifest.samples) == index else "may not outlive a power failure"
            message = f"{error.strerror}: sample {index} {became}; the {index} before it are safe"
            raise OSError(error.errno, message, str(self.path)) from error
        self._verified[index] = record
        return self[index]

    def _check_step(self, step: int | None) -> int | None:
        """Return the step of a sample that is to be added, by default the sampler's; raise ValueError if it cannot be."""
        if step is None and self._sampler is not None:
            step = count_steps(self._sampler)
        if step is not None and not is_count(step):
            raise ValueError(
                f"step must be how many steps the sampler has made, an integer that is not negative, got {step!r}"
            )
        last = self.manifest.samples[-1].step if self.manifest.samples else None
        if step is not None and last is not None and step < last:
            raise ValueError(
                f"the last sample is of step {last}, this one of step {step}: was the checkpoint not loaded?"
            )
        return step

    def _recover(self) -> None:
        """After an error, read the manifest on the disk, which may be the new one, and remove what it does not list."""
        with suppress(OSError, DamagedError):
            self.manifest = self._read_manifest(self.path)
            self._remove_unlisted()

    def truncate(self, count: int) -> None:
        """Remove all but the first samples. `load_checkpoint` does so: the run draws what came after the checkpoint again."""
        self.require_writable()
        if not 0 <= count <= len(self.manifest.samples):
            raise ValueError(
                f"count must be between 0 and {len(self.manifest.samples)}, the samples there are, got {count}"
            )
        with self._threads:
            if count < len(self.manifest.samples):
                self._write_manifest(self.manifest.samples[:count])
                self._remove_unlisted()

    def _write_manifest(self, samples: tuple[Record, ...]) -> None:
        manifest = self.manifest.with_samples(samples)
        files.write(self.path / MANIFEST, [manifest.to_json()])
        self.manifest = manifest
        self._forget_replaced()

    def require_writable(self) -> None:
        """Raise PermissionError unless this process may write."""
        if self._lock is None:
            raise PermissionError(
                f"the store in {self.path} is closed, or open for reading; SampleStore.open(..., write=True) to write"
            )
        if not self._lock.held:
            raise PermissionError(
                f"the store in {self.path} was opened by the process this one was forked from, and is that one's to write"
            )

    def _refresh(self) -> None:
        if self._lock is None or not self._lock.held:  # a writer knows what it has added
            super()._refresh()

    def _check_frozen(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a frozen parameter has changed: they are stored once, when the store is created."""
        for name, stored in self._load_frozen().items():
            if not torch.equal(model_tensors.to_plain(tensors[name]).cpu(), model_tensors.to_plain(stored)):
                raise ValueError(f"{name!r} is frozen, but has changed since the store was created")
