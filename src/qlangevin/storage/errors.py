"""Errors of files and folders as sentences: what could not be done, where, why, and what to do about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["DamagedError", "explain_errors", "explained", "is_explained", "mark", "retry"]

T = TypeVar("T")
E = TypeVar("E", bound=OSError)

ATTEMPTS = 100  # at a call that signals interrupt
OTHER_FOLDER = "choose another folder"
REMEDIES = {
    errno.EACCES: f"change the permissions there, or {OTHER_FOLDER}",
    errno.EPERM: f"change the permissions there, or {OTHER_FOLDER}",
    errno.EROFS: f"mount it for writing, or {OTHER_FOLDER}",
    errno.ENOSPC: "free some room there and run again",
    errno.EDQUOT: "free some room there and run again",
    errno.EFBIG: f"raise the limit on the size of files, or {OTHER_FOLDER}",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "a folder of that path is missing: create it, or correct the path",
    errno.ENOTDIR: "a part of that path is a file, not a folder: move it, or correct the path",
    errno.EISDIR: "a folder is in the place of a file: move it away",
    errno.ELOOP: "symbolic links lead nowhere there: correct the path",
    errno.EIO: "check the disk or the network, and run again",
    errno.ENOMEM: "free some memory and run again",
    errno.EMFILE: "close some files, or raise the limit with ulimit -n, and run again",
    errno.ENFILE: "close some files and run again",
    errno.EINTR: "run again",
    errno.ENOLCK: f"the file system cannot lock files: {OTHER_FOLDER}",
    errno.EOPNOTSUPP: f"the file system cannot do that: {OTHER_FOLDER}",
}


class DamagedError(ValueError):
    """A file that is not what was written: cut short, changed, or never one of ours."""


def explained(error: OSError, path: str | os.PathLike[str], became: str) -> OSError:
    """Return an error of the same class and number that says what became of the task and what to do.

    ``became`` is a clause such as "the checkpoint was not saved".
    """
    remedy = REMEDIES.get(error.errno or 0, f"mend that, or {OTHER_FOLDER}")
    reason = error.strerror or os.strerror(error.errno or errno.EIO)
    return mark(OSError(error.errno, f"{reason}: {became}; {remedy}", str(path)))


def mark(error: E) -> E:
    """Return an error marked as one that explains itself, so that callers pass it on."""
    error.__dict__["explains_itself"] = True
    return error


def is_explained(error: OSError) -> bool:
    """Return True for an error that was raised here and not by the system."""
    return error.errno is None or "explains_itself" in error.__dict__


@contextmanager
def explain_errors(path: str | os.PathLike[str], became: str) -> Iterator[None]:
    """Turn errors of the system into ones that say what became of the task and what to do; see `explained`."""
    try:
        yield
    except OSError as error:
        if is_explained(error):
            raise
        raise explained(error, path, became) from error


def retry(call: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function of the system, again if a signal interrupts it.

    Python itself repeats interrupted calls of open, write and fsync, but not of rename, mkdir, unlink and stat.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return call(*args, **options)
        except InterruptedError:
            continue
    return call(*args, **options)
