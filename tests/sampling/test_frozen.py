"""Frozen parameters: not sampled, not rounded, without an accumulator; packed if wanted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qlangevin as ql
from qlangevin import SGLD, QTensor
from tests.helpers.networks import Tied


def adapter() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("accumulator", [None, "fp32"])
def test_a_frozen_parameter_keeps_its_precision(accumulator: Any) -> None:
    model = adapter()
    before = [p.detach().clone() for p in model.parameters()]
    sampler = SGLD(model.parameters(), 0.1, 100, weights="bfp8", accumulator=accumulator, weight_decay=0.1)
    model(torch.randn(3, 16)).sum().backward()
    sampler.step()
    same = [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    assert same == [True, True, False, False]
    assert ["accumulator" in sampler.state[p] for p in model.parameters()] == [
        False,
        False,
        *[accumulator is not None] * 2,
    ]


@pytest.mark.parametrize("accumulator", [None, "fp32"])
def test_a_parameter_that_is_unfrozen_is_sampled_from_then_on(accumulator: Any) -> None:
    model = adapter()
    sampler = SGLD(model.parameters(), 0.1, 100, weights="bfp8", accumulator=accumulator)
    for trainable in (False, True):
        model[0].requires_grad_(trainable)
        model(torch.randn(3, 16)).sum().backward()
        sampler.step()
        sampler.zero_grad()
    weight = model[0].get_parameter("weight")
    assert bool(ql.parse("bfp8").is_representable(weight.detach()).all())
    assert sampler.state[weight]["step"] == 1


def test_a_frozen_parameter_may_be_of_another_dtype() -> None:
    model = adapter()
    model[0].to(torch.bfloat16)
    sampler = SGLD(model.parameters(), 0.1, 100, weights="bfp16")
    assert len(sampler.param_groups[0]["params"]) == 4


def test_they_count_as_no_saturated_weights() -> None:
    model = adapter()
    with torch.no_grad():
        model[0].get_parameter("weight").fill_(100.0)
    assert SGLD(model.parameters(), 0.1, 100, weights="fixed8.6").saturated() == 0


# ---- packed


def test_frozen_parameters_are_packed_if_wanted() -> None:
    model, plain = adapter(), adapter()
    weight = plain[0].get_parameter("weight")
    ql.pack(model, "bfp8", frozen=True)
    assert all(isinstance(p, QTensor) for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    assert torch.equal(model[0].get_parameter("weight").detach(), ql.quantize(weight.detach(), "bfp8", "nearest"))
    assert sum(p.nbytes for p in model.parameters()) < sum(p.nbytes for p in plain.parameters()) / 3


def test_packing_a_base_does_not_change_the_bits_of_what_is_sampled() -> None:
    model, plain = ql.pack(adapter(), "bfp8", frozen=True, seed=3), ql.pack(adapter(), "bfp8", seed=3)
    assert torch.equal(model[2].get_parameter("weight").codes, plain[2].get_parameter("weight").codes)  # type: ignore[attr-defined]


def test_a_chain_on_a_packed_base() -> None:
    model = ql.pack(adapter(), "bfp8", frozen=True)
    base = model[0].get_parameter("weight").detach().clone()
    sampler = SGLD(model.parameters(), 0.05, 100, step_in_backward=True)
    before = model[2].get_parameter("weight").detach().clone()
    model(torch.randn(3, 16)).square().mean().backward()
    sampler.step()
    assert torch.equal(model[0].get_parameter("weight").detach(), base)
    assert not torch.equal(model[2].get_parameter("weight").detach(), before)
    ql.unpack(model)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_gradients_pass_through_a_packed_base() -> None:
    """Adapters below the last layer need them: x ↦ W x with W frozen has dx = Wᵀ dy."""
    layer = ql.pack(nn.Linear(5, 3, bias=False).requires_grad_(False), "bfp8", frozen=True)
    x = torch.randn(2, 5, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(2, 5))


def test_tied_and_integer_parameters() -> None:
    tied = Tied().requires_grad_(False)
    count = len(list(tied.parameters()))
    ql.pack(tied, "bfp8", frozen=True)
    assert len(list(tied.parameters())) == count
    assert all(isinstance(p, QTensor) for p in tied.parameters())
    model = nn.ParameterDict({"table": nn.Parameter(torch.arange(3), requires_grad=False), "w": torch.ones(3)})
    ql.pack(model, "bfp8", frozen=True)
    assert type(model["table"]) is nn.Parameter
    assert isinstance(model["w"], QTensor)


def test_the_flag_must_be_a_flag() -> None:
    with pytest.raises(ValueError, match="frozen must be True or False, got 'yes'"):
        ql.pack(adapter(), "bfp8", frozen="yes")  # type: ignore[arg-type]
