"""Machine and software that compute a result. They decide how long it takes, and the last bits of sums."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .. import native

__all__ = ["cores", "environment", "limit_threads", "processor"]

SMALL = 2_000_000  # weights times examples of a step, below which a second thread costs more than it saves


def environment() -> dict[str, Any]:
    """Return processor, cores, kernels, threads and version of PyTorch, to be recorded in a result."""
    kernels = (
        f"native ({native.level()})" if native.available else "PyTorch (native kernels not installed or turned off)"
    )
    threads = torch.get_num_threads()
    return {
        "machine": processor(),
        "cores": cores(),
        "kernels": kernels,
        "threads": threads,
        "torch": torch.__version__,
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()


@contextmanager
def limit_threads(weights: int, batch: int) -> Iterator[None]:
    """Use one thread if the steps of a model of so many weights on so many examples are too small for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if weights * batch < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
