"""Examples looked up a batch at a time: one by one, 64 images would take longer than a training step on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...quantization.random import Key
from .augment import crop_and_flip, draw_shifts

__all__ = ["Batch", "Examples", "Images", "Scale", "Texts", "keep_batch"]

Batch: TypeAlias = tuple[Tensor, Tensor]


class Examples(Dataset[Batch], ABC):
    """Inputs and labels. Random augmentation depends only on the seed, the epoch and the index of an example."""

    labels: Tensor

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """Return a stacked batch; a DataLoader needs `keep_batch` as its ``collate_fn``."""

    @abstractmethod
    def first(self, count: int) -> Examples:
        """Return the first examples."""

    def __getitem__(self, index: int) -> Batch:
        inputs, labels = self.__getitems__([index])
        return inputs[0], labels[0]

    def __len__(self) -> int:
        return len(self.labels)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which random augmentation depends; a `Loader` calls this."""


def keep_batch(batch: Batch) -> Batch:
    """Return the batch unchanged: `Examples` return stacked ones."""
    return batch


class Scale(NamedTuple):
    """Scaling of pixels: (x / most - mean) / std, channel by channel."""

    most: int = 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return scaled pixels."""
        mean, std = (self.most * torch.tensor(t, device="cpu").view(-1, 1, 1) for t in (self.mean, self.std))
        return pixels.float().sub_(mean).div_(std)


class Images(Examples):
    """Images stored as bytes (n, channels, height, width); with a key, cropped and flipped at random."""

    def __init__(self, pixels: Tensor, labels: Tensor, scale: Scale, augment: Key | None = None) -> None:
        self.pixels, self.labels, self.scale, self.augment = pixels, labels, scale, augment
        self.epoch = -1
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.shifts = None if self.augment is None else draw_shifts(self.augment.at(epoch), len(self))
            self.epoch = epoch

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.tensor(indices, dtype=torch.int64, device="cpu")
        pixels = self.pixels[chosen]
        if self.shifts is not None:
            pixels = crop_and_flip(pixels, self.shifts[chosen])
        return self.scale(pixels), self.labels[chosen]

    def first(self, count: int) -> Images:
        return Images(self.pixels[:count], self.labels[:count], self.scale, self.augment)


class Texts(Examples):
    """Texts as rows of word numbers, padded with zeros."""

    def __init__(self, texts: Tensor, labels: Tensor) -> None:
        self.texts, self.labels = texts, labels

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.tensor(indices, dtype=torch.int64, device="cpu")
        return self.texts[chosen].long(), self.labels[chosen]

    def first(self, count: int) -> Texts:
        return Texts(self.texts[:count], self.labels[:count])
