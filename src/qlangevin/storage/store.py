"""Samples on disk, a byte a weight: a folder that survives its writer.

A sample is in its place, synced, before the manifest that lists it is: a process that dies at any moment leaves the samples
before that moment as they were. There is nothing in a store of when, where or how often interrupted it was written: the same
chain gives the same bytes. `reading` says what is in the folder.
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
from .manifest import Manifest, Record, is_count
from .origin import settings_of, steps_of
from .sample import FOLDER, FROZEN, MANIFEST, Sample, Samples

__all__ = ["SampleStore"]


class SampleStore(Samples):
    """A folder of samples, which is a sequence of them. One process may write, any number may read, also while it grows.

    Made by `create` or `open`; a writer is a context manager, which gives the folder free at its end.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None, lock: Lock | None = None) -> None:
        super().__init__(path, manifest)
        self._lock, self._turn = lock, RLock()
        self._sampler: Optimizer | None = None

    # ---- making and opening

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
        """A new store for samples of a model.

        Args:
            path: the folder.
            model: whose parameters and persistent buffers make a sample.
            sampler: knows the formats of parameters that are not packed, and how many steps a sample has had.
            schedule: its settings are noted.
            resume: go on with the store that is there, if it is of the same model, sampler and schedule.
        """
        path, settings = Path(path), settings_of(sampler, schedule, model_tensors.ranks_of(model))
        tensors = model_tensors.describe(model_tensors.named_tensors(model), sampler)
        new = Manifest(__version__, tensors, settings)
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"{path} is a file; a store is a folder")
        path.mkdir(parents=True, exist_ok=True)
        lock = Lock(path)
        try:
            there = (path / MANIFEST).exists()
            if there and not resume:
                raise FileExistsError(
                    f"{path} holds a store already; create(..., resume=True) goes on with it, open(..., write=True) adds to it"
                )
            if not there and any((path / FOLDER).glob("*.safetensors")):
                raise FileExistsError(
                    f"{path} holds samples, but no manifest that describes them; choose another folder"
                )
            store = cls._resumed(path, new, lock) if there else cls._begun(path, new, model, lock)
        except BaseException:
            lock.release()
            raise
        store._sampler = sampler
        return store

    @classmethod
    def _begun(cls, path: Path, manifest: Manifest, model: nn.Module, lock: Lock) -> SampleStore:
        (path / FOLDER).mkdir(exist_ok=True)
        files.remove_leftovers(path)
        files.sync_folder(path.parent)
        if frozen := manifest.of_kind("frozen"):
            parts = model_tensors.gather(model_tensors.named_tensors(model), frozen)
            manifest = replace(manifest, frozen=Record(None, files.write(path / FROZEN, files.tensor_parts(parts))))
        files.write(path / MANIFEST, [manifest.to_json()])
        return cls(path, manifest, lock)

    @classmethod
    def _resumed(cls, path: Path, new: Manifest, lock: Lock) -> SampleStore:
        store = cls._writer(path, lock)
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
        """A store that is there, to be read; with ``write``, also to be added to."""
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
            return cls._writer(path, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _writer(cls, path: Path, lock: Lock) -> SampleStore:
        store = cls(path, cls._read(path), lock)
        (path / FOLDER).mkdir(exist_ok=True)
        store._tidy()
        return store

    def _tidy(self) -> None:
        """Remove what a writer that was killed left behind: files half written, or written and not listed."""
        files.remove_leftovers(self.path)
        files.remove_leftovers(self.path / FOLDER)
        for file in (self.path / FOLDER).iterdir():
            match = re.fullmatch(r"(\d{6,})\.safetensors", file.name)
            if match and int(match[1]) >= len(self.manifest.samples):
                file.unlink()

    def close(self) -> None:
        """Let others write. Reading goes on."""
        if self._lock is not None:
            self._lock.release()
            self._lock, self._intact = None, {}

    def __enter__(self) -> SampleStore:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # ---- writing

    def append(self, model: nn.Module, step: int | None = None) -> Sample:
        """Add the model as it is now. It is on the disk when this returns; an error says what has become of it.

        ``step`` says after how many steps; by default the sampler the store was created with is asked.
        """
        with self._turn:  # of several threads
            return self._append(model, step)

    def _append(self, model: nn.Module, step: int | None) -> Sample:
        self.require_writable()
        if step is None and self._sampler is not None:
            step = steps_of(self._sampler)
        if step is not None and not is_count(step):
            raise ValueError(
                f"step must be how many steps the sampler has made, an integer that is not negative, got {step!r}"
            )
        last = self.manifest.samples[-1].step if self.manifest.samples else None
        if step is not None and last is not None and step < last:
            raise ValueError(
                f"the last sample is of step {last}, this one of step {step}: was the checkpoint not loaded?"
            )
        tensors, index = model_tensors.named_tensors(model), len(self.manifest.samples)
        model_tensors.check_fits(
            model_tensors.describe(tensors), self.manifest.tensors, f"the store in {self.path}", formats=True
        )
        self._check_frozen(tensors)
        parts = files.tensor_parts(model_tensors.gather(tensors, self.manifest.of_kind("parameter", "buffer")))
        try:
            record = Record(step, files.write(self._file(index), parts))
            self._publish((*self.manifest.samples, record))
        except BaseException as error:
            self._recover()
            if not isinstance(error, OSError):
                raise
            became = "was not stored" if len(self.manifest.samples) == index else "may not outlive a power failure"
            message = f"{error.strerror}: sample {index} {became}; the {index} before it are safe"
            raise OSError(error.errno, message, str(self.path)) from error
        self._intact[index] = record
        return self[index]

    def _recover(self) -> None:
        """After something went wrong: know what is on the disk, which may be the new manifest, and remove what is not listed."""
        with suppress(OSError, DamagedError):
            self.manifest = self._read(self.path)
            self._tidy()

    def truncate(self, count: int) -> None:
        """Keep the first samples only. `load_checkpoint` does this: what came after a checkpoint will be drawn again."""
        self.require_writable()
        if not 0 <= count <= len(self.manifest.samples):
            raise ValueError(
                f"count must be between 0 and {len(self.manifest.samples)}, the samples there are, got {count}"
            )
        with self._turn:
            if count < len(self.manifest.samples):
                self._publish(self.manifest.samples[:count])
                self._tidy()

    def _publish(self, samples: tuple[Record, ...]) -> None:
        manifest = self.manifest.with_samples(samples)
        files.write(self.path / MANIFEST, [manifest.to_json()])
        self.manifest = manifest
        self._forget()

    def require_writable(self) -> None:
        """Raise PermissionError unless this is the process that may write."""
        if self._lock is None:
            raise PermissionError(
                f"the store in {self.path} is closed, or open for reading; SampleStore.open(..., write=True) to write"
            )
        if not self._lock.held:
            raise PermissionError(
                f"the store in {self.path} was opened by the process this one was forked from, and is that one's to write"
            )

    def _refresh(self) -> None:
        if self._lock is None or not self._lock.held:  # a writer is the one who adds
            super()._refresh()

    def _check_frozen(self, tensors: Mapping[str, Tensor]) -> None:
        """Frozen parameters are stored once, so they must still be what they were."""
        for name, there in self._frozen_tensors().items():
            if not torch.equal(model_tensors.plain(tensors[name]).cpu(), model_tensors.plain(there)):
                raise ValueError(f"{name!r} is frozen, but has changed since the store was created")
