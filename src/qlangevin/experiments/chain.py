"""Prepare and train one chain of a run, on one rank or on several that share each batch."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

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
from .data import Data, make_loader
from .presets import Experiment
from .processes import Progress

__all__ = ["Chain", "build_network", "prepare_chain", "train_chain"]

SECONDS = 20.0  # between checkpoints: a killed run repeats at most this much; Ctrl-C loses nothing


@dataclass(frozen=True)
class Chain:
    """Parts of a chain: a model in the method's precision, its sampler, schedule and data, and the ranks that step it."""

    model: nn.Module
    sampler: SGLD
    schedule: Schedule
    loader: Loader
    ranks: Ranks


def build_network(config: Experiment, data: Data, chain: int = 0) -> nn.Module:
    """Build the network with its initial weights. PyTorch's global generator keeps its state."""
    low, high = Key(config.seed, chain).bits
    with torch.random.fork_rng():
        torch.manual_seed(low | high << 32 if chain else config.seed)
        return config.model(data)


def prepare_chain(
    config: Experiment, data: Data, warm_start: Path | None = None, chain: int = 0, ranks: Ranks = ALONE
) -> Chain:
    """Build the parts of a chain, before its first step; with a store ``warm_start``, its last sample are the initial weights.

    Chains differ in their initial weights, the order of their data and all noise of the sampler and of rounding. Images are
    augmented alike in all chains, and a ``warm_start`` is the same for all.
    """
    method, low, seed = config.method_settings, config.weight_format, config.seed
    model = build_network(config, data, chain)
    if warm_start is not None:
        SampleStore.open(warm_start)[-1].load_into(model)
    format = config.activation_format or "fp32"
    lower(model, format, format, functions=False, seed=seed, stream=chain)
    if low is not None and parse(low).storage_bits >= 8:  # packing two codes in a byte takes too much time
        pack(model, weights=low, seed=seed, stream=chain)
        if ranks.size > 1:  # DDP needs floats: the rounded values, from which accumulators start too
            unpack(model)
    wire = config.wire or "fp32"
    sampler = SGLD(
        model.parameters(),
        lr=config.first_lr,
        num_data=len(data.train),
        temperature=config.temperature if method.noise else 0.0,
        weight_decay=config.weight_decay,
        weights=low,
        gradients=low if parse(wire) == FP32 else None,  # else the wire applies Q_G
        accumulator=method.accumulator,
        rounding=method.rounding,
        seed=seed,
        stream=chain,
    )
    order = {"seed": seed, "stream": chain, "rank": ranks.rank, "ranks": ranks.size}
    loader = make_loader(data.train, config.batch, shuffle=True, workers=config.workers, **order)
    schedule = config.schedule(sampler, config.length_in_epochs * len(loader))
    if ranks.size > 1:
        model = replicate(model, sampler, wire=wire, group=ranks.group)
    return Chain(model, sampler, schedule, loader, ranks)


def train_chain(chain: Chain, folder: Path, progress: Progress) -> float:
    """Take the steps that are left; return the seconds that all steps took, including those before an interruption.

    ``progress`` receives the number of steps just taken. Only the first rank writes to the folder. It handles Ctrl-C, and the
    other ranks end when it does.
    """
    ranks, sampler, schedule, loader = chain.ranks, chain.sampler, chain.schedule, chain.loader
    with _open_store(chain, folder) as store, _defer_interrupt() as interrupted:
        state = (folder, chain.model, sampler, schedule, loader, store)
        before = _resume(chain, folder, store)
        progress("training", loader.steps)
        began = saved = time.monotonic()
        for x, y in loader.until(schedule.total_steps):
            sampler.zero_grad()
            with _interruptible(interrupted), report_missing_rank("during a step"):
                (cross_entropy(chain.model(x), y) * loader.share).backward()
                sampler.step()
            schedule.step()
            if schedule.collect and store is not None:
                store.append(chain.model)
            progress("training", 1)
            now = time.monotonic()
            if ranks.first and (now - saved > SECONDS or interrupted()):
                save_checkpoint(*state, seconds=before + now - began)
                saved = time.monotonic()
            if ranks.first and interrupted():
                raise KeyboardInterrupt
        seconds = before + time.monotonic() - began
        if ranks.first:
            save_checkpoint(*state, seconds=seconds)  # scoring may be interrupted, too
        if interrupted():
            raise KeyboardInterrupt
        return seconds


def _open_store(chain: Chain, folder: Path) -> AbstractContextManager[SampleStore | None]:
    """Open the sample store on the first rank, which writes it; None on the others."""
    if not chain.ranks.first:
        return nullcontext()
    return SampleStore.create(folder, chain.model, chain.sampler, chain.schedule, resume=True)


def _resume(chain: Chain, folder: Path, store: SampleStore | None) -> float:
    """Load the checkpoint, the same on all ranks, and return the seconds so far. A new chain gets its first checkpoint."""
    states = (chain.model, chain.sampler, chain.schedule, chain.loader)
    saved = load_checkpoint(folder, *states, store, missing_ok=True) if chain.ranks.first else {}
    chain.ranks.wait()
    if not chain.ranks.first:
        saved = load_checkpoint(folder, *states)
    if chain.ranks.size > 1:
        agree({"the steps in the checkpoint": count_steps(chain.sampler)}, chain.ranks.group)
        Watch(chain.model, chain.sampler, 0, chain.ranks.group).check()
    return float(saved.get("seconds", 0.0))


@contextmanager
def _interruptible(interrupted: Callable[[], bool]) -> Iterator[None]:
    """Turn the loss of another rank into KeyboardInterrupt if Ctrl-C was pressed: the first rank ends then."""
    try:
        yield
    except MissingRankError:
        if interrupted():
            raise KeyboardInterrupt from None
        raise


@contextmanager
def _defer_interrupt() -> Iterator[Callable[[], bool]]:
    """Let a step finish after Ctrl-C; yield a function that returns whether it was pressed. A second Ctrl-C does not wait."""
    pressed = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if (
        threading.current_thread() is not threading.main_thread()
    ):  # Python allows handlers, and sends Ctrl-C, only there
        yield pressed.is_set
        return
    old = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, old)
