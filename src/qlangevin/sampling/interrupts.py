"""Ctrl-C in the middle of a step: it waits until weights, accumulators and counters agree again."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps it, and takes ten times as long
import signal
from types import FrameType

__all__ = ["Uninterrupted"]

SIGINT = int(signal.SIGINT)


class Uninterrupted:
    """A context in which Ctrl-C is noted, and raises KeyboardInterrupt at its end.

    In threads other than the main one, which Ctrl-C does not interrupt, and where the program handles Ctrl-C itself it has no
    effect.
    """

    __slots__ = ("defers", "pressed")

    def __enter__(self) -> None:
        self.defers = self.pressed = False
        if _signal.getsignal(SIGINT) is signal.default_int_handler:
            try:
                _signal.signal(SIGINT, self._note)
            except ValueError:  # only the main thread may
                return
            self.defers = True

    def __exit__(self, *_: object) -> None:
        if self.defers:
            _signal.signal(SIGINT, signal.default_int_handler)
            if self.pressed:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
