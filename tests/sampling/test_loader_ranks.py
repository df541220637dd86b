"""Loaders with streams of their own, and the parts of a batch for several ranks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlangevin.sampling.loader import Loader
from tests.helpers.loaders import Numbers, ignore_worker_warnings, rest, take, where

pytestmark = ignore_worker_warnings


def test_streams_have_orders_of_their_own() -> None:
    orders = [rest(Loader(Numbers(20), 20, seed=3, stream=stream)) for stream in (0, 1, 2)]
    assert orders[0] == rest(Loader(Numbers(20), 20, seed=3))
    assert len({str(order) for order in orders}) == 3


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_the_parts_of_all_ranks_are_the_batch(count: int, size: int, ranks: int, shuffle: bool) -> None:
    whole = Loader(Numbers(count), size, shuffle=shuffle)
    parts = [Loader(Numbers(count), size, shuffle=shuffle, rank=rank, ranks=ranks) for rank in range(ranks)]
    for batch, *mine in zip(whole, *parts, strict=True):
        counted = [part.tolist() if loader.share else [] for part, loader in zip(mine, parts, strict=True)]
        assert [x for part in counted for x in part] == batch.tolist()
        assert all(len(part) for part in mine)  # each has something to compute
        mean = sum(float(part.double().mean()) * loader.share for part, loader in zip(mine, parts, strict=True)) / ranks
        assert mean == pytest.approx(float(batch.double().mean()))
        assert len({where(loader) for loader in (whole, *parts)}) == 1


def test_parts_go_on_after_a_resume_with_workers_too() -> None:
    loader = Loader(Numbers(23), 4, rank=1, ranks=2, seed=5)
    take(loader, 3)
    resumed = Loader(Numbers(23), 4, rank=1, ranks=2, seed=5, num_workers=2)
    resumed.load_state_dict(loader.state_dict())
    assert rest(resumed) == rest(loader)
    assert rest(loader.untouched()) == rest(Loader(Numbers(23), 4, rank=1, ranks=2, seed=5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "ranks": 2}, "rank must be less than ranks, got rank 2 of 2"),
        ({"rank": -1, "ranks": 2}, "rank must be an integer, at least 0, got -1"),
        ({"ranks": 0}, "ranks must be an integer, at least 1, got 0"),
        ({"stream": -1}, "stream must be an integer between 0"),
    ],
)
def test_ranks_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(Numbers(8), 2, **options)
