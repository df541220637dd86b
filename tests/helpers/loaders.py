"""A dataset of integers, the batches and position of a loader, and marks for tests that start workers."""

import pytest
from torch.utils.data import Dataset

from qlangevin.sampling.loader import Loader

ignore_worker_warnings = [
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
    """Return epoch, position in it, and batches in all."""
    return loader.epoch, loader.position, loader.steps
