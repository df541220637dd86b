"""Statistics of batch normalization, estimated for each sample."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import TensorDataset

import qlangevin as ql
from tests.helpers.posteriors import (
    LABELS,
    Fill,
    X,
    build_case,
    evaluate_by_hand,
    model_state,
    open_posterior,
    store_draws,
)

Posterior = ql.Posterior


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, 16, 16, generator=generator) * scale, torch.zeros(8)) for scale in (8, 8, 5)]


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_reestimated_statistics_are_those_of_update_bn(kind: str, vectorize: bool, fill: Fill) -> None:
    model, x = build_case("resnet", kind)
    store = fill(model)
    hand, stored = [], evaluate_by_hand(model, store, x)
    for sample in store:
        other = copy.deepcopy(model)
        sample.load_into(other)
        update_bn(batches(), other)
        with torch.no_grad():
            hand.append(other.eval()(x))
    found = open_posterior(store, model, vectorize, batch_norm=batches()).samples(x)
    torch.testing.assert_close(
        found, torch.stack(hand), rtol=0 if not vectorize else 1e-5, atol=0 if not vectorize else 1e-5
    )
    assert float((found - stored).abs().max()) > 0.01


def test_statistics_are_those_of_each_sample_and_computed_once(fill: Fill) -> None:
    model, x = build_case("resnet", "bfp8")
    model.train()
    passes = 0

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            nonlocal passes
            passes += 1
            return iter(batches())

    posterior = open_posterior(fill(model), model, batch_norm=Loader())
    before = model_state(model)
    first = posterior.samples(x)
    assert passes == 3
    assert torch.equal(posterior.samples(x), first)
    list(posterior.predict_loader([x, x]))
    assert passes == 3
    assert model_state(model) == before
    assert torch.equal(open_posterior(posterior.members, model, batch_norm=batches()).samples(x), first)
    means = [posterior._weights.statistics[s]["norm.running_mean"] for s in posterior.members[:3]]
    assert not torch.equal(means[0], means[1])


def test_dropout_is_off_while_statistics_are_estimated(fill: Fill) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    store = fill(model)
    posterior = open_posterior(store, model.train(), batch_norm=[data[:16], data[16:]])
    generator = torch.get_rng_state()
    posterior.predict(data)
    assert torch.equal(torch.get_rng_state(), generator)
    inner = nn.functional.linear(data, store[0]["0.weight"], store[0]["0.bias"])
    expected = torch.stack((inner[:16].mean(0), inner[16:].mean(0))).mean(0)
    torch.testing.assert_close(posterior._weights.statistics[posterior.members[0]]["2.running_mean"], expected)


def test_a_model_that_is_a_batch_norm_itself(fill: Fill) -> None:
    model, data = nn.BatchNorm1d(3), torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    found = open_posterior(fill(model), model, batch_norm=[data]).samples(data)
    assert found.shape == (3, 32, 3)


def test_statistics_from_a_generator_are_refused(fill: Fill) -> None:
    model, x = build_case("resnet", "plain")
    store = fill(model)
    loaders: list[Any] = [(batch for batch in batches()), []]
    for empty in loaders:
        with pytest.raises(ValueError, match="batch_norm must be a loader that gives batches each time"):
            open_posterior(store, model, batch_norm=empty).predict(x)


def test_models_without_batch_norm_take_a_loader_too(fill: Fill) -> None:
    for name in ("mlp", "lstm"):
        model, x = build_case(name, "bfp8")
        store = fill(model, name=name)
        assert torch.equal(
            open_posterior(store, model, False, batch_norm=[x]).samples(x), evaluate_by_hand(model, store, x)
        )


def test_batch_norm_without_statistics_is_left_alone(fill: Fill) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    store = fill(model)
    assert torch.equal(
        open_posterior(store, model, False, batch_norm=[x]).samples(x), evaluate_by_hand(model, store, x)
    )


def test_batch_norm_weighs_batches_by_their_size(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
    data = torch.cat((torch.randn(100, 1), torch.full((2, 1), 10.0)))
    posterior = Posterior.open(store_draws(tmp_path, model=model), model, batch_norm=[data[:100], data[100:]])
    posterior.predict(data)
    torch.testing.assert_close(posterior._weights.statistics[posterior.members[0]]["0.running_mean"], data.mean(0))


def test_estimating_statistics_does_not_move_a_loader(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    loader = ql.Loader(TensorDataset(X, LABELS), batch_size=5, seed=0)
    next(iter(loader))
    Posterior.open(store_draws(tmp_path, model=model), model, batch_norm=loader).predict(X)
    assert loader.steps == 1
