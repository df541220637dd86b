"""Classification with any method of the paper: train, store, average, score; a run is a folder, and can be interrupted.

config.json              the configuration (`presets`)
manifest.json, samples/  the samples (`SampleStore`)
checkpoint.safetensors   where the run is
result.json              what came out, when it is done
begin/                   the run whose last weights this one begins with, on ImageNet
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .. import files
from ..checkpoints import load_checkpoint, save_checkpoint
from ..checks import differences
from ..formats import parse
from ..loader import Loader
from ..lowering import lower
from ..packing import pack
from ..posterior import Posterior
from ..samplers import SGLD
from ..schedules import Schedule
from ..store import SampleStore
from ..version import __version__
from . import data as datasets
from .data import Data
from .machine import environment
from .presets import Experiment, from_json
from .scoring import score

__all__ = [
    *["CONFIG", "RESULT", "Run", "configuration", "finished", "load", "posterior", "prepare", "read_result", "run"],
    "train",
]

CONFIG, RESULT, BEGIN = "config.json", "result.json", "begin"
SECONDS = 20.0  # between checkpoints: so much is computed again after a kill; Ctrl-C loses nothing
TEST_BATCH = 500

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Run:
    """What is stepped: a model in the method's precision, its sampler, schedule and data."""

    model: nn.Module
    sampler: SGLD
    schedule: Schedule
    loader: Loader


def prepare(config: Experiment, data: Data, begin: Path | None = None) -> Run:
    """All that a run consists of, before its first step. The last sample of the store ``begin`` are the first weights."""
    how, low = config.how, config.low
    model = _model(config, data)
    if begin is not None:
        SampleStore.open(begin)[-1].load_into(model)
    lower(model, config.activation_format, config.activation_format, seed=config.seed)
    if low is not None and parse(low).storage_bits >= 8:  # two codes in a byte take more time than they are worth here
        pack(model, weights=low, seed=config.seed)
    sampler = SGLD(
        model.parameters(),
        lr=config.first_lr,
        num_data=len(data.train),
        temperature=config.temperature if how.noise else 0.0,
        weight_decay=config.weight_decay,
        weights=low,
        gradients=low,
        accumulator=how.accumulator,
        rounding=how.rounding,
        seed=config.seed,
    )
    loader = datasets.loader(data.train, config.batch, shuffle=True, seed=config.seed, workers=config.workers)
    return Run(model, sampler, config.schedule(sampler, config.length_in_epochs * len(loader)), loader)


def _model(config: Experiment, data: Data) -> nn.Module:
    """The network with its first weights, which PyTorch draws; its generator is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        return config.model(data)


def run(
    config: Experiment, folder: Path, data_dir: Path | None = None, progress: Progress = lambda label, share: None
) -> dict[str, Any]:
    """Do the run, or what is left of it, and return its result; ``progress`` is told what runs and what share more is done.

    Raises KeyboardInterrupt after a checkpoint if Ctrl-C was pressed. The same call goes on from there.
    """
    begun = _begun(config, folder)
    if (folder / RESULT).exists():
        return read_result(folder)
    data = load(config, data_dir)
    parts, rest = prepare(config, data), 1.0
    if not begun:  # not before all is known to fit together: else a mistake would occupy the folder
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / CONFIG, [json.dumps(config.to_json(), indent=1).encode()])
    if config.beginning is not None:
        rest = config.length_in_epochs / (config.length_in_epochs + config.epochs)
        run(config.beginning, folder / BEGIN, data_dir, lambda label, share: progress(label, share * (1 - rest)))
        parts = prepare(config, data, folder / BEGIN)
    # Backward takes twice as long as forward; samples are only run forward.
    work = 3 * config.length_in_epochs * len(data.train), parts.schedule.samples * len(data.test)
    steps, examples = (rest * part / sum(work) for part in work)
    seconds = train(parts, folder, lambda label, n: progress(label, n * steps / parts.schedule.total_steps))
    advance: Progress = lambda label, n: progress(label, n * examples / len(data.test))  # noqa: E731
    result = _result(config, data, parts, folder, seconds, advance)
    files.write(folder / RESULT, [json.dumps(result, indent=1, allow_nan=False).encode()])
    return result


def load(config: Experiment, data_dir: Path | None) -> Data:
    return datasets.load(config.data, data_dir, **config.load_options())


def train(parts: Run, folder: Path, progress: Progress) -> float:
    """The steps that are left; returns the seconds that all of them took, those before an interruption included."""
    model, sampler, schedule, loader = parts.model, parts.sampler, parts.schedule, parts.loader
    with SampleStore.create(folder, model, sampler, schedule, resume=True) as store, _patient() as interrupted:
        whole = (folder, model, sampler, schedule, loader, store)
        before = float(load_checkpoint(*whole, missing_ok=True).get("seconds", 0.0))
        progress("training", loader.steps)
        began = saved = time.monotonic()
        for x, y in loader.until(schedule.total_steps):
            sampler.zero_grad()
            cross_entropy(model(x), y).backward()
            sampler.step()
            schedule.step()
            if schedule.collect:
                store.append(model)
            progress("training", 1)
            now = time.monotonic()
            if now - saved > SECONDS or interrupted():
                save_checkpoint(*whole, seconds=before + now - began)
                saved = time.monotonic()
            if interrupted():
                raise KeyboardInterrupt
        seconds = before + time.monotonic() - began
        save_checkpoint(*whole, seconds=seconds)  # what follows may be interrupted, too
        if interrupted():
            raise KeyboardInterrupt
        return seconds


@contextmanager
def _patient() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the step to end; the function says whether it has been pressed. A second one does not wait."""
    pressed = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():  # where Python does not allow it, nobody presses
        yield pressed.is_set
        return
    old = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, old)


