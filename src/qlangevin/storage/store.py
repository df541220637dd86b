"""Writing samples to disk, a byte a weight.

A sample is written and synced before the manifest that lists it: a process that dies at any moment leaves the samples listed
before as they were. A store holds nothing about when, where or with how many interruptions it was written: the same chain
gives the same bytes. `sample` describes the folder.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._validate import check_choice
from .._version import __version__
from . import files, model_tensors
from .append_checks import check_resumable, check_step, warn_of_dropout, warn_of_repetition
from .base import Frozen, check_base, check_same, identify, refer_to_base
from .cleaning import clean, holds_samples, refuse_links
from .errors import DamagedError, explain_errors, explained, is_explained
from .folders import Folder, exists, is_folder, make_folder
from .locking import Lock
from .manifest import Manifest, Record, provenance
from .sample import FOLDER, MANIFEST, Sample, Samples
from .sharing import write_frozen
from .tensor_file import tensor_chunks

__all__ = ["SampleStore", "writers_of"]

_writers: weakref.WeakSet[SampleStore] = weakref.WeakSet()


class SampleStore(Samples):
    """A folder of samples, as a sequence of them. One process may write; any number may read, also while it grows.

    Made by `create` or `open`. A writer is a context manager that releases the folder at its end.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None, lock: Lock | None = None) -> None:
        super().__init__(path, manifest)
        self._lock, self._threads = lock, RLock()
        self._sampler: Optimizer | None = None
        self._uncertain = False  # whether the manifest on the disk may be another than the one here
        self._warned: set[str] = set()
        self._compared: dict[str, tuple[int, int]] = {}  # what the store refers to; see `identify`
        if lock is not None:
            _writers.add(self)

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
        frozen: Frozen = "once",
    ) -> SampleStore:
        """Create a store for samples of a model.

        Args:
            path: the folder.
            model: its parameters and persistent buffers make up a sample.
            sampler: gives the formats of parameters that are not packed, and the step of each sample.
            schedule: its settings go into the manifest.
            resume: continue an existing store, which must be of the same model, sampler and schedule.
            frozen: ``"once"`` stores parameters that do not require gradients in a file of their own, which chains side by side
                (``run/chain-0``, ``run/chain-1``) share; ``"reference"`` stores their checksums only: whoever opens the store
                gives the same base.
        """
        check_choice("frozen", frozen, get_args(Frozen))
        path, settings = Path(path), provenance(sampler, schedule, model_tensors.count_ranks(model))
        named = model_tensors.named_tensors(model)
        tensors = model_tensors.describe(named, sampler)
        if frozen == "reference":
            tensors = refer_to_base(named, tensors)
        new = Manifest(__version__, tensors, settings)
        with explain_errors(path, "the store was not created"):
            if exists(path) and not is_folder(path):
                raise NotADirectoryError(
                    f"{path} is a file; a store is a folder: choose another name, or move the file away"
                )
            make_folder(path)
            lock = Lock(path)
            try:
                store = cls._create(path, new, model, lock, resume)
            except BaseException:
                lock.release()
                raise
        store._sampler = sampler
        store._attach_base(named)
        return store

    @classmethod
    def _create(cls, path: Path, new: Manifest, model: nn.Module, lock: Lock, resume: bool) -> SampleStore:
        """Create or resume the store of a folder that is locked."""
        refuse_links(lock.folder)
        if lock.folder.status(MANIFEST) is not None:
            if resume:
                return cls._resume(path, new, lock)
            raise FileExistsError(
                f"{path} holds a store already; create(..., resume=True) continues it, open(..., write=True) adds to it"
            )
        if holds_samples(lock.folder):
            raise FileExistsError(f"{path} holds samples, but no manifest that describes them; choose another folder")
        return cls._start(path, new, model, lock)

    @classmethod
    def _start(cls, path: Path, manifest: Manifest, model: nn.Module, lock: Lock) -> SampleStore:
        lock.folder.make(FOLDER)
        clean(lock.folder, 0)
        if frozen := manifest.select("frozen"):
            stored = model_tensors.encode_tensors(model_tensors.named_tensors(model), frozen)
            digest = write_frozen(lock.folder, path, tensor_chunks(stored), lock.check)
            manifest = replace(manifest, frozen=Record(None, digest))
        files.write_in(lock.folder, MANIFEST, [manifest.to_json()], lock.check)
        return cls(path, manifest, lock)

    @classmethod
    def _resume(cls, path: Path, new: Manifest, lock: Lock) -> SampleStore:
        store = cls._open_writer(path, lock)
        check_resumable(store.manifest, new, path)
        return store

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, write: bool = False, model: nn.Module | None = None) -> SampleStore:
        """Open an existing store for reading; with ``write``, also for adding samples.

        A store that only refers to its base (``frozen="reference"``) takes it from ``model``, and compares the checksums. Without
        one its samples hold what was sampled, and not the base.
        """
        store = cls._open(Path(path), write)
        if model is not None:
            try:
                store._attach_base(store.fit(model, f"the store in {path}"))
            except BaseException:
                store.close()
                raise
        return store

    @classmethod
    def _open(cls, path: Path, write: bool) -> SampleStore:
        with explain_errors(path, "the store was not opened"):
            if not is_folder(path):
                raise FileNotFoundError(f"there is no store in {path}: no such folder")
            if not exists(path / MANIFEST):
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
        store = cls(path, cls._read_manifest(lock.folder), lock)
        lock.folder.make(FOLDER)
        clean(lock.folder, len(store.manifest.samples))
        return store

    def _open_folder(self) -> Folder:
        """Return the folder that is locked, whatever its path names now; a reader opens it anew."""
        return self._lock.folder.borrow() if self._lock is not None and self._lock.held else super()._open_folder()

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
        lock = self.require_writable()
        step, index = check_step(step, self._sampler, self.manifest), len(self.manifest.samples)
        tensors = model_tensors.named_tensors(model)
        model_tensors.check_fits(
            model_tensors.describe(tensors), self.manifest.tensors, f"the store in {self.path}", formats=True
        )
        self._check_frozen(tensors)
        chunks = tensor_chunks(model_tensors.encode_tensors(tensors, self.manifest.select("parameter", "buffer")))
        warn_of_repetition(self._warned, step, self.manifest, self.path, stacklevel=3)
        if self._sampler is not None:
            warn_of_dropout(self._warned, model, stacklevel=3)
        try:
            with lock.folder.enter(FOLDER) as samples:
                record = Record(step, files.write_hashed(samples, self._sample_file(index).name, chunks, lock.check))
            self._write_manifest((*self.manifest.samples, record))
        except BaseException as error:
            recovered = self._recover()
            if not isinstance(error, OSError) or is_explained(error):
                raise
            became = "was not stored" if len(self.manifest.samples) == index else "may not outlive a power failure"
            fate = f"{became}; the {index} before it are safe"
            if not recovered:
                fate = "may not have been stored, and the store could not be read again to check the others"
            raise explained(error, self.path, f"sample {index} {fate}") from error
        self._verified[index] = record
        return self[index]

    def _recover(self) -> bool:
        """After an error, read the manifest on the disk, which may be the new one, and remove what it does not list.

        Returns False if that cannot be done, or if a sample listed is missing; then nothing is written until it can.
        """
        self._uncertain = True
        try:
            self._read_again()
            with self._open_folder() as folder, folder.enter(FOLDER) as samples:
                found = (samples.status(self._sample_file(i).name) for i in range(len(self.manifest.samples)))
                sizes = [about.st_size if about is not None else None for about in found]
        except (OSError, DamagedError):
            return False
        return sizes == [record.digest.size for record in self.manifest.samples]

    def _read_again(self) -> None:
        """Read the manifest on the disk and remove what it does not list."""
        if self._lock is not None:
            self._lock.check()  # what another writer is about to list is not ours to remove
        with self._open_folder() as folder:
            self.manifest = self._read_manifest(folder)
            self._forget_replaced()
            clean(folder, len(self.manifest.samples))
        self._uncertain = False

    def truncate(self, count: int) -> None:
        """Remove all but the first samples. `load_checkpoint` does so: the run draws what came after the checkpoint again."""
        lock = self.require_writable()
        if not 0 <= count <= len(self.manifest.samples):
            raise ValueError(
                f"count must be between 0 and {len(self.manifest.samples)}, the samples there are, got {count}"
            )
        with self._threads, explain_errors(self.path, f"the samples after the first {count} may not have been removed"):
            if count < len(self.manifest.samples):
                try:
                    self._write_manifest(self.manifest.samples[:count])
                    clean(lock.folder, count)
                except BaseException:
                    self._recover()
                    raise

    def _write_manifest(self, samples: tuple[Record, ...]) -> None:
        lock, manifest = self.require_writable(), self.manifest.with_samples(samples)
        text = manifest.to_json()
        if len(text) > files.JSON_LIMIT:
            raise ValueError(
                f"the manifest of {self.path} would have {len(text)} bytes, more than the {files.JSON_LIMIT} that can be read: "
                "create another store for further samples"
            )
        files.write_in(lock.folder, MANIFEST, [text], lock.check)
        self.manifest = manifest
        self._forget_replaced()

    def require_writable(self) -> Lock:
        """Return the lock; raise PermissionError unless this process may write, and OSError if the folder was replaced."""
        if self._lock is None:
            raise PermissionError(
                f"the store in {self.path} is closed, or open for reading; SampleStore.open(..., write=True) to write"
            )
        if not self._lock.held:
            raise PermissionError(
                f"the store in {self.path} was opened by the process this one was forked from, and is that one's to write"
            )
        with explain_errors(self.path, "the store cannot be written to"):
            self._lock.check()
            if self._uncertain:
                self._read_again()
        return self._lock

    def check_lock(self) -> None:
        """Raise OSError if this is a writer whose folder was moved or replaced."""
        if self._lock is not None and self._lock.held:
            self._lock.check()

    def _refresh(self) -> None:
        if self._lock is None or not self._lock.held:  # a writer knows what it has added
            super()._refresh()

    def _check_frozen(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a frozen parameter has changed: they are stored once, when the store is created."""
        check_same(tensors, self._load_frozen())
        refers = self.manifest.select("reference")
        if identify(tensors, refers) != self._compared:
            check_base(tensors, refers, f"the store in {self.path}")
            self._attach_base(tensors)

    def _attach_base(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors that the store refers to, which were compared."""
        refers = self.manifest.select("reference")
        self._base = {name: tensors[name].detach() for name in refers}
        self._compared = identify(tensors, refers)


def writers_of(sampler: Optimizer) -> list[SampleStore]:
    """Return the stores that this process has open for writing and that may be a sampler's: its own, and those of no sampler."""
    writers = [store for store in list(_writers) if store._lock is not None and store._lock.held]
    return [store for store in writers if store._sampler in (None, sampler)]
