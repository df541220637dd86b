"""Examples by index, a whole batch at once: to look up 64 pictures one by one would take longer than to learn from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...quantization.random import Key
from .augment import crop_and_flip, shifts

__all__ = ["Batch", "Examples", "Pictures", "Scale", "Texts", "as_it_is"]

Batch: TypeAlias = tuple[Tensor, Tensor]


class Examples(Dataset[Batch], ABC):
    """Inputs and labels. Random augmentation depends on the seed, the epoch and the index of an example, on nothing else."""

    labels: Tensor

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A batch, stacked already; a DataLoader that is to use this needs `as_it_is` for its ``collate_fn``."""

    @abstractmethod
    def first(self, count: int) -> Examples:
        """The first of them, by themselves."""

    def __getitem__(self, index: int) -> Batch:
        inputs, labels = self.__getitems__([index])
        return inputs[0], labels[0]

    def __len__(self) -> int:
        return len(self.labels)

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch: a `Loader` does so. Where nothing is random, nothing changes."""


def as_it_is(batch: Batch) -> Batch:
    """What `Examples` hand out is stacked already."""
    return batch


class Scale(NamedTuple):
    """What pixels become: (x / most - mean) / std, channel by channel."""

    most: int = 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __call__(self, pixels: Tensor) -> Tensor:
        mean, std = (self.most * torch.tensor(t, device="cpu").view(-1, 1, 1) for t in (self.mean, self.std))
        return pixels.float().sub_(mean).div_(std)


class Pictures(Examples):
    """Pictures kept as bytes (n, channels, height, width); with a key, cropped and flipped at random."""

    def __init__(self, pixels: Tensor, labels: Tensor, scale: Scale, augment: Key | None = None) -> None:
        self.pixels, self.labels, self.scale, self.augment = pixels, labels, scale, augment
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.shifts = None if self.augment is None else shifts(self.augment.at(epoch), len(self))
            self.epoch = epoch

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.tensor(indices, dtype=torch.int64, device="cpu")
        pixels = self.pixels[chosen]
        if self.shifts is not None:
            pixels = crop_and_flip(pixels, self.shifts[chosen])
        return self.scale(pixels), self.labels[chosen]

    def first(self, count: int) -> Pictures:
        return Pictures(self.pixels[:count], self.labels[:count], self.scale, self.augment)


class Texts(Examples):
    """Texts as rows of word numbers, followed by zeros."""

    def __init__(self, texts: Tensor, labels: Tensor) -> None:
        self.texts, self.labels = texts, labels

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.tensor(indices, dtype=torch.int64, device="cpu")
        return self.texts[chosen].long(), self.labels[chosen]

    def first(self, count: int) -> Texts:
        return Texts(self.texts[:count], self.labels[:count])
