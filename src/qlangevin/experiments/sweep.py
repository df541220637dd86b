"""Many runs at once: methods x formats x seeds, as many side by side as there are cores.

What is done is skipped, what was interrupted goes on, and what fails does not stop the others. Each run is a folder of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from . import classify
from .methods import METHODS, MethodName
from .presets import Experiment

__all__ = ["Outcome", "plan", "sweep"]


@dataclass(frozen=True)
class Outcome:
    """What became of a run; ``error`` says why it has no result."""

    folder: Path
    error: str | None = None


def plan(
    base: Experiment, methods: Sequence[MethodName], formats: Sequence[str], seeds: Sequence[int]
) -> list[Experiment]:
    """The runs: the rows of the paper, or all of these methods in all of these formats; full precision once for each seed."""
    if not seeds:
        raise ValueError("a sweep needs at least one seed")
    rows = list(base.rows)
    if methods or formats:
        methods, formats = methods or [m for m, _ in rows], formats or [f for _, f in rows if f is not None]
        rows = [(method, format) for format in formats or [base.default_format] for method in methods]
    runs = []
    for seed in seeds:
        for method, format in rows:
            config = replace(base, method=method, format=format if METHODS[method].low else None, seed=seed)
            if config not in runs:
                runs.append(config)
    return runs


def sweep(
    configs: Sequence[Experiment],
    folder: Path,
    data_dir: Path | None,
    jobs: int,
    threads: int,
    progress: classify.Progress = lambda label, runs: None,
) -> list[Outcome]:
    """Do the runs in subfolders of ``folder``, ``jobs`` at a time; ``progress`` is told what share of a run more is done.

    Data that are not there and a folder that holds another run are errors, before the first of them. Ctrl-C is passed on to
    the runs, each of which saves where it is, and raised when they have ended.
    """
    folders = [folder / config.run_name for config in configs]
    pairs = list(zip(configs, folders, strict=True))
    outcomes = {i: Outcome(f) for i, (config, f) in enumerate(pairs) if classify.finished(config, f)}
    left = [(i, config, f, data_dir) for i, (config, f) in enumerate(pairs) if i not in outcomes]
    if left:
        classify.load(left[0][1], data_dir)  # what all of them need: to be missed, or downloaded, once
    progress("sweep", len(outcomes))
    context = multiprocessing.get_context("spawn")
    tasks, news = context.Queue(), context.Queue()
    workers = [context.Process(target=_work, args=(tasks, news, threads)) for _ in range(min(jobs, len(left)))]
    for task in (*left, *(None for _ in workers)):
        tasks.put(task)
    tasks.cancel_join_thread()  # after Ctrl-C nobody takes the rest
    try:
        _start(workers)
        for kind, i, text, share in _heard(news, workers):
            if kind == "done":
                outcomes[i] = Outcome(folders[i], text)
            progress(f"{len(outcomes)}/{len(configs)} {configs[i].run_name}", share)
    except BaseException:
        _stop(workers)
        raise
    lost = "its process died; run the same command again"
    return [outcomes.get(i) or Outcome(f, None if classify.finished(c, f) else lost) for i, (c, f) in enumerate(pairs)]


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


def _work(tasks: Any, news: Any, threads: int) -> None:
    """A process that does one run after the other."""
    os.setpgrp()  # the terminal's Ctrl-C goes to the parent, which passes it on once: a second would not wait
    torch.set_num_threads(threads)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while (task := tasks.get()) is not None:
            i, config, folder, data_dir = task
            reporter = _Reporter(news, i)
            try:
                classify.run(config, folder, data_dir, reporter)
                error = None
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            news.put(("done", i, error, 1.0 - reporter.told))
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
