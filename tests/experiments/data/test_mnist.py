"""MNIST and Fashion-MNIST: reading the official files, and naming one that is wrong."""

import gzip
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from qlangevin.experiments.data import DatasetName, datasets, load_dataset
from tests.helpers.official import idx, mnist, pixels, real

MNIST = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("folder", ["", "here", "raw"])
@pytest.mark.parametrize("packed", [True, False])
def test_mnist_is_read_from_its_four_files(tmp_path: Path, name: DatasetName, folder: str, packed: bool) -> None:
    raw = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}
    mnist(tmp_path / {"here": name, "raw": raw[name]}.get(folder, ""), packed=packed)
    found = load_dataset(name, tmp_path)
    assert (found.name, found.classes, found.shape, found.words) == (name, 10, (1, 28, 28), None)
    assert found.note == "12 of 60000 training images, 5 of 10000 test images"
    x, y = found.train.__getitems__([7, 0, 11])
    assert x.dtype == torch.float32
    assert torch.equal(x, pixels(7, 0, 11)[:, :1, :28, :28].float() / 255)
    assert y.tolist() == [7, 0, 1]
    assert y.dtype == torch.int64
    one, label = found.test[3]
    assert torch.equal(one, pixels(3)[0, :1, :28, :28].float() / 255)
    assert (int(label), label.shape) == (3, ())
    with pytest.raises(IndexError):
        found.test[5]


def repacked(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Change what is inside."""
    return lambda data: gzip.compress(change(gzip.decompress(data)))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (0, lambda data: data[:-20], "is damaged: it cannot be unpacked .*; remove it and get it again"),
        (0, lambda data: b"<html>not found</html>", "is damaged: it cannot be unpacked .*; remove it and get it again"),
        (1, lambda data: data[:12] + b"\xff" * 9 + data[21:], "is damaged: it cannot be unpacked"),
        (0, repacked(lambda data: data[:-1]), "is damaged: it has 9423 bytes, 12 entries would take 9424; remove it"),
        (1, repacked(lambda data: data + b"\0"), "is damaged: it has 21 bytes, 12 entries would take 20"),
        (1, repacked(lambda data: data[:5]), "is damaged: it has 5 bytes, its header alone would have 8"),
        (0, repacked(lambda data: idx(np.zeros(9))), "is another kind of file: its magic number is 2049, not 2051"),
        (1, repacked(lambda data: idx(np.zeros((2, 28, 28)))), "its magic number is 2051, not 2049; remove it"),
        (0, repacked(lambda data: idx(np.zeros((2, 8, 8)))), r"its images have size \[8, 8\], not \[28, 28\]"),
        (0, repacked(lambda data: idx(np.zeros((0, 28, 28)))), "it has 16 bytes, 0 entries would take 16"),
        (1, repacked(lambda data: data[:-1] + b"\x0a"), "entry 11 has label 10, the last is 9; remove it and get it again"),
    ],
)  # fmt: skip
def test_a_file_of_mnist_that_is_wrong_is_named(
    tmp_path: Path, file: int, change: Callable[[bytes], bytes], message: str
) -> None:
    mnist(tmp_path)
    path = tmp_path / MNIST[file]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"^{path} .*{message}"):
        load_dataset("mnist", tmp_path)


def test_as_many_images_as_labels(tmp_path: Path) -> None:
    mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(11))))
    with pytest.raises(
        ValueError, match=r"images-idx3-ubyte.gz has 12 images, but .*labels-idx1-ubyte.gz has 11 labels"
    ):
        load_dataset("mnist", tmp_path)


def test_mnist_is_not_taken_for_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mnist(tmp_path)
    labels = hashlib.sha256(bytes(i % 10 for i in range(12))).hexdigest()
    monkeypatch.setitem(datasets.LABELS, labels, "mnist")
    assert load_dataset("mnist", tmp_path).name == "mnist"
    with pytest.raises(
        ValueError, match=f"the files in {tmp_path} are those of MNIST, not of Fashion-MNIST; name another"
    ):
        load_dataset("fashion-mnist", tmp_path)


@real
def test_real_mnist() -> None:
    found = load_dataset("mnist")
    assert found.note is None
    assert found.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    x, _ = found.train.__getitems__(range(60_000))
    assert float(x.mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(x.std()) == pytest.approx(0.3081, abs=5e-5)
    with pytest.raises(ValueError, match="are those of MNIST, not of Fashion-MNIST"):
        load_dataset("fashion-mnist", Path(os.environ["QLANGEVIN_DATA"]) / "mnist")
