"""Predictions that are not finite: of samples that have diverged, and for inputs that are not numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qlangevin import Posterior, QLangevinWarning, SampleStore
from qlangevin.prediction.predictive import Link
from tests.helpers.posteriors import X, append_draws

LINKS: list[Link] = ["softmax", "sigmoid", "identity"]


def normalized_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def store_with(path: Path, *diverged: int) -> SampleStore:
    """Store four samples, some with a NaN in their statistics. (Weights that are not finite are not stored.)"""
    model, norm = normalized_model(), torch.zeros(8)
    with SampleStore.create(path, model) as store:
        for i in range(4):
            norm[3] = torch.nan if i in diverged else 0.1
            model.load_state_dict({**model.state_dict(), "1.running_mean": norm})
            append_draws(store, model, 1, seed=i)
    return store


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("link", LINKS)
def test_a_sample_that_has_diverged_is_named(tmp_path: Path, vectorize: bool, link: Link) -> None:
    store = store_with(tmp_path / "run", 2)
    posterior = Posterior.open(store, normalized_model(), link=link, vectorize=vectorize)
    words = r"1 of 4 samples predict NaN .*: sample 2 of .*run. .* leave them out: Posterior.open\(store"
    for call in (posterior.predict, posterior.uncertainty, posterior.samples):
        with pytest.raises(FloatingPointError, match=words):
            call(X)
    with pytest.raises(FloatingPointError, match=words):
        list(posterior.predict_loader([X[:5], X[5:]]))
    healthy = Posterior.open(store[:2] + store[3:], normalized_model(), link=link)
    assert bool(healthy.predict(X).isfinite().all())


def test_a_sample_that_has_diverged_is_named_beside_inputs_that_are_not_numbers(tmp_path: Path) -> None:
    posterior = Posterior.open(store_with(tmp_path, 1, 3), normalized_model())
    x = X.clone()
    x[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match=r"2 of 4 samples .*: sample 1 of .*, sample 3 of "):
        posterior.predict(x)


def test_a_chain_that_has_diverged(tmp_path: Path) -> None:
    posterior = Posterior.open(store_with(tmp_path, 0, 1, 2, 3), normalized_model())
    with pytest.raises(
        FloatingPointError, match=r"all samples predict NaN .* and the inputs are finite: has the chain"
    ):
        posterior.predict(X)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("link", ["softmax", "identity"])
def test_inputs_that_are_not_numbers_are_said_once(tmp_path: Path, bad: float, link: Link) -> None:
    model = nn.Linear(4, 3)
    with SampleStore.create(tmp_path, model) as store:
        append_draws(store, model, 3, seed=0)
    posterior = Posterior.open(store, model, link=link)
    x = X.clone()
    x[[2, 5], 0] = bad
    with pytest.warns(QLangevinWarning, match=r"inputs hold NaN or .* for 2 of 23 examples are not finite") as caught:
        p = posterior.predict(x)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    rest = [i for i in range(23) if i not in (2, 5)]
    assert torch.equal(p[rest], posterior.predict(X)[rest])
    posterior[1:].predict(x)  # said already
    posterior.uncertainty(x)


class Masked(nn.Linear):
    """Classes that are masked with -inf have probability 0."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + mask


def test_infinite_masks_are_not_held_against_the_inputs(tmp_path: Path) -> None:
    model = Masked(4, 3)
    with SampleStore.create(tmp_path, model) as store:
        append_draws(store, model, 3, seed=0)
    p = Posterior.open(store, model).predict((X, torch.tensor([0.0, -torch.inf, 0.0])))
    assert p[:, 1].tolist() == [0.0] * 23
