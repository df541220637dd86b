"""Fixtures for the tests of predictions."""

from pathlib import Path

import pytest
from torch import nn

import qlangevin as ql
from tests.helpers.posteriors import Fill, small_model, store_draws, store_walk


@pytest.fixture
def store(tmp_path: Path) -> ql.SampleStore:
    return store_draws(tmp_path / "run")


@pytest.fixture(scope="module")
def posterior(tmp_path_factory: pytest.TempPathFactory) -> ql.Posterior:
    return ql.Posterior.open(store_draws(tmp_path_factory.mktemp("store") / "run"), small_model())


@pytest.fixture
def two(tmp_path: Path) -> ql.Posterior:
    """A posterior of two chains, of 6 and 4 samples."""
    stores = [store_draws(tmp_path / "a"), store_draws(tmp_path / "b", 4, seed=1)]
    return ql.Posterior.open(stores, small_model())


@pytest.fixture
def fill(tmp_path: Path) -> Fill:
    """A function that stores a random walk from the weights of a model, under a name in the folder of the test."""

    def fill(model: nn.Module, count: int = 3, seed: int = 0, name: str = "run") -> ql.SampleStore:
        return store_walk(tmp_path / name, model, count, seed)

    return fill
