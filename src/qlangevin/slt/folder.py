"""The folder of an estimate: what its chains have drawn, and checkpoints, from which they resume bit for bit.

llc.json                          settings, and checksums that tell weights, masks and observed data from others
loss.json                         the loss at w*, which tells data and loss function from others
PART/chain-0.safetensors          losses of all steps and observables of all draws of a chain that has ended
PART/checkpoint-0/                the state of a chain that runs; removed when it ends
PART/weights/chain-0/             draws of the weights, a `SampleStore`, if they are kept

PART is ``part-0``, ``part-1``, ... in the order of the masks. No file depends on interruptions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._validate import describe_differences
from ..sampling.loader import Loader
from ..sampling.sampler import Sampler
from ..storage import files
from ..storage.checkpoint import load_checkpoint, save_checkpoint
from ..storage.errors import DamagedError, explain_errors
from ..storage.folders import make_folder
from ..storage.sample import chain_folder
from ..storage.state_json import random_state, set_random_state
from ..storage.store import SampleStore
from ..storage.tensor_file import read_tensors, tensor_chunks
from .identity import SAME_LOSS
from .judging import WINDOW

__all__ = ["ChainFolder", "Record", "RunFolder"]

ABOUT, LOSS, OBSERVED = "llc.json", "loss.json", "observed."


@dataclass
class Record:
    """Record of a chain: the loss of each step, that of the same examples at w*, and observables of its draws."""

    losses: Tensor
    baselines: Tensor
    done: int = 0
    observed: dict[str, Tensor] = field(default_factory=dict)
    draws: int = 0
    resolution: dict[str, Any] | None = None
    failed: str | None = None

    @classmethod
    def empty(cls, steps: int) -> Record:
        """Return the record of a chain that has not begun."""
        return cls(torch.zeros(steps, dtype=torch.float64), torch.zeros(steps, dtype=torch.float64))

    @property
    def excess(self) -> Any:
        """L(w) - L(w*) of the last steps."""
        last = slice(max(0, self.done - WINDOW), self.done)
        return (self.losses[last] - self.baselines[last]).numpy()

    def add(self, loss: float, baseline: float) -> None:
        """Record one step."""
        self.losses[self.done], self.baselines[self.done] = loss, baseline
        self.done += 1

    def observe(self, found: Mapping[str, Tensor], draws: int) -> None:
        """Record the observables of one draw."""
        for name, values in found.items():
            if name not in self.observed:
                self.observed[name] = torch.full((draws, *values.shape), torch.nan)
            self.observed[name][self.draws] = values
        self.draws += 1

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a file."""
        observed = {f"{OBSERVED}{name}": values for name, values in self.observed.items()}
        return {"losses": self.losses, "baselines": self.baselines, **observed}

    def counters(self) -> dict[str, Any]:
        """Return all but the tensors."""
        return {"done": self.done, "draws": self.draws, "resolution": self.resolution, "failed": self.failed}

    def load(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Take over a saved record."""
        self.losses, self.baselines = tensors["losses"].clone(), tensors["baselines"].clone()
        self.observed = {n.removeprefix(OBSERVED): t.clone() for n, t in tensors.items() if n.startswith(OBSERVED)}
        self.done, self.draws = int(counters["done"]), int(counters["draws"])
        self.resolution, self.failed = counters["resolution"], counters["failed"]


class Resumable:
    """The state of a sampler without its centres: they are the user's weights, which all chains share."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state without centres."""
        found = self.sampler.state_dict()
        state = {
            i: {k: v for k, v in each.items() if k.partition(".")[0] != "center"} for i, each in found["state"].items()
        }
        return {**found, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; the sampler keeps its centres."""
        centers = {p: state["center"] for p, state in self.sampler.state.items() if "center" in state}
        self.sampler.load_state_dict(state_dict)
        for p, center in centers.items():
            self.sampler.state[p]["center"] = center


class ChainFolder:
    """The files of one chain."""

    def __init__(self, folder: Path, chain: int) -> None:
        self.file, self.checkpoint = folder / f"chain-{chain}.safetensors", folder / f"checkpoint-{chain}"
        self.weights = chain_folder(folder / "weights", chain)
        self._samples: SampleStore | None = None
        self._state: tuple[Any, ...] = ()

    def read(self) -> Record | None:
        """Return the record of a chain that has ended; None if it has not."""
        if not self.file.exists():
            return None
        what = f"the draws {self.file}"
        metadata, tensors = read_tensors(self.file, what)
        counters = files.parse_json(metadata.get("record", ""), what)
        if counters.pop("sha256", None) != files.sha256(*tensor_chunks(tensors)):
            raise DamagedError(f"{what} is damaged: its content is not what was written (SHA-256 differs)")
        record = Record.empty(0)
        record.load(tensors, counters)
        return record

    @contextmanager
    def attach(self, model: nn.Module, sampler: Sampler, loader: Loader, keep_weights: bool) -> Iterator[None]:
        """Attach the parts of a chain; with ``keep_weights`` its draws are stored until the end of the context."""
        if keep_weights:
            self._samples = SampleStore.create(self.weights, model, sampler, resume=True)
        self._state = (model, cast(Any, Resumable(sampler)), None, loader, self._samples)
        try:
            yield
        finally:
            self._state = ()
            if self._samples is not None:
                self._samples.close()
                self._samples = None

    def resume(self, record: Record) -> None:
        """Take over a checkpoint, if there is one; save the first if there is none. Global generators keep their states."""
        before = random_state()
        if not (self.checkpoint / "checkpoint.safetensors").exists() and self._samples is not None:
            self._samples.truncate(0)  # killed before its first checkpoint
        counters = load_checkpoint(self.checkpoint, *self._state, missing_ok=True)
        set_random_state(before)
        if counters:
            record.load(counters["tensors"], counters["record"])

    def save(self, record: Record) -> None:
        """Save a checkpoint."""
        save_checkpoint(self.checkpoint, *self._state, tensors=record.to_tensors(), record=record.counters())

    def keep_weights(self, model: nn.Module) -> None:
        """Store the weights as they are now, if they are kept."""
        if self._samples is not None:
            self._samples.append(model)

    def finish(self, record: Record, failed: str | None = None) -> None:
        """Write the record of a chain that has ended, and remove its checkpoint."""
        record.failed = failed
        tensors = record.to_tensors()
        about = {**record.counters(), "sha256": files.sha256(*tensor_chunks(tensors))}
        files.write(self.file, tensor_chunks(tensors, {"record": json.dumps(about, sort_keys=True)}))
        shutil.rmtree(self.checkpoint, ignore_errors=True)


class RunFolder:
    """The folder of an estimate."""

    def __init__(self, path: Path, about: Mapping[str, Any], parts: int) -> None:
        """Begin or resume; raise ValueError if the folder holds an estimate with other settings."""
        self.path = path
        with explain_errors(path, "the folder of the estimate was not made"):
            for part in range(parts):
                make_folder(self.part(part))
            self._check(about)

    def _check(self, about: Mapping[str, Any]) -> None:
        file, here = self.path / ABOUT, json.loads(json.dumps(about))
        if not file.exists():
            files.write(file, [json.dumps(here, indent=1, sort_keys=True, allow_nan=False).encode()])
            return
        there = files.parse_json(files.read(file, f"the settings {file}"), f"the settings {file}")
        if odd := describe_differences(there, here):
            raise ValueError(f"{self.path} holds another estimate: {'; '.join(odd[:4])}; choose another store")

    def check_loss(self, loss: float) -> None:
        """Note the loss at w*; raise ValueError if the folder holds an estimate that had another."""
        file = self.path / LOSS
        with explain_errors(file, "the loss at w* was not noted"):
            if not file.exists():
                files.write(file, [json.dumps({"init_loss": loss}).encode()])
                return
        there = float(files.parse_json(files.read(file, f"the loss {file}"), f"the loss {file}")["init_loss"])
        if abs(loss - there) > SAME_LOSS * max(abs(there), SAME_LOSS):  # it may be zero
            raise ValueError(
                f"{self.path} holds another estimate: the loss at w* is {there:.6g} there and {loss:.6g} here, so that data or "
                "loss function are others; choose another store"
            )

    def part(self, index: int) -> Path:
        """Return the folder of a part."""
        return self.path / f"part-{index}"

    def chain(self, part: int, chain: int) -> ChainFolder:
        """Return the files of a chain."""
        return ChainFolder(self.part(part), chain)
