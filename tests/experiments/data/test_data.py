"""The data sets: what is read from the official files, what is wrong with others, batches, augmentation."""

import gzip
import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qlangevin.experiments.data import DatasetName, datasets, load_dataset, make_loader
from qlangevin.experiments.data.augment import augmentation_key, crop_and_flip, draw_shifts, random_box
from qlangevin.experiments.data.examples import Images, Scale
from qlangevin.experiments.data.readers import interleave
from qlangevin.quantization.random import Key
from tests.helpers.official import PIXELS, archive, cifar10, cifar_records, idx, mnist, write

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine with one processor
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
real = pytest.mark.skipif("QLANGEVIN_DATA" not in os.environ, reason="$QLANGEVIN_DATA names no folder with real data")
MNIST = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte.gz")


def pixels(*which: int) -> Tensor:
    return torch.from_numpy(PIXELS[list(which)])


# ---- MNIST


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


# ---- CIFAR


@pytest.mark.parametrize("form", ["files", "folder", "parent", "archive"])
def test_cifar10_is_read_batch_after_batch(tmp_path: Path, form: str) -> None:
    cifar10(tmp_path / {"folder": "cifar-10-batches-bin", "parent": "cifar10/cifar-10-batches-bin"}.get(form, ""))
    if form == "archive":
        files = {f"cifar-10-batches-bin/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
        tmp_path = tmp_path / "packed"
        archive(tmp_path / "cifar-10-binary.tar.gz", files)
    found = load_dataset("cifar10", tmp_path, augment=False)
    assert (len(found.train), len(found.test), found.classes, found.shape) == (20, 4, 10, (3, 32, 32))
    assert found.note == "20 of 50000 training images, 4 of 10000 test images"
    x, y = found.train.__getitems__(range(20))
    assert y.tolist() == [i % 10 for i in range(20)]
    mean, std = (torch.tensor(t).view(3, 1, 1) for t in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)))
    torch.testing.assert_close(x, (pixels(*range(20)).float() / 255 - mean) / std, atol=2e-6, rtol=0)
    torch.testing.assert_close(found.test[1][0], (pixels(21)[0].float() / 255 - mean) / std, atol=2e-6, rtol=0)


@pytest.mark.parametrize("packed", [True, False])
def test_cifar100_has_fine_labels(tmp_path: Path, packed: bool) -> None:
    files = {"train.bin": cifar_records(9, 3, fine=True), "test.bin": cifar_records(2, fine=True)}
    files = {f"cifar-100-binary/{name}": content for name, content in files.items()}
    if packed:
        archive(tmp_path / "cifar100/cifar-100-binary.tar.gz", files)
    else:
        write(tmp_path, files)
    found = load_dataset("cifar100", tmp_path)
    assert (found.classes, found.shape, len(found.train), len(found.test)) == (100, (3, 32, 32), 9, 2)
    assert found.train.__getitems__(range(9))[1].tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1]
    x = (pixels(1)[0] / 255 - torch.tensor([0.5071, 0.4865, 0.4409]).view(3, 1, 1)) / torch.tensor(
        [0.2673, 0.2564, 0.2762]
    ).view(3, 1, 1)
    torch.testing.assert_close(found.test[1][0], x, atol=2e-6, rtol=0)


