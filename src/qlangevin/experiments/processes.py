"""Run jobs in processes of their own: a job that fails does not stop the others, and Ctrl-C reaches all of them."""

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

__all__ = ["JobOutcome", "Progress", "ignore_progress", "run_in_processes"]

Progress = Callable[[str, float], None]  # (label, share of the work just done)


def ignore_progress(label: str, share: float) -> None:
    """Progress that is not shown."""


@dataclass(frozen=True)
class JobOutcome:
    """Value returned by a job, or the error that ended it."""

    value: Any = None
    error: str | None = None


def run_in_processes(
    job: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    count: int,
    threads: int,
    progress: Callable[[int, str, float, int], None],
) -> dict[int, JobOutcome]:
    """Call ``job(*arguments[i], progress)`` for each i, ``count`` at a time; return outcomes by i, none if its process died.

    A job reports progress as a share of itself; ``progress`` receives the number of the job, its label, the share just done,
    and the number of jobs that have ended. Ctrl-C is passed on to the jobs, each of which saves its state, and is raised when
    they have ended.
    """
    context = multiprocessing.get_context("spawn")
    tasks, messages = context.Queue(), context.Queue()
    workers = [
        context.Process(target=_work, args=(job, tasks, messages, threads)) for _ in range(min(count, len(arguments)))
    ]
    for task in (*enumerate(arguments), *(None for _ in workers)):
        tasks.put(task)
    tasks.cancel_join_thread()  # after Ctrl-C no worker takes the rest
    outcomes: dict[int, JobOutcome] = {}
    try:
        _start(workers)
        for i, content, share in _receive(messages, workers):
            if isinstance(content, JobOutcome):
                outcomes[i] = content
            progress(i, "" if isinstance(content, JobOutcome) else content, share, len(outcomes))
    except BaseException:
        _stop(workers)
        raise
    return outcomes


def _start(workers: Sequence[BaseProcess]) -> None:
    """Start the workers with SIGINT blocked; each unblocks it when it is ready, since importing PyTorch takes seconds."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for worker in workers:
            worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _receive(messages: Any, workers: Sequence[BaseProcess]) -> Iterator[tuple[int, str | JobOutcome, float]]:
    """Yield (job, label or outcome, share just done) until all workers have ended."""
    while True:
        alive = any(worker.is_alive() for worker in workers)  # asked before, so that the last message is received
        try:
            yield messages.get(timeout=0.2)
        except queue.Empty:
            if not alive:
                return


def _stop(workers: Sequence[BaseProcess]) -> None:
    """Interrupt each worker once, and wait until it has saved its state."""
    begun = [(worker, worker.pid) for worker in workers if worker.pid is not None]
    for worker, process in begun:
        if worker.is_alive():
            os.kill(process, signal.SIGINT)
    for worker, _ in begun:
        worker.join(60)
        worker.kill()


def _work(job: Callable[..., Any], tasks: Any, messages: Any, threads: int) -> None:
    """Do one job after the other: the main function of a worker."""
    os.setpgrp()  # the terminal's Ctrl-C goes to the parent, which passes it on once: a second would not wait
    torch.set_num_threads(threads)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while (task := tasks.get()) is not None:
            i, arguments = task
            reporter = _Reporter(messages, i)
            try:
                outcome = JobOutcome(job(*arguments, reporter))
            except Exception as failure:
                outcome = JobOutcome(error=f"{type(failure).__name__}: {failure}")
            messages.put((i, outcome, 1.0 - reporter.sent))
    except KeyboardInterrupt:
        return


class _Reporter:
    """Progress of a job, sent to the parent twice a second; ends the process when the parent is gone."""

    def __init__(self, messages: Any, job: int) -> None:
        self.messages, self.job, self.sent, self.pending, self.last = messages, job, 0.0, 0.0, time.monotonic()

    def __call__(self, label: str, share: float) -> None:
        self.pending += share
        if time.monotonic() - self.last < 0.5:
            return
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise KeyboardInterrupt
        self.messages.put((self.job, label, self.pending))
        self.sent, self.pending, self.last = self.sent + self.pending, 0.0, time.monotonic()
