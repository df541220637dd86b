"""A lock on a folder, for one writer at a time. The system releases it when the process ends, however it ends."""

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
    """The lock of a folder, held until `release` or the end of the process.

    Its empty file is never removed: otherwise two processes could hold locks on two files of the same name.
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
        """True in the process that took the lock, False in those forked from it."""
        return self.descriptor >= 0

    def release(self) -> None:
        if self.held:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            self.release()


def _release_in_child() -> None:
    """Release inherited locks: the workers of a data loader would otherwise keep the lock of a writer that was killed."""
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
