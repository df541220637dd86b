"""Random augmentation of images as a pure function of seed, epoch and index."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quantization.random import Key, uniform, words

__all__ = ["Box", "augmentation_key", "centre_box", "crop_and_flip", "draw_shifts", "random_box"]

STREAM = 0x61756720  # separates these draws from those of a sampler and a loader with the same seed
PAD = 4
OFFSETS = 2 * PAD + 1
TRIES = 10

Box: TypeAlias = tuple[int, int, int, int]  # left, top, right, bottom


def augmentation_key(seed: int) -> Key:
    """Return the key of the augmentation with this seed; its steps are the epochs."""
    return Key(seed).fold(STREAM)


def draw_shifts(key: Key, count: int) -> Tensor:
    """Draw for each image one of 9 · 9 offsets and 2 directions."""
    return words(key, count, device="cpu") % (OFFSETS * OFFSETS * 2)  # 2^32 is no multiple: equally likely up to 4e-8


def crop_and_flip(pixels: Tensor, shifts: Tensor) -> Tensor:
    """Pad images (n, channels, height, width) by 4 black pixels, crop them to their size at an offset, and flip half of them."""
    height, width = pixels.shape[-2:]
    windows = F.pad(pixels, (PAD, PAD, PAD, PAD)).unfold(2, height, 1).unfold(3, width, 1)  # a view, all 9 · 9 of them
    flip, offset = shifts % 2 == 1, shifts // 2
    cut = windows[torch.arange(len(pixels), device="cpu"), :, offset // OFFSETS, offset % OFFSETS]
    return torch.where(flip.view(-1, 1, 1, 1), cut.flip(-1), cut)


def random_box(key: Key, width: int, height: int) -> tuple[Box, bool]:
    """Draw a part of an image, 8 to 100 % of its area, with sides in a ratio of 3/4 to 4/3; and whether to flip it.

    Of ten tries the first that fits is taken; if none does, the largest part in the middle with such a ratio.
    """
    *tries, x, y, coin = uniform(key, 2 * TRIES + 3, device="cpu").tolist()
    for share, turn in zip(tries[::2], tries[1::2], strict=True):
        area, ratio = width * height * (0.08 + 0.92 * share), (4 / 3) ** (2 * turn - 1)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return (left, top, left + w, top + h), coin < 0.5
    return centre_box(width, height, min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))), coin < 0.5


def centre_box(width: int, height: int, w: int, h: int) -> Box:
    """Return the box of this size in the middle of an image."""
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
