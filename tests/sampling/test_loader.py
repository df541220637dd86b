"""The order of batches, the position of a loader, and resuming from there."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from qlangevin.sampling.loader import Loader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine with one processor
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


class Numbers(Dataset[int]):
    """The first integers; the number `bad` cannot be read."""

    def __init__(self, count: int, bad: int | None = None) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise OSError("the disk is on fire")
        return index


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def rest(loader: Loader) -> list[list[int]]:
    """Return the batches of the rest of the epoch."""
    return [batch.tolist() for batch in loader]


def take(loader: Loader, count: int) -> list[list[int]]:
    """Return that many batches, over as many epochs as they take; the last loop is left when there are enough."""
    batches: list[list[int]] = []
    while len(batches) < count:
        for batch in loader:
            batches.append(batch.tolist())
            if len(batches) == count:
                break
    return batches


def where(loader: Loader) -> tuple[int, int, int]:
    return loader.epoch, loader.position, loader.steps


# --- the order ---


def test_it_is_a_data_loader() -> None:
    loader = Loader(TensorDataset(torch.arange(10.0), torch.arange(10)), 4, collate_fn=lambda pairs: len(pairs))
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.drop_last, len(loader)) == (4, False, 3)
    assert list(loader) == [4, 4, 2]


@given(st.integers(1, 30), st.integers(1, 12), st.booleans(), st.integers(0, 2**64 - 1))
def test_an_epoch_is_a_permutation(count: int, size: int, drop_last: bool, seed: int) -> None:
    assume(not drop_last or count >= size)
    loader = Loader(Numbers(count), size, drop_last=drop_last, seed=seed)
    for _ in range(2):
        batches = rest(loader)
        assert len(batches) == len(loader)
        seen = [i for batch in batches for i in batch]
        assert len(set(seen)) == len(seen) == (count // size * size if drop_last else count)
        assert set(seen) <= set(range(count))
        assert all(len(batch) == size for batch in batches[:-1])


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    orders = {}
    for seed in (0, 1, 2**40, 2**64 - 1):
        first, second = Loader(Numbers(20), 20, seed=seed), Loader(Numbers(20), 20, seed=seed)
        for epoch in range(3):
            [orders[seed, epoch]] = rest(first)
            assert rest(second) == [orders[seed, epoch]]
    assert len({tuple(order) for order in orders.values()}) == len(orders)


def test_orders_are_uniform() -> None:
    # 24 orders of 4 examples, 250 times each on average: χ² has 23 degrees of freedom and exceeds 49.7 once in a thousand.
    loader = Loader(Numbers(4), 4)
    orders = [tuple(batch) for _ in range(6000) for batch in rest(loader)]
    counts = np.unique(np.array(orders), axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - 250) ** 2 / 250).sum() < 49.7


def test_without_shuffling_the_order_is_the_datasets() -> None:
    loader = Loader(Numbers(5), 2, shuffle=False)
    assert rest(loader) == rest(loader) == [[0, 1], [2, 3], [4]]
    assert rest(Loader(Numbers(5), 2, shuffle=False, drop_last=True)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_the_global_generator_is_left_alone(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = take(Loader(Numbers(6), 2, **options), 5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert take(Loader(Numbers(6), 2, **options), 5) == first


def base_seed(batch: list[int]) -> Tensor:
    info = torch.utils.data.get_worker_info()
    return torch.tensor([info.seed if info else -1, *batch])


def test_workers_are_seeded_by_seed_and_epoch() -> None:
    def seeds(seed: int) -> list[int]:
        loader = Loader(Numbers(2), 2, seed=seed, num_workers=1, collate_fn=base_seed)
        return [batch[0] for batch in take(loader, 2)]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 4


# --- the position ---


def test_a_batch_counts_when_it_is_handed_out() -> None:
    loader = Loader(Numbers(5), 2)
    assert where(loader) == (0, 0, 0)
    seen = [where(loader) for _ in loader] + [where(loader) for _ in loader]
    assert seen == [(0, 1, 1), (0, 2, 2), (1, 0, 3), (1, 1, 4), (1, 2, 5), (2, 0, 6)]
    assert where(loader) == (2, 0, 6)


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}]
)
def test_a_loop_that_was_left_is_resumed_by_the_next(options: dict[str, Any]) -> None:
    whole = take(Loader(Numbers(11), 2, seed=5), 12)
    loader = Loader(Numbers(11), 2, seed=5, **options)
    parts = [take(loader, count) for count in (1, 3, 2, 4, 2)]
    assert [batch for part in parts for batch in part] == whole
    assert where(loader) == (2, 0, 12)


def test_only_the_newest_iterator_counts() -> None:
    loader = Loader(Numbers(8), 2)
    whole = rest(Loader(Numbers(8), 2))
    old, new = iter(loader), iter(loader)
    assert next(new).tolist() == whole[0]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="overtaken: the loader was iterated anew"):
            next(old)
    assert where(loader) == (0, 1, 1)
    assert [batch.tolist() for batch in new] == whole[1:]
    assert next(new, None) is None
    assert where(loader) == (1, 0, 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_failed_was_not_consumed(workers: int) -> None:
    dataset = Numbers(8, bad=5)
    loader = Loader(dataset, 2, shuffle=False, num_workers=workers)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match="the disk is on fire"):
        next(batches)
    with pytest.raises(RuntimeError, match="overtaken"):
        next(batches)
    assert where(loader) == (0, 2, 2)
    dataset.bad = None
    assert rest(loader) == [[4, 5], [6, 7]]


# --- resuming ---


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


# --- arguments ---


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "generator"])
def test_the_order_is_not_given(name: str) -> None:
    options: dict[str, Any] = {"sampler": range(3), "batch_sampler": [[0]], "generator": torch.Generator()}
    with pytest.raises(TypeError, match=f"order of a Loader follows from its seed; leave out {name}$"):
        Loader(Numbers(3), **{name: options[name]})
    options[name] = None  # torch's own default
    assert len(Loader(Numbers(3), **{name: options[name]})) == 3
    with pytest.raises(TypeError, match="leave out in_order=False"):
        Loader(Numbers(3), in_order=False)


@pytest.mark.parametrize("dataset", [Stream(), (i for i in range(3))])
def test_a_stream_has_no_order(dataset: Any) -> None:
    with pytest.raises(TypeError, match=r"examples by index; (Stream|generator) has no order to remember"):
        Loader(dataset)


def test_there_must_be_a_batch() -> None:
    with pytest.raises(ValueError, match="the dataset is empty"):
        Loader(Numbers(0))
    with pytest.raises(ValueError, match="drop_last leaves no batch: batch_size is 4, the dataset has 3 examples"):
        Loader(Numbers(3), 4, drop_last=True)


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, None])
def test_batch_size_must_be_a_positive_integer(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"batch_size must be an integer, at least 1, got {wrong}"):
        Loader(Numbers(3), wrong)


@pytest.mark.parametrize("wrong", [-1, 2**64, True, 1.0])
def test_seed_is_a_seed(wrong: Any) -> None:
    with pytest.raises(ValueError, match="seed must be an integer between 0 and"):
        Loader(Numbers(3), seed=wrong)


def test_the_docstring_warns_of_augmentation() -> None:
    text = " ".join((Loader.__doc__ or "").split())
    assert "after a resume it must itself be a function of seed, epoch and index" in text


# --- datasets with set_epoch ---


class WithEpoch(Numbers):
    """100 times the epoch that was set last, plus the index; -100 plus the index if none was set."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loader_sets_the_epoch_of_its_dataset(workers: int) -> None:
    loader = Loader(WithEpoch(4), 2, shuffle=False, num_workers=workers)
    assert take(loader, 3) == [[0, 1], [2, 3], [100, 101]]
    resumed = Loader(WithEpoch(4), 2, shuffle=False, num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert take(resumed, 2) == take(loader, 2) == [[102, 103], [200, 201]]


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_that_share_a_dataset_do_not_disturb_each_other(workers: int) -> None:
    loader = Loader(WithEpoch(4), 2, shuffle=False, num_workers=workers)
    take(loader, 2)
    batches = iter(loader)
    assert next(batches).tolist() == [100, 101]
    assert rest(loader.untouched()) == [[0, 1], [2, 3]]
    assert next(batches).tolist() == [102, 103]
    assert where(loader) == (2, 0, 4)


def test_persistent_workers_cannot_learn_the_epoch() -> None:
    with pytest.raises(ValueError, match=r"whose set_epoch would not be heard; leave out persistent_workers$"):
        Loader(WithEpoch(4), 2, num_workers=1, persistent_workers=True)
    assert len(Loader(WithEpoch(4), 2, num_workers=1, persistent_workers=False)) == 2


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


def test_an_untouched_loader_does_not_move_this_one() -> None:
    loader = Loader(list(range(7)), 2, seed=1, drop_last=True)
    next(iter(loader))
    assert len(list(loader.untouched())) == len(loader) == 3
    assert loader.steps == 1


# ---- streams, and several ranks


def test_streams_have_orders_of_their_own() -> None:
    orders = [rest(Loader(Numbers(20), 20, seed=3, stream=stream)) for stream in (0, 1, 2)]
    assert orders[0] == rest(Loader(Numbers(20), 20, seed=3))
    assert len({str(order) for order in orders}) == 3


def test_a_state_of_before_there_were_streams_is_of_the_first() -> None:
    loader = Loader(Numbers(8), 2)
    old = {name: value for name, value in loader.state_dict().items() if name != "stream"}
    loader.load_state_dict({**old, "epoch": 2})
    assert where(loader) == (2, 0, 8)
    with pytest.raises(ValueError, match="stream is 0 there and 3 here"):
        Loader(Numbers(8), 2, stream=3).load_state_dict(old)


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
