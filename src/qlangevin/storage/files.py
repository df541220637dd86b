"""Files that are written atomically, checksummed, and checked before anything in them is used.

`write` puts a file beside its final path, syncs it, and renames it. `write_in` and `open_file` do so in an open folder, in which
symbolic links are refused (`folders`). Readers compare a file with the size and the SHA-256 noted
when it was written, so that a lost sector is an error and not a sample. Tensors are stored as safetensors (`tensor_file`),
everything else as JSON: nothing that is read is ever executed. In error messages, ``what`` names the file ("sample 3 of run").
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from .errors import DamagedError, retry
from .folders import Folder, close_quietly
from .leftovers import temporary_name

__all__ = [
    "Bytes",
    "DamagedError",
    "Digest",
    "OpenFile",
    "map_file",
    "open_file",
    "parse_json",
    "read",
    "read_from",
    "sha256",
    "write",
    "write_hashed",
    "write_in",
]

JSON_LIMIT = 64_000_000  # bytes
RUN = 1 << 21  # bytes written before the disk is asked to start on them; a file of that size is hashed in a thread
CHUNKS_PER_CALL = 512  # for os.writev

Bytes: TypeAlias = bytes | memoryview | mmap.mmap


class Digest(NamedTuple):
    """Size and checksum of a file."""

    size: int
    sha256: str


# ---- writing


def write(path: Path, chunks: Sequence[Bytes]) -> None:
    """Write a file, all of it or nothing; on return it is on the disk."""
    with Folder.open(path.parent) as folder:
        write_in(folder, path.name, chunks)


def write_hashed(
    folder: Folder, name: str, chunks: Sequence[Bytes], check: Callable[[], object] = lambda: None
) -> Digest:
    """Write a file like `write_in`; return its size and SHA-256, computed while the disk is busy if the file is large."""
    get_sha256 = _start_hashing(chunks)
    write_in(folder, name, chunks, check)
    return Digest(sum(map(len, chunks)), get_sha256())


def write_in(folder: Folder, name: str, chunks: Sequence[Bytes], check: Callable[[], object] = lambda: None) -> None:
    """Write a file in a folder like `write`; ``check`` is called before the file appears under its name."""
    temporary = temporary_name(name)
    try:
        folder.unlink(temporary)  # left by a killed process that had the same number
        descriptor = folder.open_file(temporary, "a temporary file", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        _write_sync_close(descriptor, chunks)
        check()
        folder.replace(temporary, name)
        _sync_entry(folder)
    except BaseException as error:
        with suppress(OSError):  # the next writer removes it
            folder.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(folder.path / name)
        raise


def _sync_entry(folder: Folder) -> None:
    """Sync a folder in which a file has been put in its place; an error is marked ``in_place``."""
    try:
        folder.sync()
    except OSError as error:
        error.__dict__["in_place"] = True
        raise


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


def _write_sync_close(descriptor: int, chunks: Sequence[Bytes]) -> None:
    size = sum(map(len, chunks))
    try:
        if size > RUN and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # fails now if the disk is full, and makes the rest faster
        for run in _split_into_runs(chunks):
            _write_run(descriptor, run)
        os.fsync(descriptor)
    except BaseException:
        close_quietly(descriptor)
        raise
    with suppress(InterruptedError):  # it is closed nevertheless, and on the disk
        os.close(descriptor)


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


# ---- reading


class OpenFile(NamedTuple):
    """An ordinary file that is open for reading."""

    descriptor: int
    size: int
    path: Path


@contextmanager
def open_file(path: Path, what: str, folder: Folder | None = None) -> Iterator[OpenFile]:
    """Open a file; raise DamagedError if it is no ordinary one.

    In ``folder``, which is open, a link is refused; without one, ``path`` was given by the user and may be a link.
    """
    descriptor = _open_path(path, what) if folder is None else folder.open_file(path.name, what)
    try:
        about = retry(os.fstat, descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise DamagedError(f"{what} is damaged: {path} is not an ordinary file")
        yield OpenFile(descriptor, about.st_size, path)
    finally:
        close_quietly(descriptor)


def _open_path(path: Path, what: str) -> int:
    try:
        # Without waiting: opening a pipe in the place of a file would block until there is a writer.
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise DamagedError(f"{what} is missing: there is no {path}") from None


def check_size(file: OpenFile, what: str, size: int | None = None) -> None:
    """Raise DamagedError for a file that is empty or, where ``size`` is known, of another size."""
    if file.size == 0 or (size is not None and file.size != size):
        expected = f", {size} were written" if size is not None else ""
        raise DamagedError(f"{what} is damaged: {file.path} has {file.size} bytes{expected}")


@contextmanager
def map_file(file: OpenFile | Path, what: str) -> Iterator[mmap.mmap]:
    """Map a file into memory; raise DamagedError if it is empty or no ordinary file."""
    if isinstance(file, Path):
        with open_file(file, what) as opened, map_file(opened, what) as mapped:
            yield mapped
        return
    check_size(file, what)
    try:
        mapped = retry(mmap.mmap, file.descriptor, file.size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.path)) from None
    with mapped:
        yield mapped


def read_from(file: OpenFile, what: str, start: int, count: int) -> bytes:
    """Return ``count`` bytes of a file; raise DamagedError if there are fewer."""
    pieces: list[bytes] = []
    os.lseek(file.descriptor, start, os.SEEK_SET)
    while count:
        try:
            piece = os.read(file.descriptor, min(count, 1 << 24))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file.path)) from None
        if not piece:
            raise DamagedError(f"{what} is damaged: {file.path} became shorter while it was read")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def read(path: Path, what: str, limit: int = JSON_LIMIT, folder: Folder | None = None) -> bytes:
    """Return the bytes of a file, see `open_file`; raise DamagedError if there are more than ``limit``."""
    with open_file(path, what, folder) as file:
        check_size(file, what)
        if file.size > limit:
            raise DamagedError(f"{what} is damaged: {path} has {file.size} bytes, more than any that was written")
        return read_from(file, what, 0, file.size)


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
