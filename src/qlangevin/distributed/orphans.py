"""End a rank with the `torchrun` that started it.

A torchrun that is told to end (Ctrl-C, SIGTERM) ends its ranks. One that is killed cannot, and its ranks would go on by
themselves, as writers of stores that a restarted job wants to write. On Linux the kernel kills a rank when the process that
started it ends (PR_SET_PDEATHSIG): also a rank that is frozen, or busy in C++. Elsewhere a thread compares the process id of
the parent every second. What is stored is safe, as it is whenever a rank is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

__all__ = ["end_with_torchrun"]

PR_SET_PDEATHSIG = 1
SECONDS = 1.0  # between two looks at the parent


def end_with_torchrun() -> None:
    """Have this process killed when its parent ends, if torchrun started it. A shell in between hides the end of torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
        return
    threading.Thread(target=_kill_orphan, args=(parent,), name="qlangevin-parent", daemon=True).start()


def _kill_orphan(parent: int) -> None:
    """Kill this process as soon as it has another parent."""
    while os.getppid() == parent:
        time.sleep(SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
