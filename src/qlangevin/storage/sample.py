"""Reading samples: a folder is a sequence of samples, a sample a mapping of names to tensors.

    run/manifest.json              tensors, settings, and the checksum of every file
    run/frozen.safetensors         frozen parameters, once, unless the store only refers to them
    run/samples/000000.safetensors codes, exponents and buffers of the first sample

Opening a folder reads the manifest. A sample is mapped into memory and hashed when it is first used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from . import files, model_tensors
from .base import check_base
from .errors import DamagedError, explain_errors
from .folders import Folder
from .manifest import Manifest, Record
from .names import fit_names
from .tensor_file import map_tensors

__all__ = ["FOLDER", "FROZEN", "MANIFEST", "Sample", "Samples", "chain_folder", "chain_folders"]

MANIFEST, FROZEN, FOLDER = "manifest.json", "frozen.safetensors", "samples"
MOST_PARTS = 5  # of a store, in a message


def chain_folder(run: str | os.PathLike[str], chain: int) -> Path:
    """Return the folder of the store of one chain of a run."""
    return Path(run) / f"chain-{chain}"


def chain_folders(run: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of the stores of a run: its chains in order, or the run itself if it is one chain."""
    path = Path(run)
    found = [p for p in path.glob("chain-*") if p.name[6:].isdecimal() and (p / MANIFEST).exists()]
    if (path / MANIFEST).exists() or not found:
        return [path]
    return sorted(found, key=lambda p: int(p.name[6:]))