def test_a_part_of_cifar10_will_do_if_no_more_is_asked_for(tmp_path: Path) -> None:
    cifar10(tmp_path, batches=(1, 2, 4))
    found = load_dataset("cifar10", tmp_path, limit_train=8)
    assert found.note == "8 of 50000 training images, 4 of 10000 test images"
    assert len(found.train) == 8
    message = "lacks data_batch_3.bin, data_batch_5.bin, so that only the first 8 training .* limit_train to at most 8$"
    for limit in (9, None):
        with pytest.raises(ValueError, match=message):
            load_dataset("cifar10", tmp_path, limit_train=limit)
    (tmp_path / "data_batch_1.bin").unlink()
    with pytest.raises(
        ValueError, match=r"only the first 0 training images are there; get the binary version from \S*$"
    ):
        load_dataset("cifar10", tmp_path, limit_train=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (cifar_records(2)[:-1], "is damaged: it has 6145 bytes, not a multiple of 3073; remove it and get it again"),
        (b"", "is damaged: it has 0 bytes, not a multiple of 3073"),
        (cifar_records(1) + b"\x0a" + PIXELS[0].tobytes(), "is damaged: entry 1 has label 10, the last is 9"),
    ],
)
def test_a_file_of_cifar_that_is_wrong_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    cifar10(tmp_path)
    write(tmp_path, {"data_batch_2.bin": content})
    with pytest.raises(ValueError, match=f"^{tmp_path}/data_batch_2.bin {message}"):
        load_dataset("cifar10", tmp_path)
    archive(tmp_path / "a/cifar-10-binary.tar.gz", {"x/test_batch.bin": content})
    with pytest.raises(ValueError, match=rf"^x/test_batch.bin in {tmp_path}/a/cifar-10-binary.tar.gz {message}"):
        load_dataset("cifar10", tmp_path / "a")


def test_an_archive_of_cifar_that_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    archive(path, {"x/readme.html": b"", "x/data_batch_1.bin": cifar_records(2)})  # as far as it goes
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz lacks test_batch.bin; get the binary version from"):
        load_dataset("cifar10", tmp_path)
    flipped = whole[:-8] + bytes(4) + whole[-4:]  # the checksum
    for wrong in (
        whole[:-100],
        whole[:-1],
        flipped,
        whole[:3],
        b"<html>" * 1000,
        gzip.compress(b"no archive" * 1000),
        b"",
    ):
        path.write_bytes(wrong)
        with pytest.raises(
            ValueError, match=f"^{path} is damaged: it cannot be unpacked .*; remove it and get it again"
        ):
            load_dataset("cifar10", tmp_path)


# ---- augmentation


def test_crops_and_flips_are_those_of_a_padded_picture() -> None:
    padded = torch.nn.functional.pad(pixels(0), (4, 4, 4, 4))
    for draw in range(162):
        flip, top, left = draw % 2, draw // 2 // 9, draw // 2 % 9
        expected = padded[:, :, top : top + 32, left : left + 32]
        found = crop_and_flip(pixels(0), torch.tensor([draw]))
        assert torch.equal(found, expected.flip(-1) if flip else expected)
    both = crop_and_flip(pixels(0, 1), torch.tensor([80, 161]))
    assert torch.equal(both[0], pixels(0)[0])  # 80: the middle, as it is
    assert torch.equal(both[1, :, :-4, :][:, :, 4:], pixels(1)[0, :, 4:, 4:].flip(-1))


def test_all_crops_are_equally_likely() -> None:
    # χ² has 161 degrees of freedom and exceeds 222.6 once in a thousand seeds.
    counts = torch.bincount(draw_shifts(augmentation_key(0), 162_000), minlength=162)
    assert len(counts) == 162
    assert float(((counts - 1000.0) ** 2 / 1000).sum()) < 222.6


def test_augmentation_is_a_function_of_seed_epoch_and_index(tmp_path: Path) -> None:
    cifar10(tmp_path)

    def images(seed: int, epoch: int, **options: Any) -> Tensor:
        train = load_dataset("cifar10", tmp_path, seed=seed, **options).train
        train.set_epoch(5)
        train.set_epoch(epoch)
        x, _ = train.__getitems__(range(12))
        assert torch.equal(train[3][0], x[3])
        assert torch.equal(train.__getitems__([7, 2])[0], x[[7, 2]])
        return x

    first = images(0, 0)
    assert torch.equal(images(0, 0), first)
    assert torch.equal(images(0, 0, limit_train=12), first)
    plain = images(0, 0, augment=False)
    assert torch.equal(plain, images(1, 1, augment=False))
    others = [images(0, 1), images(1, 0), plain]
    for i in range(12):  # by chance two of them are alike once in 162 times: here none is
        assert not any(torch.equal(first[i], other[i]) for other in others)


