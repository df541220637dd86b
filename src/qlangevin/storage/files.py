"""Files that are written atomically, checksummed, and checked before anything in them is used.

`write` puts a file beside its final path, syncs it, and renames it. Readers compare a file with the size and the SHA-256 noted
when it was written, so that a lost sector is an error and not a sample. Tensors are stored as safetensors (`tensor_file`),
everything else as JSON: nothing that is read is ever executed. In error messages, ``what`` names the file ("sample 3 of run").
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "Bytes",
    "DamagedError",
    "Digest",
    "map_file",
    "parse_json",
    "read",
    "remove_leftovers",
    "sha256",
    "sync_folder",
    "write",
    "write_hashed",
]

JSON_LIMIT = 64_000_000  # bytes
RUN = 1 << 21  # bytes written before the disk is asked to start on them; a file of that size is hashed in a thread
CHUNKS_PER_CALL = 512  # for os.writev

Bytes: TypeAlias = bytes | memoryview | mmap.mmap


class DamagedError(ValueError):
    """A file that is not what was written: cut short, changed, or never one of ours."""


class Digest(NamedTuple):
    """Size and checksum of a file."""

    size: int
    sha256: str


# ---- writing


def write(path: Path, chunks: Sequence[Bytes]) -> None:
    """Write a file, all of it or nothing; on return it is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process that had the same number
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        with open(descriptor, "wb", buffering=0):
            _write_and_sync(descriptor, chunks)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def write_hashed(path: Path, chunks: Sequence[Bytes]) -> Digest:
    """Write a file like `write`; return its size and SHA-256, computed while the disk is busy if the file is large."""
    get_sha256 = _start_hashing(chunks)
    write(path, chunks)
    return Digest(sum(map(len, chunks)), get_sha256())


def sha256(*chunks: Bytes) -> str:
    """Return the SHA-256 of a file that consists of these chunks, as `sha256sum` prints it."""
    total = hashlib.sha256()
    for chunk in chunks:
        total.update(chunk)
    return total.hexdigest()


def _start_hashing(chunks: Sequence[Bytes]) -> Callable[[], str]:
    """Begin to compute a SHA-256, that of a large file in another thread; return a function that waits for it.

    One thread hashes 1.8 GB/s with the SHA instructions of a CPU. Of the 9.8 ms that an append of 11 MB (ResNet-18 in bfp8)
    takes, waiting for the hash is 2.6; a hash of hashes of pieces, computed in parallel, would save 1.7, and `sha256sum`
    could not check the file.
    """
    if sum(map(len, chunks)) >= RUN:
        with suppress(RuntimeError):  # an interpreter that is shutting down starts no threads
            return _hashing_threads(os.getpid()).submit(sha256, *chunks).result
    digest = sha256(*chunks)
    return lambda: digest


@lru_cache(maxsize=1)
def _hashing_threads(process: int) -> ThreadPoolExecutor:
    """Threads of this process, kept: starting one takes a third of a millisecond. A forked process inherits none."""
    return ThreadPoolExecutor(2, thread_name_prefix="qlangevin-hash")


def _write_and_sync(descriptor: int, chunks: Sequence[Bytes]) -> None:
    size = sum(map(len, chunks))
    if size > RUN and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)  # fails now if the disk is full, and makes the rest faster
    for run in _split_into_runs(chunks):
        _write_run(descriptor, run)
    os.fsync(descriptor)


def _split_into_runs(chunks: Sequence[Bytes]) -> Iterator[list[memoryview]]:
    """Yield the chunks of a file in runs of `RUN` bytes; an empty file is one run."""
    run: list[memoryview] = []
    room = RUN
    for chunk in chunks:
        rest = memoryview(chunk)
        while len(rest) > room:
            yield [*run, rest[:room]]
            rest, run, room = rest[room:], [], RUN
        run.append(rest)
        room -= len(rest)
    yield run


def _write_run(descriptor: int, run: Sequence[memoryview]) -> None:
    """Write chunks, several in one call, and have the disk start on them while the next run is copied."""
    rest = [chunk for chunk in run if len(chunk)]
    while rest:
        written = (
            os.writev(descriptor, rest[:CHUNKS_PER_CALL]) if hasattr(os, "writev") else os.write(descriptor, rest[0])
        )
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # Linux starts to write out what is not on the disk


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder, on systems where a folder can be opened; others do so by themselves."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove temporary files of that name whose writers are gone."""
    for file in folder.glob(f".{name}.*.tmp"):
        match = re.fullmatch(r"\..*\.(\d+)-(\d+)\.tmp", file.name)
        if match and not _is_alive(int(match[1]), int(match[2])):
            file.unlink(missing_ok=True)


def _is_alive(process: int, thread: int) -> bool:
    if process == os.getpid():  # or that of an earlier process: in containers the same numbers come back
        return thread in sys._current_frames()
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


# ---- reading


@contextmanager
def map_file(path: Path, what: str, size: int | None = None) -> Iterator[mmap.mmap]:
    """Map a file into memory; raise DamagedError if it is no ordinary file or, where ``size`` is known, of another size."""
    try:
        # Without waiting: opening a pipe in the place of a file would block until there is a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise DamagedError(f"{what} is missing: there is no {path}") from None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise DamagedError(f"{what} is damaged: {path} is not an ordinary file")
        if about.st_size == 0 or (size is not None and about.st_size != size):
            expected = f", {size} were written" if size is not None else ""
            raise DamagedError(f"{what} is damaged: {path} has {about.st_size} bytes{expected}")
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
            yield mapped
    finally:
        os.close(descriptor)


def read(path: Path, what: str, limit: int = JSON_LIMIT) -> bytes:
    """Return the bytes of a file; raise DamagedError if there are more than ``limit``."""
    with map_file(path, what) as mapped:
        if len(mapped) > limit:
            raise DamagedError(f"{what} is damaged: {path} has {len(mapped)} bytes, more than any that was written")
        return mapped[:]


def parse_json(text: bytes | str, what: str) -> Any:
    """Parse JSON as the standard defines it: no NaN, no infinity, no key twice, no nesting beyond the interpreter's depth."""

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key stands there twice")
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a number of JSON")

    def parse_finite(digits: str) -> float:
        return number if math.isfinite(number := float(digits)) else refuse(digits)

    try:
        return json.loads(text, object_pairs_hook=refuse_duplicates, parse_constant=refuse, parse_float=parse_finite)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise DamagedError(f"{what} is damaged: it cannot be read as JSON ({error})") from None
