"""Processes that tests start."""

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any


def fork(action: Callable[[], Any]) -> int:
    """A process that does something and ends; SIGALRM ends it if it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that forking and threads do not go well together
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def wait_for(child: int) -> int:
    """Return the exit code of a child: 0 if all went well, 1 if something was raised, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
