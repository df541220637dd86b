"""The SHA-256 of a file in pieces, so that several processors can share the work while the disk does its own."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import TypeAlias

__all__ = ["PIECE", "Bytes", "Hashing", "cut", "sha256"]

PIECE = 1 << 21  # bytes that are hashed in one go; several can be at the same time

Bytes: TypeAlias = bytes | memoryview


class Hashing:
    """The SHA-256 of a file's bytes; of a file longer than a piece, the SHA-256 of those of its pieces.

    Threads that `help` hash pieces while something else is done; whoever wants the result does what is left.
    """

    def __init__(self, parts: Sequence[Bytes]) -> None:
        self.pieces = deque(enumerate(cut(parts)))
        self.digests = [b""] * len(self.pieces)
        self.helpers: list[Future[None]] = []

    def help(self) -> None:
        if len(self.digests) > 1:
            with suppress(RuntimeError):  # when the interpreter is about to end, there is no help
                self.helpers.append(_threads(os.getpid()).submit(self._work))

    def _work(self) -> None:
        with suppress(IndexError):  # when there is none left
            while True:
                i, piece = self.pieces.popleft()
                self.digests[i] = _hash(piece)

    def result(self) -> str:
        self._work()
        for helper in self.helpers:
            helper.result()
        return (self.digests[0] if len(self.digests) == 1 else _hash(self.digests)).hex()


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Those of this process, kept: to start one takes a third of a millisecond. A forked process has none of them."""
    return ThreadPoolExecutor(2, thread_name_prefix="qlangevin-hash")


def sha256(*parts: Bytes) -> str:
    hashing = Hashing(parts)
    hashing.help()
    return hashing.result()


def _hash(parts: Sequence[Bytes]) -> bytes:
    total = hashlib.sha256()
    for part in parts:
        total.update(part)
    return total.digest()


def cut(parts: Sequence[Bytes]) -> Iterator[list[Bytes]]:
    """A file that is given in parts, in pieces of `PIECE` bytes; an empty file is one piece."""
    piece: list[Bytes] = []
    room = PIECE
    for part in parts:
        left = memoryview(part)
        while len(left) > room:
            yield [*piece, left[:room]]
            left, piece, room = left[room:], [], PIECE
        piece.append(left)
        room -= len(left)
    yield piece
