"""Augmentation: random crops and flips as functions of seed, epoch and index."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qlangevin.experiments.data import load_dataset
from qlangevin.experiments.data.augment import augmentation_key, crop_and_flip, draw_shifts, random_box
from tests.helpers.official import cifar10, pixels


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
