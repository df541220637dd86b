"""Data of another kind than the experiment's, which a network should be less certain about."""

from __future__ import annotations

import re
from pathlib import Path
from pydoc_data import topics

import torch

from qlangevin.experiments.data import Data, Examples, load_dataset
from qlangevin.experiments.data.examples import Images, Texts
from qlangevin.experiments.data.fetch import find_files
from qlangevin.experiments.data.text import encode_texts, pad_texts, read_vocabulary, split_words

UNDERLINE = re.compile(r"^\W+$", re.MULTILINE)  # of a heading


def load_outside(data: Data, data_dir: Path | None) -> Examples | None:
    """Return data of another kind in the shape of these, at most as many as its test examples; None if there are none."""
    if data.name == "mnist":
        outside = load_dataset("fashion-mnist", data_dir).test
    elif data.name == "cifar10" and isinstance(data.test, Images):
        outside = _digits_as_photos(data.test, data_dir)
    elif data.name == "imdb":
        outside = _language_reference(data, data_dir)
    else:
        return None
    return outside.first(min(len(outside), len(data.test)))


def _digits_as_photos(photos: Images, data_dir: Path | None) -> Images:
    """Return the test digits of MNIST in the middle of 32x32 pixels, with three equal channels, scaled like the photos."""
    digits = load_dataset("mnist", data_dir).test
    assert isinstance(digits, Images)
    pixels = torch.nn.functional.pad(digits.pixels, (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    return Images(pixels, digits.labels, photos.scale)


def _language_reference(data: Data, data_dir: Path | None) -> Texts:
    """Return the reference of the Python language, which comes with every Python, in texts as long as the reviews."""
    (length,) = data.shape
    words = [word for topic in topics.topics.values() for word in split_words(UNDERLINE.sub("", topic))]
    texts = [" ".join(words[i : i + length]) for i in range(0, len(words) - length + 1, length)]
    encoded = encode_texts(texts, read_vocabulary(find_files("imdb", data_dir, False)[0], progress=False))
    return Texts(pad_texts(encoded, length, data.words or 0), encoded.labels)
