"""The prior by its standard deviation, in the place of weight decay."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qlangevin as ql
from qlangevin import SGLD


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))


def test_it_is_weight_decay_over_the_data() -> None:
    """λ = 1 / (σ² N), and so the same chain to the bit."""
    a, b = model(), model()
    one = SGLD(a.parameters(), 0.1, 50, prior_std=0.5, weights="bfp8")
    other = SGLD(b.parameters(), 0.1, 50, weight_decay=1 / (0.5**2 * 50), weights="bfp8")
    assert one.param_groups[0]["weight_decay"] == other.param_groups[0]["weight_decay"] == 0.08
    x = torch.randn(3, 4)
    for each, sampler in ((a, one), (b, other)):
        each(x).square().mean().backward()
        sampler.step()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_the_stationary_variance_is_that_of_the_prior() -> None:
    """Without data, θ' = θ - lr λ θ + √(2 lr/N) ξ has variance σ²/(1 - lr λ/2); 40 000 draws, 5 standard errors of 0.7%."""
    p = nn.Parameter(torch.zeros(40_000))
    sampler = SGLD([p], lr=50, num_data=100, prior_std=2.0)
    for _ in range(60):
        p.grad = torch.zeros_like(p)
        sampler.step()
    exact = 2.0**2 / (1 - 50 * sampler.param_groups[0]["weight_decay"] / 2)
    assert abs(float(p.detach().var()) / exact - 1) < 5 * math.sqrt(2 / 40_000)


def test_groups_override_either() -> None:
    first, second = model()
    groups: list[dict[str, Any]] = [
        {"params": first.weight}, {"params": first.bias, "weight_decay": 0.3},
        {"params": second.weight, "prior_std": 0.1}, {"params": second.bias, "num_data": 100},
    ]  # fmt: skip
    sampler = SGLD(groups, 0.1, 50, prior_std=1.0)
    decays = [group["weight_decay"] for group in sampler.param_groups]
    assert decays == pytest.approx([1 / 50, 0.3, 1 / (0.01 * 50), 1 / 100])
    assert [group["prior_std"] for group in sampler.param_groups] == [1.0, None, 0.1, 1.0]
    others: list[dict[str, Any]] = [{"params": first.weight, "prior_std": 2.0}, {"params": first.bias}]
    plain = SGLD(others, 0.1, 50, weight_decay=0.7)
    assert [group["weight_decay"] for group in plain.param_groups] == pytest.approx([1 / 200, 0.7])


def test_both_are_refused() -> None:
    message = (
        r"prior_std=1.0 and weight_decay=0.0 are two names of one prior; give one: weight_decay = 1 / \(prior_std² num"
    )
    with pytest.raises(ValueError, match=message):
        SGLD(model().parameters(), 0.1, 50, prior_std=1.0, weight_decay=0.0)
    with pytest.raises(ValueError, match=r"prior_std=1 and weight_decay=0.1 are two names"):
        SGLD([{"params": model().parameters(), "prior_std": 1, "weight_decay": 0.1}], 0.1, 50)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan, "1", True])
def test_a_deviation_must_be_positive_and_finite(wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r"prior_std must be the standard deviation .*, got .*; for a flat prior leave it out"
    ):
        SGLD(model().parameters(), 0.1, 50, prior_std=wrong)


def test_num_data_is_checked_first() -> None:
    with pytest.raises(ValueError, match="num_data must be the number of training examples"):
        SGLD(model().parameters(), 0.1, 0, prior_std=1.0)


def test_it_is_shown_saved_and_in_the_manifest(tmp_path: Path) -> None:
    m = model()
    sampler = SGLD(m.parameters(), 0.1, 50, prior_std=0.5)
    assert "prior_std: 0.5" in repr(sampler)
    assert "weight_decay: 0.08" in repr(sampler)
    other = SGLD(model().parameters(), 0.1, 50)
    assert "prior_std" not in repr(other)
    other.load_state_dict(sampler.state_dict())
    assert other.param_groups[0]["prior_std"] == 0.5
    assert other.param_groups[0]["weight_decay"] == 0.08
    ql.SampleStore.create(tmp_path / "a", m, sampler).close()
    settings = json.loads((tmp_path / "a" / "manifest.json").read_text())["settings"]["sampler"]["groups"][0]
    assert (settings["prior_std"], settings["weight_decay"]) == (0.5, 0.08)
    ql.SampleStore.create(tmp_path / "b", m, SGLD(m.parameters(), 0.1, 50, weight_decay=0.08)).close()
    assert "prior_std" not in (tmp_path / "b" / "manifest.json").read_text()
