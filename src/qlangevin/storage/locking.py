"""A lock on a folder, for one writer at a time. The system releases it when the process ends, however it ends."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path

from .errors import mark, retry
from .folders import Folder, close_quietly

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Lock", "check_locks_of"]

NAME = ".lock"
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """The lock of a folder, held until `release` or the end of the process.

    Its empty file is never removed: otherwise two processes could hold locks on two files of the same name. The folder stays
    open as long as the lock is held, and `check` tells whether its path still names it.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        if fcntl is None:
            raise OSError(f"{path} cannot be locked: writing samples needs a POSIX system; reading them does not")
        self.path, self.folder = _fixed(path), Folder.open(path)
        try:
            self.descriptor = self.folder.open_file(NAME, f"the lock of {path}", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.check()  # the folder or the file may have been replaced before it was locked
        except OSError as error:
            self.release()
            if isinstance(error, BlockingIOError):
                reason = "another writer has it open; there can be one at a time, and any number of readers"
                raise mark(BlockingIOError(error.errno, reason, str(path))) from None
            raise
        except BaseException:
            self.release()
            raise
        _held.add(self)

    def check(self) -> None:
        """Raise OSError unless the path still names the folder, and the file in it, that are locked.

        Somebody who renames the folder and makes another can become the writer of that one.
        """
        try:
            there = retry(os.stat, self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise self._lost(
                "the folder is gone: it was moved or removed after it was opened for writing. Nothing more was written, and "
                "the samples stored before are gone with it if it was removed; if it was moved, open the store where it is now"
            ) from None
        if (there.st_dev, there.st_ino) != self.folder.identity():
            raise self._lost(
                "another folder has taken the place of the one that was opened for writing, which was moved or removed. "
                "Nothing was written into this one; if yours was moved, open the store where it is now"
            )
        named, lock = self.folder.status(NAME), retry(os.fstat, self.descriptor)
        if named is None or (named.st_dev, named.st_ino) != (lock.st_dev, lock.st_ino):
            raise self._lost(
                f"its file {NAME} was removed or replaced after the folder was opened for writing, so that another writer may "
                "have it open. Nothing more was written; close the store and open it again"
            )

    def _lost(self, reason: str) -> OSError:
        return mark(OSError(errno.ESTALE, reason, str(self.path)))

    @property
    def held(self) -> bool:
        """True in the process that took the lock, False in those forked from it."""
        return self.descriptor >= 0

    def release(self) -> None:
        if self.held:
            descriptor, self.descriptor = self.descriptor, -1
            close_quietly(descriptor)
        if hasattr(self, "folder"):
            self.folder.close()

    def __del__(self) -> None:
        self.release()


def check_locks_of(path: Path) -> None:
    """Raise OSError if this process holds locks on folders of that path, and none on the folder that it names now."""
    locks, problems = [lock for lock in list(_held) if lock.held and lock.path == _fixed(path)], []
    for lock in locks:
        try:
            lock.check()
        except OSError as error:
            problems.append(error)
    if problems and len(problems) == len(locks):
        raise problems[0]


def _fixed(path: Path) -> Path:
    """Return a path that stays the same when the working directory changes, unless folders above that one are closed to us."""
    try:
        retry(os.stat, path.absolute())
    except PermissionError:
        return path
    except OSError:
        pass
    return path.absolute()


def _release_in_child() -> None:
    """Release inherited locks: the workers of a data loader would otherwise keep the lock of a writer that was killed."""
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
