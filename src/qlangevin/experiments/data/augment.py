"""Random augmentation as a pure function of a key: that of seed and epoch, and of the index of the picture."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ...quantization.random import Key, uniform, words

__all__ = ["Box", "augmentation", "centre", "crop_and_flip", "random_box", "shifts"]

STREAM = 0x61756720  # keeps these numbers apart from a sampler's and a loader's that have the same seed
PAD = 4
PLACES = 2 * PAD + 1
TRIES = 10

Box: TypeAlias = tuple[int, int, int, int]  # left, top, right, bottom


def augmentation(seed: int) -> Key:
    """The key of all augmentation that goes with a seed; its steps are the epochs."""
    return Key(seed).fold(STREAM)


def shifts(key: Key, count: int) -> Tensor:
    """For each picture, which of the 9 · 9 places and 2 directions it gets."""
    return words(key, count, device="cpu") % (PLACES * PLACES * 2)  # of 2^32: all equally likely, up to 4e-8


def crop_and_flip(pixels: Tensor, shifts: Tensor) -> Tensor:
    """Pictures (n, channels, height, width) with a black margin of 4, cut to their size somewhere, and half of them flipped."""
    height, width = pixels.shape[-2:]
    windows = F.pad(pixels, (PAD, PAD, PAD, PAD)).unfold(2, height, 1).unfold(3, width, 1)  # a view, all 9 · 9 of them
    flip, place = shifts % 2 == 1, shifts // 2
    cut = windows[torch.arange(len(pixels), device="cpu"), :, place // PLACES, place % PLACES]
    return torch.where(flip.view(-1, 1, 1, 1), cut.flip(-1), cut)


def random_box(key: Key, width: int, height: int) -> tuple[Box, bool]:
    """A part of a picture, 8 to 100 % of its area, with sides in a ratio of 3/4 to 4/3; and whether to flip it.

    The first of ten tries that fits; if none does, the largest part in the middle with such a ratio.
    """
    *tries, x, y, coin = uniform(key, 2 * TRIES + 3, device="cpu").tolist()
    for share, turn in zip(tries[::2], tries[1::2], strict=True):
        area, ratio = width * height * (0.08 + 0.92 * share), (4 / 3) ** (2 * turn - 1)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return (left, top, left + w, top + h), coin < 0.5
    return centre(width, height, min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))), coin < 0.5


def centre(width: int, height: int, w: int, h: int) -> Box:
    """The middle of a picture."""
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
