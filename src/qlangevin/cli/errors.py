"""Report errors of commands: one sentence on standard error, and an exit code."""

from __future__ import annotations

import os
import sys

from ..distributed.ranks import launched

__all__ = ["describe_error", "fail", "rank"]


def describe_error(error: BaseException) -> str:
    """Return the message of an error as one line."""
    if isinstance(error, OSError) and error.strerror:
        file = f"{error.filename}: " if error.filename else ""
        return f"{file}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def fail(message: str, code: int) -> int:
    """Print a message on standard error, with the rank if there are several, and return the exit code."""
    who = "" if rank() is None else f" (rank {rank()})"
    print(f"qlangevin{who}: {message}", file=sys.stderr, flush=True)
    return code


def rank() -> str | None:
    """Return the rank of this process among several; None if it is the only one."""
    return os.environ["RANK"] if launched() and os.environ["WORLD_SIZE"] != "1" else None
