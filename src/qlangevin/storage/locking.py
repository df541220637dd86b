"""One writer at a time: a lock on a folder that dies with its process, however that dies."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Lock"]

NAME = ".lock"
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """The lock of a folder, held until `release`, or until the system has closed the file of a process that is gone.

    The file itself stays, empty: to remove it would let two processes hold locks on two files of the same name.
    """

    def __init__(self, folder: Path) -> None:
        if fcntl is None:
            raise OSError(f"{folder} cannot be locked: writing samples needs a POSIX system; reading them does not")
        self.descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.release()
            if not isinstance(error, BlockingIOError):
                raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(folder)) from None
            raise BlockingIOError(
                error.errno,
                "another writer has it open; there can be one at a time, and any number of readers",
                str(folder),
            ) from None
        _held.add(self)

    @property
    def held(self) -> bool:
        """Whether this process, not one it was forked from, has the lock."""
        return self.descriptor >= 0

    def release(self) -> None:
        if self.held:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            self.release()


def _after_fork() -> None:
    """A forked process shares the lock: workers of a data loader would keep it when the writer has been killed."""
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
