"""Settings and fixtures of all tests."""

import os
import signal
from collections.abc import Iterator

# Before torch loads OpenMP: threads that spin while they wait for one without a processor make a busy machine many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

from qlangevin import native

# The same examples on every run, and no time limit for one: the first call of an operation can be slow.
settings.register_profile("qlangevin", deadline=None, derandomize=True)
settings.load_profile("qlangevin")
# One thread, because tensors are small here; the fixture `threads` sets more, and `make matrix` runs all of them with two.
torch.set_num_threads(int(os.environ.get("QLANGEVIN_TEST_THREADS", "1")))
# A process that a shell starts in the background ignores SIGINT, but some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=native.levels() or ["none"])
def every_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with the kernels of each instruction set that this machine has."""
    before = native.level()
    if native.available:
        native.use_level(request.param)
    yield request.param
    if native.available:
        native.use_level(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the test with one thread and with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