def test_test_images_are_not_augmented(tmp_path: Path) -> None:
    cifar10(tmp_path)
    test = load_dataset("cifar10", tmp_path).test
    before = test[0][0]
    test.set_epoch(3)
    assert torch.equal(test[0][0], before)


def test_random_parts_have_the_areas_and_ratios_they_should() -> None:
    key = augmentation_key(0)
    for width, height in ((500, 375), (64, 64), (3, 7), (1, 1)):
        boxes, flips = zip(*(random_box(key.fold(i), width, height) for i in range(200)), strict=True)
        left, top, right, bottom = torch.tensor(boxes).T
        assert bool(
            ((left >= 0) & (left < right) & (right <= width) & (top >= 0) & (top < bottom) & (bottom <= height)).all()
        )
        assert 60 < sum(flips) < 140  # 5.7 standard deviations of a fair coin: 1e-8
        if width > 60:
            w, h = right - left, bottom - top
            share, ratio = w * h / (width * height), w / h
            assert float(share.min()) > 0.075
            assert float(share.min()) < 0.12
            assert float(share.max()) > 0.85
            assert 0.72 < float(ratio.min()) < 0.78
            assert 1.28 < float(ratio.max()) < 1.37
    assert random_box(key, 1000, 10) == ((493, 0, 506, 10), random_box(key, 1000, 10)[1])  # no try fits


# ---- digits


def test_digits_are_split_once_and_for_all() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    found = load_dataset("digits", seed=3)
    assert (len(found.train), len(found.test), found.shape, found.classes) == (1197, 600, (1, 8, 8), 10)
    assert found.note is None
    assert torch.equal(found.train[5][0], load_dataset("digits").train[5][0])
    x = torch.cat([part.__getitems__(range(len(part)))[0] for part in (found.train, found.test)])
    assert (float(x.min()), float(x.max())) == (0, 1)
    everything = torch.from_numpy(sklearn.load_digits().data).float().view(-1, 1, 8, 8) / 16
    assert sorted(map(tuple, x.flatten(1).tolist())) == sorted(map(tuple, everything.flatten(1).tolist()))
    assert torch.bincount(found.test.labels).tolist() == [55, 66, 53, 58, 54, 66, 61, 64, 62, 61]


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        ValueError, match=r"comes with scikit-learn, which is not installed; pip install 'qlangevin\[demo\]'"
    ):
        load_dataset("digits")


# ---- all of them


