"""One chain: steps around w*, the loss of each, and what is observed at its draws."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..sampling.sampler import Sampler
from .baseline import Baseline
from .borrowing import lend_model, mean_square_distance
from .data import batch_to, chain_loader
from .folder import ChainFolder, Record
from .judging import ChainLeftError, check_distance, check_losses
from .losses import Loss, Observable
from .selection import Part
from .settings import Settings

__all__ = ["Job", "Progress", "defer_interrupt", "run_chain"]

SECONDS = 20.0  # between checkpoints
LOOKS = 16  # at the distance from w*, in a chain

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Job:
    """Inputs and settings that all chains of an estimate share."""

    model: nn.Module
    loader: DataLoader[Any]
    loss: Loss
    settings: Settings
    baseline: Baseline
    observables: Mapping[str, Observable] = field(default_factory=dict)
    keep_weights: bool = False


def run_chain(
    job: Job, part: Part, chain: int, folder: ChainFolder | None, interrupted: Callable[[], bool], progress: Progress
) -> Record:
    """Run a chain, or the rest of it, and return what it recorded. The model is as before afterwards, whatever happens."""
    settings, users = job.settings, dict(job.model.named_parameters())
    record = Record.empty(settings.steps)
    with ExitStack() as stack:
        sampler = stack.enter_context(lend_model(job.model, part, settings, chain))
        loader = chain_loader(job.loader, settings.seed, chain)
        if folder is not None:
            stack.enter_context(folder.attach(job.model, sampler, loader, job.keep_weights))
            folder.resume(record)
        progress(record.done)
        try:
            _take_steps(job, part, chain, sampler, loader, users, record, folder, interrupted, progress)
        except ChainLeftError as error:
            error.losses = record.losses[: record.done].numpy().copy()
            if folder is not None:
                folder.finish(record, str(error))
            raise
        if folder is not None:
            folder.finish(record)
    return record


def _take_steps(
    job: Job, part: Part, chain: int, sampler: Sampler, loader: Any, users: Mapping[str, Tensor], record: Record,
    folder: ChainFolder | None, interrupted: Callable[[], bool], progress: Progress,
) -> None:  # fmt: skip
    settings, device = job.settings, next(job.model.parameters()).device
    size, saved = part.size(users), time.monotonic()
    look = max(1, settings.steps // LOOKS)
    for numbers, batch in loader.until(settings.steps):
        step = record.done + 1
        if step == settings.steps:
            sampler.keep_gradients()
        record.add(_step(job, sampler, batch_to(batch, device), chain, step), job.baseline.of(numbers))
        check_losses(record.excess, settings, size, chain, step)
        if step % look == 0:
            check_distance(mean_square_distance(job.model, users, part), settings, chain, step)
        if settings.is_draw(step):
            record.observe({name: o.measure(job.model, name) for name, o in job.observables.items()}, settings.draws)
            if folder is not None:
                folder.keep_weights(job.model)
        if step == settings.steps:
            record.resolution = _diagnose(sampler)
        progress(1)
        stop = interrupted()
        if folder is not None and (stop or time.monotonic() - saved > SECONDS):
            folder.save(record)
            saved = time.monotonic()
        if stop:
            raise KeyboardInterrupt


def _step(job: Job, sampler: Sampler, batch: Any, chain: int, step: int) -> float:
    """Take one step, and return the loss before it."""
    loss = job.loss(job.model, batch).float().mean()
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ChainLeftError(
            f"the loss of chain {chain} is {value} at step {step}; take a smaller lr or a larger localization"
        )
    try:
        loss.backward()
        sampler.step()
    except FloatingPointError as error:
        raise ChainLeftError(f"chain {chain}, step {step}: {error}; take a smaller lr") from None
    return value


def _diagnose(sampler: Sampler) -> dict[str, Any] | None:
    """Return whether the bits suffice, as the sampler sees it after its last step; None if it cannot tell."""
    ask = getattr(sampler, "diagnose", None)
    if ask is None:
        return None
    try:
        found = ask()
    except RuntimeError:  # no gradients to diagnose by
        return None
    return {name: _to_json(value) for name, value in {**found.to_dict(), "summary": found.summary}.items()}


def _to_json(value: Any) -> Any:
    """Return figures as JSON has them: without infinities, and lists for tuples."""
    if isinstance(value, Mapping):
        return {name: _to_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def defer_interrupt() -> Iterator[Callable[[], bool]]:
    """Let a step finish after Ctrl-C; yield a function that returns whether it was pressed. A second Ctrl-C does not wait."""
    pressed = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():  # Python sends Ctrl-C only there
        yield pressed.is_set
        return
    old = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, old)
