"""The order of a loader's batches, its position, and its arguments."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from qlangevin.sampling.loader import Loader
from tests.helpers.loaders import Numbers, ignore_worker_warnings, rest, take, where

pytestmark = ignore_worker_warnings


# ---- order


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


@pytest.mark.slow
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


# ---- position


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


def test_an_untouched_loader_does_not_move_this_one() -> None:
    loader = Loader(list(range(7)), 2, seed=1, drop_last=True)
    next(iter(loader))
    assert len(list(loader.untouched())) == len(loader) == 3
    assert loader.steps == 1


# ---- arguments


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize("name", ["sampler", "batch_sampler", "generator"])
def test_the_order_is_not_given(name: str) -> None:
    options: dict[str, Any] = {"sampler": range(3), "batch_sampler": [[0]], "generator": torch.Generator()}
    with pytest.raises(TypeError, match=f"order of a Loader follows from its seed; leave out {name}$"):
        Loader(Numbers(3), **{name: options[name]})
    options[name] = None  # torch's own default
    assert len(Loader(Numbers(3), **{name: options[name]})) == 3
    with pytest.raises(TypeError, match="leave out in_order=False"):
        Loader(Numbers(3), in_order=False)


@pytest.mark.slow
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
