"""What all tests share."""

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from qlangevin import native

# The same examples on every run, and no limit on the time of one: the first call of an operation can be slow.
settings.register_profile("qlangevin", deadline=None, derandomize=True)
settings.load_profile("qlangevin")
torch.set_num_threads(1)  # tensors are small here; tests of threads ask for their own
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # tests press Ctrl-C; what a shell runs in the background ignores it


@pytest.fixture(params=native.levels() or ["none"])
def every_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs with each instruction set this machine has."""
    before = native.level()
    if native.available:
        native.use_level(request.param)
    yield request.param
    if native.available:
        native.use_level(before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The test runs with one thread and with two."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