def test_limits_take_the_first(tmp_path: Path) -> None:
    mnist(tmp_path)
    found = load_dataset("mnist", tmp_path, limit_train=4, limit_test=5)
    assert found.note == "4 of 60000 training images, 5 of 10000 test images"
    assert found.train.labels.tolist() == [0, 1, 2, 3]
    assert torch.equal(found.train[-1][0], load_dataset("mnist", tmp_path).train[3][0])
    with pytest.raises(IndexError):
        found.train[4]
    assert load_dataset("digits", limit_train=1197).note is None
    assert load_dataset("digits", limit_test=10).note == "10 of 600 test images"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "svhn"},
            "there is no data set 'svhn'; there are mnist, fashion-mnist, cifar10, cifar100, imdb, imagenet",
        ),
        ({"limit_train": 0}, "limit_train must be an integer, at least 1, got 0"),
        ({"limit_train": 13}, "limit_train must be at most 12, got 13"),
        ({"limit_test": -1}, "limit_test must be an integer, at least 1, got -1"),
        ({"limit_test": 6}, "limit_test must be at most 5, got 6"),
        ({"seed": -1}, "seed must be an integer between 0 and"),
        ({"length": 0}, "length must be an integer, at least 1, got 0"),
        ({"words": 2}, "words must be an integer, at least 3, got 2"),
        ({"size": 0}, "size must be an integer, at least 1, got 0"),
    ],
)
def test_wrong_arguments(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    mnist(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_dataset(**{"name": "mnist", "data_dir": tmp_path, **options})


def test_classes_take_turns() -> None:
    assert interleave(torch.tensor([2, 0, 0, 1, 0, 2])).tolist() == [1, 3, 0, 2, 5, 4]
    labels = torch.randint(7, (500,), generator=torch.Generator().manual_seed(0))
    order = interleave(labels)
    assert torch.equal(order.sort().values, torch.arange(500))
    assert labels[order][:35].tolist() == list(range(7)) * 5


# ---- batches


def test_a_loader_hands_out_whole_batches(tmp_path: Path) -> None:
    mnist(tmp_path)
    train = load_dataset("mnist", tmp_path).train
    batches = list(make_loader(train, 5, shuffle=False))
    assert [(tuple(x.shape), y.tolist()) for x, y in batches] == [
        ((5, 1, 28, 28), [0, 1, 2, 3, 4]),
        ((5, 1, 28, 28), [5, 6, 7, 8, 9]),
        ((2, 1, 28, 28), [0, 1]),
    ]
    assert torch.equal(torch.cat([x for x, _ in batches]), train.__getitems__(range(12))[0])
    assert len(list(make_loader(train, 5, shuffle=True, drop_last=True))) == 2
    with pytest.raises(ValueError, match="workers must be an integer, at least 0, got -1"):
        make_loader(train, 5, shuffle=True, workers=-1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loader_sees_the_same_pictures(tmp_path: Path, workers: int) -> None:
    cifar10(tmp_path)

    def new() -> Any:
        return make_loader(load_dataset("cifar10", tmp_path, seed=1).train, 6, shuffle=True, seed=4, workers=workers)

    reference = make_loader(load_dataset("cifar10", tmp_path, seed=1).train, 6, shuffle=True, seed=4)
    whole = [x for _ in range(3) for x, _ in reference]
    stopped = new()
    for x, (y, _) in zip(whole[:6], stopped.until(6), strict=True):
        assert torch.equal(x, y)
    resumed = new()
    resumed.load_state_dict(stopped.state_dict())
    rest = [x for x, _ in resumed.until(12)]
    assert all(torch.equal(x, y) for x, y in zip(whole[6:], rest, strict=True))
    assert len(rest) == 6


def test_looking_at_the_pictures_meanwhile_changes_nothing(tmp_path: Path) -> None:
    cifar10(tmp_path)
    train = load_dataset("cifar10", tmp_path).train
    undisturbed, batches = (make_loader(train, 6, shuffle=True) for _ in range(2))
    whole = [x for x, _ in undisturbed.until(8)]
    seen = []
    for x, _ in batches.until(8):
        seen.append(x)
        first = [x for x, _ in batches.untouched()]  # as a posterior does, for batch normalisation
        assert all(torch.equal(x, y) for x, y in zip(first, whole[:4], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(seen, whole, strict=True))


def test_pictures_are_on_the_cpu_whatever_the_default_device_is(tmp_path: Path) -> None:
    cifar10(tmp_path)
    expected = load_dataset("cifar10", tmp_path).train.__getitems__([3, 1])
    with torch.device("meta"):
        train = load_dataset("cifar10", tmp_path).train
        x, y = train.__getitems__([3, 1])
    assert torch.equal(x, expected[0])
    assert torch.equal(y, expected[1])


def test_examples_can_be_sent_to_another_process() -> None:
    pictures = Images(pixels(0, 1, 2), torch.arange(3), Scale(), Key(1))
    copy = pickle.loads(pickle.dumps(pictures))
    assert torch.equal(copy[2][0], pictures[2][0])


# ---- real data


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


@real
def test_real_cifar10() -> None:
    found = load_dataset("cifar10", augment=False, limit_train=10_000)
    assert found.note == "10000 of 50000 training images"
    x, y = found.train.__getitems__(range(10_000))
    assert y[:6].tolist() == [6, 9, 9, 4, 1, 1]
    assert x.mean((0, 2, 3)).abs().max() < 0.02
