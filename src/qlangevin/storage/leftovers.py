"""Temporary files: names that say whose they are, and the removal of those whose writers are gone.

A name holds the host, the process with the time of its start, and the thread:

    .manifest.json.1f0c9a2e-4711-883201-140249.tmp

On a folder that several hosts share, a process number means nothing to the others. So a file is removed if it is of this host
and its process or thread is gone; those of other hosts, and those that do not say, when nobody wrote to them for a day.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import get_ident

from .folders import Folder

__all__ = ["is_temporary", "remove_leftovers", "temporary_name"]

PATTERN = re.compile(
    r"\.(?P<name>.+)\.(?P<host>[0-9a-f]{8})-(?P<process>\d+)-(?P<start>\d+)-(?P<thread>\d+)\.tmp", re.S
)
UNKNOWN_WRITER = re.compile(r"\.(?P<name>.+)\.\d+-\d+\.tmp", re.S)  # names before they held the host
ABANDONED = 24 * 3600  # seconds without a write
LONGEST = 150  # bytes of a name that is repeated in that of its temporary file; file systems allow 255


def temporary_name(name: str) -> str:
    """Return the name of the temporary file from which this thread makes a file of that name."""
    process = os.getpid()
    return f".{_shorten(name)}.{host_id()}-{process}-{_start_time(process)}-{get_ident()}.tmp"


def is_temporary(name: str) -> bool:
    """Return True for a name that `temporary_name` can have given."""
    return bool(PATTERN.fullmatch(name) or UNKNOWN_WRITER.fullmatch(name))


def remove_leftovers(folder: Folder, name: str | None = None) -> None:
    """Remove temporary files whose writers are gone, of a file of that name or of all."""
    for entry in folder.names():
        match = PATTERN.fullmatch(entry) or UNKNOWN_WRITER.fullmatch(entry)
        if match is None or (name is not None and match["name"] != _shorten(name)):
            continue
        about = folder.status(entry)
        if about is not None:
            folder.require_file(entry, about, "a temporary file")
            if _is_leftover(match, about.st_mtime):
                folder.unlink(entry)


def _is_leftover(match: re.Match[str], written: float) -> bool:
    found = match.groupdict()
    if found.get("host") == host_id():
        process, start = int(found["process"]), int(found["start"])
        alive = _is_alive(process, start, int(found["thread"]))
        if alive is not None:
            return not alive
    return time.time() - written > ABANDONED


def _is_alive(process: int, start: int, thread: int) -> bool | None:
    """Return True if a thread of a process of this host is there; None if that is unknown."""
    if process == os.getpid():  # or that of an earlier process: numbers come back
        return start == _start_time(process) and thread in sys._current_frames()
    if os.name != "posix":  # where a signal is no question
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    now = _read_start_time(process)
    return start == now if start and now else None


@lru_cache(maxsize=1)
def host_id() -> str:
    """Return eight digits that tell this host from others; containers with process numbers of their own are hosts too."""
    parts = [os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")]
    with suppress(OSError):
        parts.append(Path("/etc/machine-id").read_text())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:8]


@lru_cache(maxsize=1)  # of the process that asks, which a fork changes
def _start_time(process: int) -> int:
    return _read_start_time(process)


def _read_start_time(process: int) -> int:
    """Return when a process started, in ticks since the system did; 0 where that is unknown."""
    try:
        # The second field is the name of the program, in brackets, which may hold anything.
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def _shorten(name: str) -> str:
    encoded = os.fsencode(name)
    return name if len(encoded) <= LONGEST else hashlib.sha256(encoded).hexdigest()[:16]
