"""ImageNet: photos in class folders."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from qlangevin.experiments.data import load_dataset, make_loader
from qlangevin.experiments.data.augment import augmentation_key
from qlangevin.experiments.data.images import Photos, read_photos
from tests.helpers.official import imagenet, photo

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # on a machine with one processor
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]
MEAN, STD = (torch.tensor(t).view(3, 1, 1) for t in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def bytes_of(x: Tensor) -> Tensor:
    """The pixels before they were scaled."""
    return ((x * STD + MEAN) * 255).round()


def test_classes_take_turns_in_alphabetical_order(tmp_path: Path) -> None:
    imagenet(tmp_path / "imagenet")
    photo(tmp_path / "imagenet/train/n02/extra.jpg")
    (tmp_path / "imagenet/train/n02/notes.txt").write_text("not a photo")
    (tmp_path / "imagenet/train/notes.txt").write_text("not a class")
    found = load_dataset("imagenet", tmp_path, size=16)
    assert (found.classes, found.shape, len(found.train), len(found.test)) == (3, (3, 16, 16), 10, 6)
    assert found.note == "10 of 1281167 training images, 6 of 50000 test images, 3 of 1000 classes"
    assert found.train.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 1]
    assert isinstance(found.train, Photos)
    names = [found.train.path(i).relative_to(tmp_path).as_posix() for i in (0, 4, 6)]
    assert names == [f"imagenet/train/{n}.JPEG" for n in ("n01/n01_0", "n02/n02_0", "n01/n01_2")]
    limited = load_dataset("imagenet", tmp_path, size=16, limit_train=4)
    assert limited.note is not None
    assert limited.note.startswith("4 of 1281167 training images")
    assert torch.equal(limited.train[3][0], found.train[3][0])


def test_test_photos_are_the_middle_of_a_shrunk_one(tmp_path: Path) -> None:
    photo(tmp_path / "val/n01/a.JPEG", (300, 128))
    x, label = read_photos(tmp_path / "val", 56)[0]
    assert (x.shape, x.dtype, int(label)) == ((3, 56, 56), torch.float32, 0)
    row = bytes_of(x)[0, 20]  # it is shrunk to 150 x 64, of which columns 47 to 103 are kept
    expected = 128 * (2 * torch.arange(47, 103) + 0.5) / 299
    assert float((row - expected).abs().max()) < 3  # JPEG is not exact
    assert torch.equal(bytes_of(x)[0], bytes_of(x)[2])


@pytest.mark.parametrize("size", [(10, 10), (1, 50), (57, 3)])
def test_photos_may_be_small(tmp_path: Path, size: tuple[int, int]) -> None:
    photo(tmp_path / "train/n01/a.JPEG", size)
    for key in (None, augmentation_key(0)):
        assert read_photos(tmp_path / "train", 32, key)[0][0].shape == (3, 32, 32)


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_photos_of_other_colours_are_converted(tmp_path: Path, mode: str) -> None:
    photo(tmp_path / "train/n01/a.JPEG", (40, 40), mode)
    with Image.open(tmp_path / "train/n01/a.JPEG") as file:
        assert file.mode == mode
    row = bytes_of(read_photos(tmp_path / "train", 35)[0][0])[:, 10]
    assert float((row[0] - row[1]).abs().max()) < 6
    assert bool((row[:, -1] > row[:, 0] + 80).all())


def test_random_parts_are_a_function_of_seed_epoch_and_index(tmp_path: Path) -> None:
    imagenet(tmp_path)

    def images(seed: int = 0, epoch: int = 0, **options: Any) -> Tensor:
        train = load_dataset("imagenet", tmp_path, size=8, seed=seed, **options).train
        train.set_epoch(epoch)
        x, _ = train.__getitems__(range(4))
        assert torch.equal(train[2][0], x[2])
        assert torch.equal(train.__getitems__([-6, 1])[0], x[[3, 1]])  # -6 is 3 of 9
        return x

    first = images()
    assert torch.equal(images(limit_train=9), first)
    plain = images(augment=False)
    assert torch.equal(images(7, 7, augment=False), plain)
    for other in (images(1), images(0, 1), plain):
        assert not any(torch.equal(first[i], other[i]) for i in range(4))


def test_half_of_the_photos_are_flipped(tmp_path: Path) -> None:
    photo(tmp_path / "train/n01/a.JPEG", (64, 64))
    train = read_photos(tmp_path / "train", 8, augmentation_key(0))
    flipped = 0
    for epoch in range(200):
        train.set_epoch(epoch)
        row = train[0][0][0, 4]
        flipped += int(row[0] > row[-1])
    assert 60 < flipped < 140  # 5.7 standard deviations of a fair coin: 1e-8


def test_workers_change_nothing(tmp_path: Path) -> None:
    imagenet(tmp_path)
    train = load_dataset("imagenet", tmp_path, size=8).train
    one, two = (make_loader(train, 4, shuffle=True, workers=workers) for workers in (0, 2))
    for (x, y), (other_x, other_y) in zip(one.until(5), two.until(5), strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


@pytest.mark.parametrize("content", [None, b"", b"not a photo", "half"])
def test_a_broken_photo_is_named(tmp_path: Path, content: Any) -> None:
    imagenet(tmp_path)
    train = load_dataset("imagenet", tmp_path, size=8).train
    path = tmp_path / "train/n02/n02_1.JPEG"
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    message = "has been removed; load the data set anew" if content is None else "cannot be read as a photo .*; get it"
    with pytest.raises(ValueError, match=f"^{path} {message}"):
        list(make_loader(train, 4, shuffle=False))


def test_a_broken_photo_is_named_by_workers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1
    )  # or torch waits for a worker that failed
    imagenet(tmp_path)
    train = load_dataset("imagenet", tmp_path, size=8).train
    path = tmp_path / "train/n02/n02_1.JPEG"
    path.write_bytes(b"not a photo")
    try:
        list(make_loader(train, 4, shuffle=False, workers=1))
    except ValueError as error:
        said = str(error)
    gc.collect()
    assert f"{path} cannot be read as a photo" in said


def test_folders_that_are_wrong_are_named(tmp_path: Path) -> None:
    imagenet(tmp_path / "a")
    (tmp_path / "a/val").rename(tmp_path / "a/validation")
    with pytest.raises(ValueError, match=f"no folder {tmp_path}/a/val; expected are photos {tmp_path}/a/val/<class>"):
        load_dataset("imagenet", tmp_path / "a")
    photo(tmp_path / "a/val/ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(ValueError, match=f"^{tmp_path}/a/val has no class folders; expected .* sorted into folders"):
        load_dataset("imagenet", tmp_path / "a")
    for name in ("n01", "n02"):
        photo(tmp_path / f"a/val/{name}/a.JPEG")
    with pytest.raises(
        ValueError, match=f"train and val in {tmp_path}/a must have the same class folders, but n03 is in one"
    ):
        load_dataset("imagenet", tmp_path / "a")
    (tmp_path / "a/val/n03").mkdir()
    with pytest.raises(ValueError, match=f"^{tmp_path}/a/val/n03 has no photos; expected are files"):
        load_dataset("imagenet", tmp_path / "a")
