"""A child process that runs a function of a test and ends."""

import os
import signal
import warnings
from collections.abc import Callable
from typing import Any


def fork(action: Callable[[], Any], seconds: int = 30) -> int:
    """Run a function in a forked process and return the process's id; SIGALRM ends it after so many seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking a process that has threads
        child = os.fork()
    if child == 0:
        try:
            signal.alarm(seconds)
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def wait_for(child: int) -> int:
    """Return the exit code of a child: 0 if all went well, 1 if something was raised, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
