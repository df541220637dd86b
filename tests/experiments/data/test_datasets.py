"""Data sets of every kind: digits, limits, arguments, and batches from a loader."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qlangevin.experiments.data import datasets, load_dataset, make_loader
from qlangevin.experiments.data.examples import Images, Scale
from qlangevin.experiments.data.readers import interleave
from qlangevin.quantization.random import Key
from tests.helpers.loaders import ignore_worker_warnings
from tests.helpers.official import cifar10, mnist, pixels

pytestmark = ignore_worker_warnings


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


def test_digits_of_a_scikit_learn_with_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_dataset("digits")
    monkeypatch.setattr(datasets, "DIGITS_FILE", Path("elsewhere.csv"))
    again = load_dataset("digits")
    for part, same in ((found.train, again.train), (found.test, again.test)):
        everything = range(len(part))
        assert all(map(torch.equal, part.__getitems__(everything), same.__getitems__(everything)))


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        ValueError, match=r"comes with scikit-learn, which is not installed; pip install 'qlangevin\[demo\]'"
    ):
        load_dataset("digits")


# ---- limits and arguments


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
