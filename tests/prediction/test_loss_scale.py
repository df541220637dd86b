"""A loss that is a sum over the batch is told from a mean, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import qlangevin as ql
from qlangevin import check_loss_scale, lowering
from tests.helpers.networks import CASES, build
from tests.helpers.posteriors import LABELS, X, model_state, small_model

SUM = pytest.warns(
    ql.QLangevinWarning, match=r"looks like a sum over the batch: its gradient grows 2 times .*23 in this"
)


def loss(reduction: str) -> Any:
    return lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction=reduction)


def test_a_mean_is_one_and_a_sum_is_two() -> None:
    assert check_loss_scale(loss("mean"), small_model(), (X, LABELS)) == pytest.approx(1, rel=1e-6)
    with SUM:
        assert check_loss_scale(loss("sum"), small_model(), (X, LABELS)) == pytest.approx(2, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_units_do_not_matter(scale: float) -> None:
    """A regression with small noise has a large loss, and is a mean nevertheless."""
    assert check_loss_scale(lambda m, b: scale * loss("mean")(m, b), small_model(), (X, LABELS)) < 1.001
    with SUM:
        check_loss_scale(lambda m, b: scale * loss("sum")(m, b), small_model(), (X, LABELS))


def test_token_means_and_token_sums() -> None:
    """Labels that are ignored count neither before nor after."""
    model, ids = nn.Sequential(nn.Embedding(7, 7)), torch.arange(15).view(3, 5) % 7
    labels = ids.masked_fill(ids > 4, -100)

    def token_loss(reduction: str) -> Any:
        return lambda model, batch: cross_entropy(model(batch["ids"]).mT, batch["labels"], reduction=reduction)

    batch = {"ids": ids, "labels": labels, "extra": [torch.zeros(2), "text"]}
    assert check_loss_scale(token_loss("mean"), model, batch) == pytest.approx(1, rel=1e-6)
    with pytest.warns(ql.QLangevinWarning, match="looks like a sum"):
        check_loss_scale(token_loss("sum"), model, batch)


@pytest.mark.parametrize("kind", ["plain", "packed", "lowered", "all"])
@pytest.mark.parametrize("name", CASES)
def test_no_false_alarm_on_any_network(name: str, kind: str) -> None:
    model, x, _ = build(name)
    if kind in ("packed", "all"):
        ql.pack(model, "bfp8")
    if kind in ("lowered", "all"):
        ql.lower(model, "bfp8", "bfp8")
    with torch.no_grad():
        target = model(x).detach().roll(1, 0)
    ratio = check_loss_scale(lambda model, batch: mse_loss(model(batch[0]), batch[1]), model, (x, target))
    assert 0.7 < ratio < 1.3
    with pytest.warns(ql.QLangevinWarning, match="looks like a sum"):
        check_loss_scale(lambda model, batch: mse_loss(model(batch[0]), batch[1], reduction="sum"), model, (x, target))


def test_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    ql.lower(ql.pack(model, "bfp8"), "bfp8", "bfp8")
    sampler = ql.SGLD(model.parameters(), 0.1, 100, step_in_backward=True)
    model(X).sum().backward()
    sampler.step()
    before, counts = model_state(model), lowering.state_dict(model)
    check_loss_scale(loss("mean"), model, (X, LABELS))
    assert model_state(model) == before
    assert lowering.state_dict(model) == counts
    assert all(state["step"] == 1 for state in sampler.state.values())


def test_a_penalty_on_the_weights_is_no_sum() -> None:
    def penalized(model: nn.Module, batch: Any) -> Tensor:
        return loss("mean")(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())  # type: ignore[no-any-return]

    assert check_loss_scale(penalized, small_model(), (X, LABELS)) == pytest.approx(1, rel=1e-4)


def test_what_cannot_be_checked() -> None:
    with pytest.raises(TypeError, match=r"loss_fn must return a loss .* one number, got shape \(23,\)"):
        check_loss_scale(loss("none"), small_model(), (X, LABELS))
    with pytest.raises(TypeError, match=r"loss_fn must return a loss .* got float"):
        check_loss_scale(lambda m, b: 1.0, small_model(), X)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"batch must hold tensors whose first dim is the examples', got str"):
        check_loss_scale(loss("mean"), small_model(), "text")
    with pytest.raises(ValueError, match="must have a parameter that requires gradients"):
        check_loss_scale(loss("mean"), small_model().requires_grad_(False), (X, LABELS))
    with pytest.raises(ValueError, match="gradient of the loss is zero"):
        check_loss_scale(lambda m, b: m(b[0]).sum() * 0, small_model(), (X, LABELS))
    with pytest.raises(FloatingPointError, match="not finite"):
        check_loss_scale(lambda m, b: m(b[0]).sum() * float("inf"), small_model(), (X, LABELS))
