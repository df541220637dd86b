"""Fixtures for the tests of experiments."""

from pathlib import Path

import pytest

from qlangevin.experiments.run import run_experiment
from tests.helpers.experiments import SMALL


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of the small experiment."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_experiment(SMALL, folder)
    return folder
