"""ImageNet: photos in class folders, decoded when they are looked up, by worker processes if there are any."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..._progress import progress_bar
from ...quantization.random import Key
from .augment import centre_box, random_box
from .examples import Batch, Examples, Scale
from .readers import interleave

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Photos", "read_photos"]

SUFFIXES = (".jpeg", ".jpg")
SCALE = Scale(255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Photos(Examples):
    """Photos of any size, cropped to a square: with a key a random part, else the middle.

    Names are stored in one array. A million Python strings would be copied into every worker, one by one.
    """

    def __init__(
        self, folder: Path, classes: list[str], names: Any, labels: Tensor, size: int, augment: Key | None = None
    ) -> None:
        self.folder, self.classes, self.names, self.labels = folder, classes, names, labels
        self.size, self.augment, self.epoch = size, augment, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.tensor(indices, dtype=torch.int64, device="cpu")
        labels = self.labels[chosen]
        pixels = torch.stack([self._read_square(i) for i in (chosen % len(self)).tolist()])
        return SCALE(pixels.permute(0, 3, 1, 2).contiguous()), labels

    def first(self, count: int) -> Photos:
        return Photos(self.folder, self.classes, self.names[:count], self.labels[:count], self.size, self.augment)

    def path(self, index: int) -> Path:
        """Return the path of a photo."""
        return self.folder / self.classes[int(self.labels[index])] / os.fsdecode(self.names[index])

    def _read_square(self, index: int) -> Tensor:
        """Decode a photo and return its square as (size, size, 3) bytes."""
        from PIL import Image

        path = self.path(index)
        try:
            with Image.open(path) as file:
                photo = file.convert("RGB")
        except FileNotFoundError:
            raise ValueError(f"{path} has been removed; load the data set anew") from None
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} cannot be read as a photo ({error}); get it again, or remove it") from None
        if self.augment is None:
            square = _crop_middle(photo, self.size)
        else:
            square = _crop_part(photo, self.size, self.augment.at(self.epoch).fold(index))
        return torch.from_numpy(np.array(square))


def _crop_part(photo: Image, size: int, key: Key) -> Image:
    """Crop a random part, resize it to a square, and flip half of the photos."""
    from PIL.Image import Resampling, Transpose

    box, flip = random_box(key, photo.width, photo.height)
    square = photo.crop(box).resize((size, size), Resampling.BILINEAR)
    return square.transpose(Transpose.FLIP_LEFT_RIGHT) if flip else square


def _crop_middle(photo: Image, size: int) -> Image:
    """Resize the short side to 256/224 of the size, then crop the middle."""
    from PIL.Image import Resampling

    factor = round(size * 256 / 224) / min(photo.size)
    width, height = (max(size, round(side * factor)) for side in photo.size)
    return photo.resize((width, height), Resampling.BILINEAR).crop(centre_box(width, height, size, size))


def read_photos(folder: Path, size: int, augment: Key | None = None, progress: bool = True) -> Photos:
    """List the photos folder/<class>/*.JPEG; classes are numbered in alphabetical order, and their photos interleaved."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; expected are photos {folder}/<class>/*.JPEG")
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not classes:
        raise ValueError(
            f"{folder} has no class folders; expected are photos {folder}/<class>/*.JPEG: those of val, "
            "which come in one folder, have to be sorted into folders named like those of train"
        )
    names: list[bytes] = []
    labels: list[int] = []
    with progress_bar(len(classes), f"listing {folder.name}", progress) as advance:
        for label, name in enumerate(classes):
            found = sorted(file for file in os.listdir(folder / name) if file.lower().endswith(SUFFIXES))
            if not found:
                raise ValueError(f"{folder / name} has no photos; expected are files *.JPEG")
            names += map(os.fsencode, found)
            labels += [label] * len(found)
            advance(f"listing {folder.name}", 1)
    targets = torch.tensor(labels, dtype=torch.int64, device="cpu")
    order = interleave(targets)
    return Photos(folder, classes, np.array(names)[order.numpy()], targets[order], size, augment)