class Sample(Mapping[str, Tensor]):
    """One sample: its tensors by name, mapped into memory when first used; packed parameters are `QTensor`s."""

    def __init__(self, store: Samples, index: int, record: Record) -> None:
        self.index, self.step, self.nbytes = index, record.step, record.digest.size
        self.store, self._record = store, record
        self._tensors: dict[str, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tensors": None}  # mapped anew where they are used

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        if self._tensors is None:
            self._tensors = self.store._load_sample(self.index, self._record)
        return self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.store.names)

    def __len__(self) -> int:
        return len(self.store.names)

    __eq__, __hash__ = object.__eq__, object.__hash__  # by identity, where Mapping would compare tensors

    def __repr__(self) -> str:
        return f"Sample({self.index} of {self.store.path}, step {self.step}, {self.nbytes} bytes)"

    def decode(self, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """Return the tensors decoded; codes are moved to the device before they are decoded."""
        return {name: model_tensors.to_plain(model_tensors.move_to(t, device)) for name, t in self.items()}

    def load_into(self, model: nn.Module) -> None:
        """Copy the sample into the parameters and buffers of a model, packed or not.

        Names may differ by a prefix, such as ``module.``. A base that the store refers to must be the model's.
        """
        tensors = self.store.fit(model, repr(self))
        model_tensors.load_into({name: tensors[name] for name in self}, self)


class Samples(Sequence[Sample]):
    """A folder of samples, for reading. A writer may be adding to it: ``len`` sees what has been added."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path, self.manifest = path, Manifest("", {}, {}) if manifest is None else manifest
        self._stamp: tuple[int, ...] = ()  # inode, time and size of the manifest that was read
        self._verified: dict[int, Record] = {}  # samples whose SHA-256 has been checked
        self._frozen: dict[str, Tensor] | None = None
        self._base: dict[str, Tensor] = {}  # what references refer to, if a model was given

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to read the samples: no lock, nothing that is open, no tensors."""
        return {"path": self.path.absolute(), "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["manifest"])  # type: ignore[misc]

    def __len__(self) -> int:
        self._refresh()
        return len(self.manifest.samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        count = len(self)
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(count))]
        if not -count <= index < count:
            raise IndexError(f"sample {index} of a store with {count}")
        return Sample(self, index % count, self.manifest.samples[index % count])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self)} samples, {self.nbytes} bytes)"

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the sampler and the schedule, and the seed."""
        return self.manifest.settings

    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors of each sample; those of a base that is only referred to if a model was given for it."""
        infos = self.manifest.tensors
        return [name for name, info in infos.items() if info.kind != "reference" or name in self._base]

    def fit(self, model: nn.Module, what: str) -> dict[str, Tensor]:
        """Return the tensors of a model by the names of the store; raise ValueError if it or its base is another."""
        tensors, infos = model_tensors.named_tensors(model), self.manifest.tensors
        names = fit_names(model_tensors.describe(tensors), infos, what)
        found = {name: tensors[names[name]] for name in infos}
        check_base(found, infos, what)
        return found

    @property
    def nbytes(self) -> int:
        """Size of all files of tensors on the disk."""
        self._refresh()
        records = [*self.manifest.samples, *([self.manifest.frozen] if self.manifest.frozen else [])]
        return sum(record.digest.size for record in records)

    def verify(self) -> None:
        """Read every file; raise a DamagedError that names all that are not what was written."""
        self._refresh()
        self._frozen, self._verified = None, {}
        self._load_frozen()  # every sample needs them
        problems = []
        for i, record in enumerate(self.manifest.samples):
            try:
                self._read_sample(i, record)
            except (DamagedError, OSError) as error:
                problems.append((i, str(error)))
        if problems:
            good = len(self.manifest.samples) - len(problems)
            others = f"The other {good} samples of {self.path} are as they were written{self._remedy([i for i, _ in problems])}"
            raise DamagedError(f"{'; '.join(why for _, why in problems)}. {others}")

    def _remedy(self, damaged: Sequence[int]) -> str:
        """Return how to leave samples out, as the end of a message; nothing if no other is left."""
        count, begins = len(self.manifest.samples), [0, *(i + 1 for i in damaged)]
        runs = [*zip(begins, [*damaged, count], strict=True)]
        parts = [f"store[{begin or ''}:{end if end < count else ''}]" for begin, end in runs if begin < end]
        if not parts or len(parts) > MOST_PARTS:
            return ""
        what = "it" if len(damaged) == 1 else "these"
        calls = f"store = SampleStore.open({str(self.path)!r}), Posterior.open({' + '.join(parts)}, model)"
        return f"; to leave {what} out: {calls}"

    def _sample_file(self, index: int) -> Path:
        return self.path / FOLDER / f"{index:06d}.safetensors"

    def _open_folder(self) -> Folder:
        """Open the folder anew: it may have been replaced, and readers keep nothing open."""
        return Folder.open(self.path)

    @staticmethod
    def _read_manifest(folder: Folder) -> Manifest:
        try:
            return Manifest.from_json(files.read(folder.path / MANIFEST, "the manifest", folder=folder))
        except DamagedError as error:
            raise DamagedError(f"{folder.path}: {error}") from None

    def _refresh(self) -> None:
        """Read the manifest again if it has changed."""
        with explain_errors(self.path, "the manifest of the store was not read"), self._open_folder() as folder:
            about = folder.status(MANIFEST)
            stamp = () if about is None else (about.st_ino, about.st_mtime_ns, about.st_size)
            if stamp != self._stamp or about is None:
                self.manifest, self._stamp = self._read_manifest(folder), stamp
                self._forget_replaced()

    def _forget_replaced(self) -> None:
        """Forget that samples were verified whose files have been replaced."""
        samples = self.manifest.samples
        self._verified = {i: record for i, record in self._verified.items() if samples[i : i + 1] == (record,)}

    def _load_sample(self, index: int, record: Record) -> dict[str, Tensor]:
        """Return the tensors of a sample, with those that are stored once."""
        try:
            tensors = self._read_sample(index, record)
        except DamagedError as error:
            raise DamagedError(f"{error}{self._remedy([index])}") from None
        tensors |= self._load_frozen()
        return {name: self._base[name] if name in self._base else tensors[name] for name in self.names}

    def _read_sample(self, index: int, record: Record) -> dict[str, Tensor]:
        """Return the tensors in the file of a sample."""
        what = f"sample {index} of {self.path}"
        specs, infos = self.manifest.stored_specs("parameter", "buffer"), self.manifest.select("parameter", "buffer")
        check_hash = self._verified.get(index) != record
        file = self._sample_file(index)
        with (
            explain_errors(file, f"{what} was not read"),
            self._open_folder() as folder,
            folder.enter(FOLDER) as samples,
        ):
            stored = map_tensors(file, specs, record.digest, what, check_hash, samples)
        tensors = model_tensors.restore_tensors(stored, infos, what)
        self._verified[index] = record
        return tensors

    def _load_frozen(self) -> dict[str, Tensor]:
        if self.manifest.frozen is None:
            return {}
        if self._frozen is None:
            what, specs = f"{FROZEN} of {self.path}", self.manifest.stored_specs("frozen")
            with explain_errors(self.path / FROZEN, f"{what} was not read"), self._open_folder() as folder:
                stored = map_tensors(self.path / FROZEN, specs, self.manifest.frozen.digest, what, folder=folder)
            self._frozen = model_tensors.restore_tensors(stored, self.manifest.select("frozen"), what)
        return self._frozen
