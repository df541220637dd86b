"""Batches of a chain, each with the numbers of its examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset, default_collate

from .._validate import check_integer
from ..sampling.loader import Loader

__all__ = ["batch_to", "chain_loader", "count_data", "in_order"]


class Numbered(Dataset[Any]):
    """A data set whose examples come with their numbers."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        if hasattr(dataset, "set_epoch"):
            self.set_epoch = dataset.set_epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        raise TypeError("numbered examples come in batches")

    def __getitems__(self, indices: list[int]) -> tuple[list[int], Any]:
        whole = getattr(self.dataset, "__getitems__", None)  # may return a batch already, which its collate_fn knows
        return indices, [self.dataset[i] for i in indices] if whole is None else whole(indices)


class NumberedTensors(Numbered):
    """A `TensorDataset` whose batches are taken from its tensors at once, and not example by example."""

    def __getitems__(self, indices: list[int]) -> tuple[list[int], Any]:
        numbers = torch.tensor(indices)
        return indices, [t[numbers] for t in self.dataset.tensors]


def keep(batch: Any) -> Any:
    """Return a batch that is one already."""
    return batch


@dataclass(frozen=True)
class Collate:
    """Batches of numbered examples: their numbers, and the batch as the user's loader makes it."""

    collate: Any

    def __call__(self, numbered: tuple[list[int], Any]) -> tuple[Tensor, Any]:
        return torch.tensor(numbered[0]), self.collate(numbered[1])


def count_data(loader: Any) -> int:
    """Return the number of examples; raise TypeError for anything but a loader of a data set with a length."""
    if not isinstance(loader, DataLoader):
        raise TypeError(f"loader must be a DataLoader or a qlangevin.Loader, got {type(loader).__name__}")
    own = isinstance(loader, Loader) or isinstance(loader.sampler, (RandomSampler, SequentialSampler))
    if not own or loader.batch_size is None:
        raise TypeError(
            "the loader has a sampler of its own, whose order could not be resumed; give a DataLoader or a qlangevin.Loader "
            "with batch_size and shuffle alone"
        )
    return len(loader.dataset)  # type: ignore[arg-type]


def chain_loader(loader: DataLoader[Any], seed: int, stream: int) -> Loader:
    """Return the batches of one chain, in an order of its own."""
    count_data(loader)
    batch = check_integer("batch_size", loader.batch_size, 1)
    full = batch >= len(loader.dataset)  # type: ignore[arg-type]  # the order would change nothing but rounding
    return _numbered(loader, not full, seed=seed, stream=stream, drop_last=not full)


def in_order(loader: Any, name: str = "loader") -> Iterator[tuple[Tensor, Any]]:
    """Yield all batches, with the numbers of their examples, in the order of the data set."""
    try:
        count_data(loader)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    return iter(_numbered(loader, False, drop_last=False))


def _numbered(loader: DataLoader[Any], shuffle: bool, **more: Any) -> Loader:
    quick = type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate
    dataset, collate = (NumberedTensors, keep) if quick else (Numbered, loader.collate_fn)
    return Loader(
        dataset(loader.dataset), loader.batch_size or 1, shuffle=shuffle, collate_fn=Collate(collate),
        num_workers=loader.num_workers, **more,
    )  # fmt: skip


def batch_to(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: batch_to(value, device) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        moved = [batch_to(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch
