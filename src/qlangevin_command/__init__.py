"""The command ``qlangevin``: import the package, which takes a second, such that Ctrl-C meanwhile ends without a traceback.

It is no part of the package: importing any part of that imports PyTorch first.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]


def main() -> int:
    """Execute the command line and return the exit code; 130 if interrupted."""
    before = signal.signal(signal.SIGINT, _leave)
    from qlangevin.cli import commands  # noqa: F401  the rest of what a command needs
    from qlangevin.cli.main import main as execute

    signal.signal(signal.SIGINT, before)
    return execute()


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: an exception raised while an extension module initializes may be lost or turned into another."""
    sys.stderr.write("qlangevin: interrupted\n")
    sys.stderr.flush()
    os._exit(130)
