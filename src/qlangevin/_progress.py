"""Progress on standard error: a bar on a terminal; elsewhere nothing, or a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["OFTEN", "SELDOM", "progress_bar"]

OFTEN, SELDOM = 3.0, 30.0  # seconds between lines: of a command that takes a minute, and of one that may take hours


@contextmanager
def progress_bar(
    total: float | None, label: str = "starting", shown: bool = True, lines: float | None = None
) -> Iterator[Callable[[str, float], None]]:
    """Yield a function (label, steps) that sets the label and advances the bar; it does nothing if no bar is shown.

    Where standard error is not a terminal, ``lines`` is the number of seconds between lines; None prints none.
    """
    if not shown or not sys.stderr.isatty():
        if shown and lines is not None:
            with _Lines(total, label, lines) as advance:
                yield advance
        else:
            yield lambda label, steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    times = (TimeElapsedColumn(), TextColumn("/"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *times)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda label, steps: progress.update(task, description=label, advance=steps)


class _Lines:
    """Progress as lines: seconds, per cent and label, printed by a thread, so that they come also while a step takes long."""

    def __init__(self, total: float | None, label: str, seconds: float) -> None:
        self.total, self.label, self.seconds = total, label, seconds
        self.done, self.began = 0.0, time.monotonic()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._print, daemon=True)

    def __call__(self, label: str, steps: float) -> None:
        self.label, self.done = label or self.label, self.done + steps

    def __enter__(self) -> _Lines:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def _print(self) -> None:
        while not self.ended.wait(self.seconds):
            share = f"{min(1.0, self.done / self.total):4.0%} " if self.total else ""
            print(f"{time.monotonic() - self.began:4.0f} s {share} {self.label}", file=sys.stderr, flush=True)
