"""CIFAR-10 and CIFAR-100: reading the official files and archives, and naming one that is wrong."""

import gzip
from pathlib import Path

import pytest
import torch

from qlangevin.experiments.data import load_dataset
from tests.helpers.official import PIXELS, archive, cifar10, cifar_records, pixels, real, write


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


@real
def test_real_cifar10() -> None:
    found = load_dataset("cifar10", augment=False, limit_train=10_000)
    assert found.note == "10000 of 50000 training images"
    x, y = found.train.__getitems__(range(10_000))
    assert y[:6].tolist() == [6, 9, 9, 4, 1, 1]
    assert x.mean((0, 2, 3)).abs().max() < 0.02
