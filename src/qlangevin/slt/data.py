"""Batches of a chain, each with the numbers of its examples, and the losses of all examples at w*.

The loss of a batch at w is compared with that of the same examples at w*. The difference has none of the noise that comes from
some examples being harder than others, which is most of the noise of an estimate on small batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler, TensorDataset, default_collate

from .._validate import check_integer
from ..sampling.loader import Loader

if TYPE_CHECKING:
    from .losses import Loss

__all__ = ["Baseline", "batch_to", "chain_loader", "count_data", "in_order", "measure_baseline"]


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


@dataclass(frozen=True)
class Baseline:
    """Losses at w*: of each example, where they are known, and their mean L_n(w*)."""

    mean: float
    each: Tensor | None  # float64

    def of(self, numbers: Tensor) -> float:
        """Return the mean over some examples; where they are not known, over all."""
        return self.mean if self.each is None else float(self.each[numbers].mean())


def measure_baseline(model: nn.Module, loader: DataLoader[Any], loss: Loss, batches: int | None = None) -> Baseline:
    """Measure the losses at w*, of all data or of the first batches of a random order."""
    device = next(model.parameters()).device
    source = in_order(loader) if batches is None else chain_loader(loader, 0, 2**32 - 1).until(batches)
    each = torch.zeros(count_data(loader), dtype=torch.float64)
    total, count, paired = 0.0, 0, batches is None
    with torch.no_grad():
        for numbers, batch in source:
            found = loss(model, batch_to(batch, device)).detach().double().cpu()
            if not bool(found.isfinite().all()):
                raise FloatingPointError(
                    f"the loss at w* is not finite: {int((~found.isfinite()).sum())} of {found.numel()} numbers of a batch"
                )
            total, count = total + float(found.mean()) * len(numbers), count + len(numbers)
            paired = paired and found.dim() > 0 and found.shape[0] == len(numbers)
            if paired:
                each[numbers] = found.flatten(1).mean(1) if found.dim() > 1 else found
    return Baseline(total / count, each if paired else None)