def posterior(config: Experiment, data: Data, *folders: Path) -> Posterior:
    """The average over the samples of a run, or of several."""
    model = _model(config, data)
    lower(model, config.activation_format, config.activation_format)
    return Posterior.open(folders, model)


def _result(
    config: Experiment, data: Data, parts: Run, folder: Path, seconds: float, progress: Progress
) -> dict[str, Any]:
    began, average = time.monotonic(), posterior(config, data, folder)
    scored = score(average, datasets.loader(data.test, TEST_BATCH, shuffle=False, workers=config.workers), progress)
    store, weights = SampleStore.open(folder), sum(p.numel() for p in parts.model.parameters())
    return {
        "experiment": config.name,
        "version": __version__,
        "command": config.command,
        "settings": config.to_json(),
        "scaled": config.scaled,
        "environment": environment(),
        "data": {"name": data.name, "train": len(data.train), "test": len(data.test), "note": data.note},
        "model": {"name": type(parts.model).__name__, "weights": weights},
        **scored,
        "memory": {"training": _bytes_held(parts) / weights, "sample": store.nbytes / len(store) / weights},
        "steps": parts.schedule.total_steps,
        "samples": len(store),
        "seconds": {"train": seconds, "evaluate": time.monotonic() - began},
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _bytes_held(parts: Run) -> int:
    """What weights and the sampler's state occupy, without gradients."""
    state = [t for held in parts.sampler.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in [*parts.model.parameters(), *state])


def _begun(config: Experiment, folder: Path) -> bool:
    """Whether the folder holds this run already. It must not hold anything else."""
    if (folder / CONFIG).exists():
        there = replace(configuration(folder), workers=config.workers)  # which may change: they change no number
        if wrong := differences(there.to_json(), config.to_json()):
            raise ValueError(f"{folder} holds another run: {', '.join(wrong)}; choose another folder with --out")
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and holds something else; choose another folder with --out")
    return False


def finished(config: Experiment, folder: Path) -> bool:
    """Whether the folder holds the result of this run. It must not hold anything else."""
    return _begun(config, folder) and (folder / RESULT).exists()


def configuration(folder: Path) -> Experiment:
    """What a run was told."""
    file = folder / CONFIG
    if not file.exists():
        raise ValueError(f"there is no run in {folder}: it has no {CONFIG}")
    return from_json(files.parse_json(files.read(file, f"the configuration {file}"), f"the configuration {file}"))


def read_result(folder: Path) -> dict[str, Any]:
    file = folder / RESULT
    result: dict[str, Any] = files.parse_json(files.read(file, f"the result {file}"), f"the result {file}")
    return result
