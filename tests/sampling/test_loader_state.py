"""The state of a loader: resuming with the remaining batches, and states that are refused."""

import json
from typing import Any

import numpy as np
import pytest

from qlangevin.sampling.loader import Loader
from tests.helpers.loaders import Numbers, ignore_worker_warnings, rest, take, where

pytestmark = ignore_worker_warnings


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_resumed_loader_gives_the_remaining_batches(shuffle: bool, drop_last: bool) -> None:
    def new() -> Loader:
        return Loader(Numbers(11), 3, shuffle=shuffle, drop_last=drop_last, seed=9)

    total = 3 * len(new())
    whole = take(new(), total)
    for stop in range(total):
        loader = new()
        take(loader, stop)
        resumed = new()
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert where(resumed) == where(loader) == (*divmod(stop, len(loader)), stop)
        assert take(resumed, total - stop) == whole[stop:]


def test_workers_change_nothing() -> None:
    one = Loader(Numbers(23), 3, seed=2)
    two = Loader(Numbers(23), 3, seed=2, num_workers=2)
    assert [rest(one), rest(one)] == [rest(two), rest(two)]
    [state] = [two.state_dict() for i, _ in enumerate(two) if i == 3]  # more have been fetched
    assert (state["epoch"], state["position"]) == (2, 4)
    one.load_state_dict(state)
    two.load_state_dict(state)
    assert rest(one) == rest(two)


@pytest.mark.parametrize("total", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("stop", [0, 2, 5])
def test_until_crosses_epochs_and_resumes(total: int, stop: int) -> None:
    def loader() -> Loader:
        return Loader(list(range(8)), 2, seed=4)

    whole = [batch.tolist() for batch in loader().until(total)]
    assert len(whole) == total
    first, second = loader(), loader()
    seen = [batch.tolist() for batch in first.until(min(stop, total))]
    second.load_state_dict(first.state_dict())
    assert seen + [batch.tolist() for batch in second.until(total)] == whole
    assert second.steps == total


def test_a_state_says_what_the_order_depends_on() -> None:
    loader = Loader(Numbers(7), np.int64(2), seed=np.int64(4), drop_last=True)
    take(loader, 5)
    order = {"seed": 4, "stream": 0, "num_data": 7, "batch_size": 2, "drop_last": True, "shuffle": True}
    assert json.loads(json.dumps(loader.state_dict())) == {"epoch": 1, "position": 2, **order}


def test_loading_ends_older_iterators() -> None:
    loader = Loader(Numbers(8), 2)
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="iterated anew, loaded or failed since"):
        next(batches)
    assert where(loader) == (0, 1, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "another order: seed is 1 there and 0 here$"),
        ({"stream": 1}, "another order: stream is 1 there and 0 here$"),
        ({"num_data": 9, "batch_size": 3}, "num_data is 9 there and 8 here, batch_size is 3 there and 2"),
        ({"drop_last": True}, "drop_last is True there and False here"),
        ({"shuffle": False}, "shuffle is False there and True here"),
        ({"position": 4}, "position must be less than 4, the batches of an epoch, got 4"),
        ({"position": -1}, "position must be an integer, at least 0, got -1"),
        ({"epoch": 1.5}, "epoch must be an integer, at least 0, got 1.5"),
    ],
)
def test_a_state_with_another_order_is_refused(change: dict[str, Any], message: str) -> None:
    loader = Loader(Numbers(8), 2)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), "epoch": 3, **change})
    assert where(loader) == (0, 1, 1)
    next(batches)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="not the state of a Loader: it has no position, seed, num_data, batch_size"):
        Loader(Numbers(8), 2).load_state_dict({"epoch": 3})


def test_a_state_of_before_there_were_streams_is_of_the_first() -> None:
    loader = Loader(Numbers(8), 2)
    old = {name: value for name, value in loader.state_dict().items() if name != "stream"}
    loader.load_state_dict({**old, "epoch": 2})
    assert where(loader) == (2, 0, 8)
    with pytest.raises(ValueError, match="stream is 0 there and 3 here"):
        Loader(Numbers(8), 2, stream=3).load_state_dict(old)
