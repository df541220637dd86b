"""Samples on disk, read: a folder is a sequence of samples, a sample a mapping of names to tensors.

    run/manifest.json              what the samples are of, and the checksum of every file
    run/frozen.safetensors         frozen parameters, once
    run/samples/000000.safetensors codes and exponents of the first sample, and its buffers

Opening reads the manifest. A sample is mapped into memory when it is first asked for, and hashed then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from . import files, model_tensors
from .files import DamagedError
from .manifest import Manifest, Record

__all__ = ["FOLDER", "FROZEN", "MANIFEST", "Sample", "Samples", "chain_folder", "chain_folders"]

MANIFEST, FROZEN, FOLDER = "manifest.json", "frozen.safetensors", "samples"


def chain_folder(run: str | os.PathLike[str], chain: int) -> Path:
    """Where in the folder of a run the store of one of its chains is."""
    return Path(run) / f"chain-{chain}"


def chain_folders(run: str | os.PathLike[str]) -> list[Path]:
    """The stores of a run: those of its chains in order, or, of a run that is one chain, the folder itself."""
    path = Path(run)
    found = [p for p in path.glob("chain-*") if p.name[6:].isdecimal() and (p / MANIFEST).exists()]
    if (path / MANIFEST).exists() or not found:
        return [path]
    return sorted(found, key=lambda p: int(p.name[6:]))


class Sample(Mapping[str, Tensor]):
    """One sample: its tensors by name, mapped into memory when first asked for; packed parameters are `QTensor`s."""

    def __init__(self, store: Samples, index: int, record: Record) -> None:
        self.index, self.step, self.nbytes = index, record.step, record.digest.size
        self.store, self._record = store, record
        self._tensors: dict[str, Tensor] | None = None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        if self._tensors is None:
            self._tensors = self.store._load(self.index, self._record)
        return self._tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.store.manifest.tensors)

    def __len__(self) -> int:
        return len(self.store.manifest.tensors)

    __eq__, __hash__ = object.__eq__, object.__hash__  # not tensor by tensor

    def __repr__(self) -> str:
        return f"Sample({self.index} of {self.store.path}, step {self.step}, {self.nbytes} bytes)"

    def decode(self, device: torch.device | str | None = None) -> dict[str, Tensor]:
        """The tensors as plain ones; codes move to the device before they are decoded."""
        return {name: model_tensors.plain(model_tensors.moved(t, device)) for name, t in self.items()}

    def load_into(self, model: nn.Module) -> None:
        """Make these the weights and buffers of a model, packed or not."""
        tensors = model_tensors.named_tensors(model)
        model_tensors.check_fits(model_tensors.describe(tensors), self.store.manifest.tensors, repr(self))
        model_tensors.load_into(tensors, self)


class Samples(Sequence[Sample]):
    """A folder of samples. Somebody else may be adding to it: what has been added is seen when the length is asked for."""

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path, self.manifest = path, Manifest("", {}, {}) if manifest is None else manifest
        self._stamp: tuple[int, ...] = ()  # of the manifest that was read
        self._intact: dict[int, Record] = {}  # samples whose content has been hashed
        self._frozen: dict[str, Tensor] | None = None

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
        """How the samples were drawn: settings of the sampler and the schedule, and the seed."""
        return self.manifest.settings

    @property
    def nbytes(self) -> int:
        """All that the samples take on the disk, without the manifest."""
        self._refresh()
        records = [*self.manifest.samples, *([self.manifest.frozen] if self.manifest.frozen else [])]
        return sum(record.digest.size for record in records)

    def verify(self) -> None:
        """Read every file, and raise a DamagedError that names all that are not what was written."""
        self._refresh()
        self._frozen, self._intact = None, {}
        self._frozen_tensors()  # without which no sample is whole
        found = []
        for i, record in enumerate(self.manifest.samples):
            try:
                self._load(i, record)
            except (DamagedError, OSError) as error:
                found.append(str(error))
        if found:
            good = len(self.manifest.samples) - len(found)
            raise DamagedError("; ".join(found) + f". The other {good} samples of {self.path} are as they were written")

    def _file(self, index: int) -> Path:
        return self.path / FOLDER / f"{index:06d}.safetensors"

    @staticmethod
    def _read(path: Path) -> Manifest:
        try:
            return Manifest.from_json(files.read(path / MANIFEST, "the manifest"))
        except DamagedError as error:
            raise DamagedError(f"{path}: {error}") from None

    def _refresh(self) -> None:
        """See what has been added since."""
        about = os.stat(self.path / MANIFEST)
        stamp = (about.st_ino, about.st_mtime_ns, about.st_size)
        if stamp != self._stamp:
            self.manifest, self._stamp = self._read(self.path), stamp
            self._forget()

    def _forget(self) -> None:
        """Files of the same number may be others now."""
        samples = self.manifest.samples
        self._intact = {i: record for i, record in self._intact.items() if i < len(samples) and samples[i] == record}

    def _load(self, index: int, record: Record) -> dict[str, Tensor]:
        what = f"sample {index} of {self.path}"
        specs = self.manifest.specs("parameter", "buffer")
        hashed = self._intact.get(index) == record
        parts = files.map_tensors(self._file(index), specs, record.digest, what, check=not hashed)
        tensors = (
            model_tensors.assemble(parts, self.manifest.of_kind("parameter", "buffer"), what) | self._frozen_tensors()
        )
        self._intact[index] = record
        return {name: tensors[name] for name in self.manifest.tensors}

    def _frozen_tensors(self) -> dict[str, Tensor]:
        if self.manifest.frozen is None:
            return {}
        if self._frozen is None:
            what, specs = f"{FROZEN} of {self.path}", self.manifest.specs("frozen")
            parts = files.map_tensors(self.path / FROZEN, specs, self.manifest.frozen.digest, what)
            self._frozen = model_tensors.assemble(parts, self.manifest.of_kind("frozen"), what)
        return self._frozen
