"""Ctrl-C in the middle of a step: it waits until weights, accumulators and counters agree again."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps it, and takes ten times as long
import signal
import threading
from types import FrameType

__all__ = ["Uninterrupted"]


class Uninterrupted:
    """A context in which Ctrl-C is noted, and raises KeyboardInterrupt at its end.

    In threads other than the main one, which Ctrl-C does not interrupt, and where the program handles Ctrl-C itself it has no
    effect.
    """

    __slots__ = ("defers", "pressed")

    def __enter__(self) -> None:
        self.pressed = False
        is_main = threading.current_thread() is threading.main_thread()
        self.defers = is_main and _signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.defers:
            _signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self.defers:
            _signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.pressed:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
