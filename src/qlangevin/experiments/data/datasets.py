"""Load data sets by name: those of the paper's experiments, Fashion-MNIST as out-of-distribution data, and small digits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from ..._validate import check_integer
from ...quantization import random
from ...quantization.random import Key
from ...sampling.loader import Loader
from .augment import augmentation_key
from .examples import Examples, Images, Scale, Texts, keep_batch
from .fetch import LAYOUTS, find_files
from .images import read_photos
from .readers import read_members, read_pair, read_records
from .text import pad_texts, read_imdb

__all__ = ["Data", "DatasetName", "load_dataset", "make_loader"]

DatasetName: TypeAlias = Literal["mnist", "fashion-mnist", "cifar10", "cifar100", "imdb", "imagenet", "digits"]

DIGITS_FILE = Path("data", "digits.csv.gz")  # in scikit-learn's datasets

# Numbers of training and test examples.
COUNTS: dict[DatasetName, tuple[int, int]] = {
    "mnist": (60_000, 10_000), "fashion-mnist": (60_000, 10_000), "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000),
    "imdb": (25_000, 25_000), "imagenet": (1_281_167, 50_000), "digits": (1197, 600),
}  # fmt: skip


class Records(NamedTuple):
    """Files of CIFAR, and their content: ``labels`` is the number of label bytes, of which the last is the finest."""

    classes: int
    labels: int
    train: tuple[str, ...]
    test: str
    scale: Scale


CIFAR: dict[DatasetName, Records] = {
    "cifar10": Records(
        classes=10,
        labels=1,
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test="test_batch.bin",
        scale=Scale(255, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ),
    "cifar100": Records(
        classes=100,
        labels=2,
        train=("train.bin",),
        test="test.bin",
        scale=Scale(255, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    ),
}

# SHA-256 of the training labels: MNIST and Fashion-MNIST have files of the same names.
LABELS: dict[str, DatasetName] = {
    "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13": "mnist",
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7": "fashion-mnist",
}


@dataclass(frozen=True)
class Data:
    """A data set: training and test examples."""

    name: DatasetName
    train: Examples
    test: Examples
    classes: int
    shape: tuple[int, ...]
    """Shape of one input."""
    words: int | None = None
    """Size of the vocabulary of texts, with padding (0) and unknown words (1)."""
    note: str | None = None
    """Description of the part that is present, if it is not everything."""


def load_dataset(
    name: DatasetName,
    data_dir: Path | None = None,
    *,
    limit_train: int | None = None,
    limit_test: int | None = None,
    augment: bool = True,
    seed: int = 0,
    length: int = 400,
    words: int = 25_000,
    size: int = 224,
    progress: bool = True,
) -> Data:
    """Load a data set by its name; download it if it is missing and no folder was given.

    Args:
        name: name of the data set.
        data_dir: folder with its official files, or the parent of that folder; by default $QLANGEVIN_DATA, or else
            ~/.cache/qlangevin.
        limit_train: take only this many training examples, the first ones; classes are mixed.
        limit_test: take only this many test examples.
        augment: crop and flip training images of CIFAR and ImageNet at random.
        seed: seed of the augmentation.
        length: words of a text of IMDB; of longer texts the last words are kept.
        words: size of the vocabulary of IMDB: padding, unknown words, and the most frequent words of all training texts.
        size: side of the images of ImageNet, in pixels.
        progress: show a bar when something takes long.
    """
    if name not in COUNTS:
        raise ValueError(f"there is no data set {name!r}; there are {', '.join(get_args(DatasetName))}")
    for label, limit in (("limit_train", limit_train), ("limit_test", limit_test)):
        if limit is not None:
            check_integer(label, limit, 1)
    length, words, size = (
        check_integer("length", length, 1, 10_000),
        check_integer("words", words, 3),
        check_integer("size", size, 1, 10_000),
    )
    key = augmentation_key(seed) if augment else None
    if name == "digits":
        return _limited(_digits(), limit_train, limit_test)
    files = find_files(name, data_dir, progress)
    if name in ("mnist", "fashion-mnist"):
        data = _mnist(name, files)
    elif name == "imdb":
        data = _imdb(files[0], length, words, progress)
    elif name == "imagenet":
        data = _imagenet(files[0], size, key, progress)
    else:
        data = _cifar(name, files[0], key, limit_train, progress)
    return _limited(data, limit_train, limit_test)


def make_loader(examples: Examples, batch_size: int, *, shuffle: bool, workers: int = 0, **options: Any) -> Loader:
    """Return a loader that looks up a whole batch at once; the other options are those of `Loader`."""
    workers = check_integer("workers", workers, 0)
    return Loader(examples, batch_size, shuffle=shuffle, num_workers=workers, collate_fn=keep_batch, **options)


def _limited(data: Data, limit_train: int | None, limit_test: int | None) -> Data:
    """Return the first examples, with a note that says which part of the data set they are."""
    kind, notes, parts = "texts" if data.words else "images", [], []
    asked = (("train", "training", data.train, limit_train), ("test", "test", data.test, limit_test))
    for (short, long, part, limit), total in zip(asked, COUNTS[data.name], strict=True):
        if limit is not None:
            part = part.first(check_integer(f"limit_{short}", limit, 1, len(part)))
        if len(part) < total:
            notes.append(f"{len(part)} of {total} {long} {kind}")
        parts.append(part)
    note = ", ".join(filter(None, [*notes, data.note]))
    return replace(data, train=parts[0], test=parts[1], note=note or None)


def _mnist(name: DatasetName, files: Sequence[Path]) -> Data:
    train, test = read_pair(files[0], files[1]), read_pair(files[2], files[3])
    found = LABELS.get(hashlib.sha256(train[1].byte().numpy().tobytes()).hexdigest(), name)
    if found != name:
        raise ValueError(
            f"the files in {files[0].parent} are those of {LAYOUTS[found].title}, not of {LAYOUTS[name].title}; name "
            "another folder, or one with a folder for each"
        )
    return Data(name, Images(*train, Scale()), Images(*test, Scale()), 10, (1, 28, 28))


def _cifar(name: DatasetName, path: Path, key: Key | None, limit: int | None, progress: bool) -> Data:
    form = CIFAR[name]
    found = {
        file: read_records(data, where, form.classes, form.labels)
        for file, where, data in read_members(path, (*form.train, form.test), progress)
    }
    if form.test not in found:
        raise ValueError(f"{path} lacks {form.test}; get {LAYOUTS[name].origin}")
    parts = [found[file] for file in takewhile(found.__contains__, form.train)]
    there = sum(len(labels) for _, labels in parts)
    missing = [file for file in form.train if file not in found]
    if missing and (limit is None or limit > there):
        raise ValueError(
            f"{path.parent} lacks {', '.join(missing)}, so that only the first {there} training images are there; get "
            f"{LAYOUTS[name].origin}" + (f", or set limit_train to at most {there}" if there else "")
        )
    pixels, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    train, test = Images(pixels, labels, form.scale, key), Images(*found[form.test], form.scale)
    return Data(name, train, test, form.classes, (3, 32, 32))


def _imdb(path: Path, length: int, words: int, progress: bool) -> Data:
    learned, tested = read_imdb(path, progress)
    train, test = (Texts(pad_texts(reviews, length, words), reviews.labels) for reviews in (learned, tested))
    return Data("imdb", train, test, 2, (length,), min(words, int(learned.numbers.max()) + 1))


def _imagenet(path: Path, size: int, key: Key | None, progress: bool) -> Data:
    train, test = read_photos(path, size, key, progress), read_photos(path.parent / "val", size, None, progress)
    if odd := sorted(set(train.classes) ^ set(test.classes)):
        raise ValueError(
            f"train and val in {path.parent} must have the same class folders, but {odd[0]} is in one of them only"
        )
    classes = len(train.classes)
    note = f"{classes} of 1000 classes" if classes < 1000 else None
    return Data("imagenet", train, test, classes, (3, size, size), note=note)


def _digits() -> Data:
    """Load the 1797 digits of scikit-learn, 8x8 pixels from 0 to 16, with a fixed split."""
    table = _digit_table()
    table = table[random.words(Key(0), len(table), device="cpu").argsort()]
    pixels, labels = table[:, :64].reshape(-1, 1, 8, 8), table[:, 64].long()
    count = COUNTS["digits"][0]
    train, test = (Images(pixels[part], labels[part], Scale(16)) for part in (slice(count), slice(count, None)))
    return Data("digits", train, test, 10, (1, 8, 8))


def _digit_table() -> Tensor:
    """Return a row of 64 pixels and a label for each digit; from the file, since importing scikit-learn takes 2 s."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ValueError(
            "the data set digits comes with scikit-learn, which is not installed; pip install 'qlangevin[demo]' does that"
        )
    if (path := Path(package.origin).with_name("datasets") / DIGITS_FILE).exists():
        return torch.from_numpy(np.loadtxt(path, np.uint8, delimiter=","))
    from sklearn.datasets import load_digits  # a version that keeps its files elsewhere

    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(np.column_stack([pixels, labels]).astype(np.uint8))
