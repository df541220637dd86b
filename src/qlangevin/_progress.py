"""A progress bar on standard error, shown only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(
    total: float | None, label: str = "starting", shown: bool = True
) -> Iterator[Callable[[str, float], None]]:
    """Yield a function (label, steps) that sets the label and advances the bar; it does nothing if no bar is shown."""
    if not shown or not sys.stderr.isatty():
        yield lambda label, steps: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    times = (TimeElapsedColumn(), TextColumn("/"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *times)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda label, steps: progress.update(task, description=label, advance=steps)
