"""Fixtures for the tests of samples and checkpoints."""

from collections.abc import Iterator

import pytest

from qlangevin.storage import state_json


@pytest.fixture(autouse=True)
def _restore_generators() -> Iterator[None]:
    """Restore the global random generators, which tests seed and checkpoints set."""
    before = state_json.random_state()
    yield
    state_json.set_random_state(before)
