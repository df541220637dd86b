"""Jobs side by side in processes of their own: what fails does not stop the others, and Ctrl-C reaches all of them."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

import torch

__all__ = ["Outcome", "Progress", "side_by_side"]

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a job: what it returned, or why it did not."""

    value: Any = None
    error: str | None = None


def side_by_side(
    job: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    count: int,
    threads: int,
    progress: Callable[..., None],
) -> dict[int, Outcome]:
    """``job(*arguments[i], progress)`` for each i, ``count`` at a time, by number; those whose process died are not there.

    A job tells its progress as a share of itself; ``progress`` is told the number of the job, what it is at, what share more is
    done, and the outcomes so far. Ctrl-C is passed on to the jobs, each of which saves where it is, and raised when they have
    ended.
    """
    context = multiprocessing.get_context("spawn")
    tasks, news = context.Queue(), context.Queue()
    workers = [
        context.Process(target=_work, args=(job, tasks, news, threads)) for _ in range(min(count, len(arguments)))
    ]
    for task in (*enumerate(arguments), *(None for _ in workers)):
        tasks.put(task)
    tasks.cancel_join_thread()  # after Ctrl-C nobody takes the rest
    outcomes: dict[int, Outcome] = {}
    try:
        _start(workers)
        for kind, i, told, share in _heard(news, workers):
            if kind == "done":
                outcomes[i] = Outcome(*told)
            progress(i, "" if kind == "done" else told, share, len(outcomes))
    except BaseException:
        _stop(workers)
        raise
    return outcomes


def _start(workers: Sequence[BaseProcess]) -> None:
    """Ctrl-C is held back from a worker until it is ready: to import PyTorch takes it seconds."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _heard(news: Any, workers: Sequence[BaseProcess]) -> Iterator[Any]:
    """What the workers tell until all of them have ended."""
    while True:
        alive = any(worker.is_alive() for worker in workers)  # asked before: what is told last is heard
        try:
            yield news.get(timeout=0.2)
        except queue.Empty:
            if not alive:
                return


def _stop(workers: Sequence[BaseProcess]) -> None:
    """Interrupt the workers once each, and wait until they have saved where they are."""
    begun = [(worker, worker.pid) for worker in workers if worker.pid is not None]
    for worker, process in begun:
        if worker.is_alive():
            os.kill(process, signal.SIGINT)
    for worker, _ in begun:
        worker.join(60)
        worker.kill()


def _work(job: Callable[..., Any], tasks: Any, news: Any, threads: int) -> None:
    """A process that does one job after the other."""
    os.setpgrp()  # the terminal's Ctrl-C goes to the parent, which passes it on once: a second would not wait
    torch.set_num_threads(threads)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while (task := tasks.get()) is not None:
            i, arguments = task
            reporter = _Reporter(news, i)
            try:
                told: tuple[Any, str | None] = (job(*arguments, reporter), None)
            except Exception as failure:
                told = (None, f"{type(failure).__name__}: {failure}")
            news.put(("done", i, told, 1.0 - reporter.told))
    except KeyboardInterrupt:
        return


class _Reporter:
    """Passes progress on to the parent, twice a second; ends the process when there is no parent any more."""

    def __init__(self, news: Any, i: int) -> None:
        self.news, self.i, self.told, self.pending, self.last = news, i, 0.0, 0.0, time.monotonic()

    def __call__(self, label: str, share: float) -> None:
        self.pending += share
        if time.monotonic() - self.last < 0.5:
            return
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise KeyboardInterrupt
        self.news.put(("share", self.i, label, self.pending))
        self.told, self.pending, self.last = self.told + self.pending, 0.0, time.monotonic()
