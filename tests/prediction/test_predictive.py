"""Predictions, their average and its uncertainty: cases computed by hand, NumPy in float64, and any split into groups."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qlangevin.prediction.predictive import Average, Link, Uncertainty, apply_link

LINKS: list[Link] = ["softmax", "sigmoid", "identity"]
SHAPES = {"softmax": [(4, 3), (2, 3, 5, 4)], "sigmoid": [(4,), (4, 1), (4, 6)], "identity": [(4,), (4, 2), (2, 3, 5)]}
CASES = [(link, shape) for link in LINKS for shape in SHAPES[link]]


def outputs(link: Link, shape: tuple[int, ...], samples: int = 7, seed: int = 0) -> Tensor:
    """Return outputs of a network in float64, some of them very confident."""
    y = torch.randn(samples, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return y * torch.linspace(0.1, 30, shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1))


def averaged(p: Tensor, link: Link, sizes: list[int], noise: float = 0.0) -> Uncertainty:
    average = Average(link, noise, class_dim=1)
    for some in p.split(sizes):
        average.add(some)
    assert average.count == len(p)
    return average.uncertainty()


def entropy(p: Any, axis: int) -> Any:
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(axis)


def expected(p: Tensor, link: Link, noise: float) -> tuple[Any, Any, Any]:
    """(mean, total, aleatoric), by the definitions at the top of links.py."""
    q = p.numpy()
    if link == "identity":
        return q.mean(0), q.var(0) + noise, np.full(q.shape[1:], noise)
    if link == "sigmoid":
        q = np.stack((q, 1 - q), 2)
    total, aleatoric = entropy(q.mean(0), 1), entropy(q, 2).mean(0)
    return p.numpy().mean(0), total, aleatoric


# ---- predictions


def test_softmax_is_along_the_classes_and_sigmoid_of_each() -> None:
    y = outputs("softmax", (2, 3, 5, 4))
    assert torch.equal(apply_link(y, "softmax", 1), torch.stack([one.softmax(1) for one in y]))
    assert torch.equal(apply_link(y, "sigmoid"), y.sigmoid())
    assert apply_link(y, "identity") is y


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 1, 8, 8), ()])
def test_softmax_of_fewer_than_two_classes_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"two classes or more.*, got .*link='sigmoid', for regression link='identity'"
    ):
        apply_link(torch.zeros(3, *shape), "softmax", 1 if len(shape) > 2 else None)


# ---- uncertainty


def test_two_samples_that_are_sure_of_different_classes() -> None:
    u = averaged(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), "softmax", [1, 1])
    assert u.mean.tolist() == [[0.5, 0.5]]
    assert u.total.tolist() == u.epistemic.tolist() == [pytest.approx(math.log(2))]
    assert u.aleatoric.tolist() == [0.0]


def test_a_coin_all_samples_agree_on() -> None:
    u = averaged(torch.full((3, 1, 2), 0.5), "softmax", [3])
    assert u.aleatoric.tolist() == u.total.tolist() == [pytest.approx(math.log(2))]
    assert u.epistemic.tolist() == [0.0]


def test_yes_or_no_of_two_labels() -> None:
    u = averaged(torch.tensor([[[0.25, 1.0]], [[0.75, 1.0]]]), "sigmoid", [1, 1])
    quarter = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert u.mean.tolist() == [[0.5, 1.0]]
    assert u.total.tolist() == [[pytest.approx(math.log(2)), 0.0]]
    assert u.aleatoric.tolist() == [[pytest.approx(quarter), 0.0]]
    assert u.epistemic.tolist() == [[pytest.approx(math.log(2) - quarter), 0.0]]


def test_regression_adds_the_noise_of_the_data() -> None:
    u = averaged(torch.tensor([[1.0], [3.0], [8.0]]), "identity", [1, 2], noise=0.5)
    assert u.mean.tolist() == [4.0]
    assert u.epistemic.tolist() == [pytest.approx(26 / 3)]
    assert u.aleatoric.tolist() == [0.5]
    assert u.total.tolist() == [pytest.approx(26 / 3 + 0.5)]


@pytest.mark.parametrize(("link", "shape"), CASES)
def test_uncertainty_is_as_defined(link: Link, shape: tuple[int, ...]) -> None:
    p = apply_link(outputs(link, shape), link, 1)
    noise = 0.3 if link == "identity" else 0.0
    u = averaged(p, link, [1] * 7, noise)
    mean, total, aleatoric = expected(p, link, noise)
    np.testing.assert_allclose(u.mean, mean, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(u.total, total, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(u.aleatoric, aleatoric, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(u.total, u.aleatoric + u.epistemic, rtol=1e-14, atol=1e-15)
    assert u.total.shape == (shape[:1] + shape[2:] if link == "softmax" else shape)


@given(
    case=st.sampled_from(CASES),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_any_split_into_groups_gives_the_same(case: tuple[Link, tuple[int, ...]], sizes: list[int], seed: int) -> None:
    link, shape = case
    p = apply_link(outputs(link, shape, sum(sizes), seed), link, 1)
    whole, split = averaged(p, link, [len(p)]), averaged(p, link, sizes)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@given(case=st.sampled_from(CASES), samples=st.integers(1, 9), seed=st.integers(0, 99), single=st.booleans())
def test_epistemic_uncertainty_is_not_negative(
    case: tuple[Link, tuple[int, ...]], samples: int, seed: int, single: bool
) -> None:
    link, shape = case
    p = apply_link(outputs(link, shape, samples, seed).float(), link, 1)
    u = averaged(p, link, [1] * samples if single else [samples])
    assert bool((u.epistemic >= 0).all())
    assert bool((u.aleatoric >= 0).all())
    assert bool((u.total >= u.epistemic).all())


@pytest.mark.parametrize(("link", "shape"), CASES)
@pytest.mark.parametrize("sizes", [[9], [1] * 9, [4, 5]])
def test_identical_samples_have_no_epistemic_uncertainty(link: Link, shape: tuple[int, ...], sizes: list[int]) -> None:
    p = apply_link(outputs(link, shape, 1).float(), link, 1).expand(9, *shape)
    u = averaged(p, link, sizes, 0.1 if link == "identity" else 0.0)
    scale = float(p.square().max()) if link == "identity" else 1.0
    assert float(u.epistemic.abs().max()) <= 1e-6 * scale
    torch.testing.assert_close(u.mean, p[0], rtol=1e-6, atol=1e-6)


def test_a_single_sample_is_its_own_average_bit_for_bit() -> None:
    p = apply_link(outputs("softmax", (4, 3), 1).float(), "softmax")
    u = averaged(p, "softmax", [1])
    assert torch.equal(u.mean, p[0])
    assert u.epistemic.tolist() == [0.0] * 4


def test_the_variance_is_stable_far_from_zero() -> None:
    """Mean 1e6, spread 1e-2: the mean of squares, less the square of the mean, would have an error of 1e-4, all there is."""
    p = 1e6 + 1e-2 * torch.randn(500, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = (p - 1e6).numpy().var(0)
    for sizes in ([1] * 500, [500], [7, 300, 193]):
        u = averaged(p, "identity", sizes)
        np.testing.assert_allclose(u.epistemic, exact, rtol=1e-6)
        np.testing.assert_allclose(u.mean - 1e6, (p - 1e6).numpy().mean(0), atol=2e-9)


def test_the_law_of_total_variance_over_chains() -> None:
    """Var = mean of the chains' variances + variance of their means, for chains of one length."""
    p = outputs("identity", (5,), 12)
    whole, parts = averaged(p, "identity", [12]), [averaged(part, "identity", [4]) for part in p.split(4)]
    within = torch.stack([u.epistemic for u in parts]).mean(0)
    between = torch.stack([u.mean for u in parts]).var(0, unbiased=False)
    torch.testing.assert_close(whole.epistemic, within + between, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("link", LINKS)
def test_many_samples_of_half_precision_are_averaged_as_well_as_they_are_given(link: Link, dtype: torch.dtype) -> None:
    """Added up in bfloat16, what sample 300 adds to the mean would be lost in rounding."""
    shape = (6, 4)
    y = torch.randn(300, *shape, generator=torch.Generator().manual_seed(0)) + torch.linspace(-1, 1, 300)[:, None, None]
    p = apply_link(y.to(dtype), link)
    mean, total, aleatoric = expected(p.double(), link, 0.0)
    u = averaged(p, link, [1] * 300)
    eps = torch.finfo(dtype).eps
    np.testing.assert_allclose(u.mean.double(), mean, rtol=2 * eps, atol=eps / 4)
    np.testing.assert_allclose(u.total.double(), total, rtol=4 * eps, atol=2 * eps)
    np.testing.assert_allclose(u.aleatoric.double(), aleatoric, rtol=4 * eps, atol=2 * eps)
