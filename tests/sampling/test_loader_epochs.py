"""Loaders of datasets with `set_epoch`."""

import pytest

from qlangevin.sampling.loader import Loader
from tests.helpers.loaders import Numbers, ignore_worker_warnings, rest, take, where

pytestmark = ignore_worker_warnings


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
