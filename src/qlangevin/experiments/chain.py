"""One chain of a run: its network, sampler, schedule and data, and its steps, on one rank or on several that share each batch."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ..distributed.ranks import ALONE, MissingRankError, Ranks, agree, report_missing_rank
from ..distributed.replicas import Watch, replicate
from ..lowering.layers import lower
from ..quantization.formats import FP32, parse
from ..quantization.random import Key
from ..sampling.loader import Loader
from ..sampling.packing import pack, unpack
from ..sampling.schedules import Schedule
from ..sampling.sgld import SGLD
from ..storage.checkpoint import load_checkpoint, save_checkpoint
from ..storage.manifest import count_steps
from ..storage.store import SampleStore
from .data import datasets as datasets
from .data.datasets import Data
from .presets import Experiment
from .processes import Progress

__all__ = ["Run", "network", "prepare", "train"]

SECONDS = 20.0  # between checkpoints: so much is computed again after a kill; Ctrl-C loses nothing


@dataclass(frozen=True)
class Run:
    """What is stepped: a model in the method's precision, its sampler, schedule and data; ``ranks`` do so together."""

    model: nn.Module
    sampler: SGLD
    schedule: Schedule
    loader: Loader
    ranks: Ranks


def network(config: Experiment, data: Data, chain: int = 0) -> nn.Module:
    """The network with its first weights, which PyTorch draws; its generator is left as it was."""
    low, high = Key(config.seed, chain).bits
    with torch.random.fork_rng():
        torch.manual_seed(low | high << 32 if chain else config.seed)
        return config.model(data)


def prepare(config: Experiment, data: Data, begin: Path | None = None, chain: int = 0, ranks: Ranks = ALONE) -> Run:
    """All that a chain consists of, before its first step. The last sample of the store ``begin`` are the first weights.

    Chains differ in their first weights, the order of their data and all noise of the sampler and of rounding; images are
    augmented alike in all of them, and where there is a ``begin`` all begin there.
    """
    how, low, seed = config.how, config.low, config.seed
    model = network(config, data, chain)
    if begin is not None:
        SampleStore.open(begin)[-1].load_into(model)
    lower(model, config.activation_format, config.activation_format, seed=seed, stream=chain)
    if low is not None and parse(low).storage_bits >= 8:  # two codes in a byte take more time than they are worth here
        pack(model, weights=low, seed=seed, stream=chain)
        if ranks.size > 1:  # DDP wants floats: the same numbers, on which accumulators begin too
            unpack(model)
    wire = config.wire or "fp32"
    sampler = SGLD(
        model.parameters(),
        lr=config.first_lr,
        num_data=len(data.train),
        temperature=config.temperature if how.noise else 0.0,
        weight_decay=config.weight_decay,
        weights=low,
        gradients=low if parse(wire) == FP32 else None,  # else Q_G is on the wire
        accumulator=how.accumulator,
        rounding=how.rounding,
        seed=seed,
        stream=chain,
    )
    order = {"seed": seed, "stream": chain, "rank": ranks.rank, "ranks": ranks.size}
    loader = datasets.loader(data.train, config.batch, shuffle=True, workers=config.workers, **order)
    schedule = config.schedule(sampler, config.length_in_epochs * len(loader))
    if ranks.size > 1:
        model = replicate(model, sampler, wire=wire, group=ranks.group)
    return Run(model, sampler, schedule, loader, ranks)


def train(parts: Run, folder: Path, progress: Progress) -> float:
    """The steps that are left; returns the seconds that all of them took, those before an interruption included.

    The first rank writes; Ctrl-C is heard by it, and the others end when it does.
    """
    ranks, sampler, schedule, loader = parts.ranks, parts.sampler, parts.schedule, parts.loader
    with _storing(parts, folder) as store, _patient() as interrupted:
        whole = (folder, parts.model, sampler, schedule, loader, store)
        before = _where_it_was(parts, folder, store)
        progress("training", loader.steps)
        began = saved = time.monotonic()
        for x, y in loader.until(schedule.total_steps):
            sampler.zero_grad()
            with _interruptible(interrupted), report_missing_rank("during a step"):
                (cross_entropy(parts.model(x), y) * loader.share).backward()
                sampler.step()
            schedule.step()
            if schedule.collect and store is not None:
                store.append(parts.model)
            progress("training", 1)
            now = time.monotonic()
            if ranks.first and (now - saved > SECONDS or interrupted()):
                save_checkpoint(*whole, seconds=before + now - began)
                saved = time.monotonic()
            if ranks.first and interrupted():
                raise KeyboardInterrupt
        seconds = before + time.monotonic() - began
        if ranks.first:
            save_checkpoint(*whole, seconds=seconds)  # what follows may be interrupted, too
        if interrupted():
            raise KeyboardInterrupt
        return seconds


def _storing(parts: Run, folder: Path) -> Any:
    """The store, for the rank that writes it."""
    if not parts.ranks.first:
        return nullcontext()
    return SampleStore.create(folder, parts.model, parts.sampler, parts.schedule, resume=True)


def _where_it_was(parts: Run, folder: Path, store: SampleStore | None) -> float:
    """Load the checkpoint, on all ranks the same, and return the seconds so far; a chain that begins gets its first."""
    states = (parts.model, parts.sampler, parts.schedule, parts.loader)
    saved = load_checkpoint(folder, *states, store, missing_ok=True) if parts.ranks.first else {}
    parts.ranks.wait()
    if not parts.ranks.first:
        saved = load_checkpoint(folder, *states)
    if parts.ranks.size > 1:
        agree({"the steps in the checkpoint": count_steps(parts.sampler)}, parts.ranks.group)
        Watch(parts.model, parts.sampler, 0, parts.ranks.group).check()
    return float(saved.get("seconds", 0.0))


@contextmanager
def _interruptible(interrupted: Callable[[], bool]) -> Iterator[None]:
    """That the first rank is gone is no error after Ctrl-C."""
    try:
        yield
    except MissingRankError:
        if interrupted():
            raise KeyboardInterrupt from None
        raise


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
