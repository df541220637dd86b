"""Settings and gradients that SGLD checks, and the errors for those it refuses."""

import copy
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qlangevin import SGHMC, SGLD, BlockFloat, CyclicalLR
from tests.helpers.sgld import backward, problem, values


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"lr": -0.1}, ValueError, "lr must be .* got -0.1"),
        ({"lr": float("nan")}, ValueError, "lr must be"),
        ({"num_data": 0}, ValueError, "num_data must be .* got 0"),
        ({"num_data": -5}, ValueError, "got -5"),
        ({"num_data": True}, ValueError, "num_data must be .* a positive integer, got True"),
        ({"num_data": 2.5}, ValueError, "examples, or of predicted tokens, a positive integer, got 2.5"),
        ({"maximize": "no"}, ValueError, "maximize must be True or False, got 'no'"),
        ({"maximize": 1}, ValueError, "maximize must be True or False, got 1"),
        ({"temperature": -1.0}, ValueError, "temperature must be"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must be"),
        ({"weights": "int8"}, ValueError, "unknown format 'int8'"),
        ({"gradients": "bfp1"}, ValueError, "bits must be"),
        ({"accumulator": "float"}, ValueError, "unknown format 'float'"),
        ({"rounding": "up"}, ValueError, "rounding must be one of"),
        ({"algorithm": "5"}, ValueError, "algorithm must be one of"),
        ({"seed": -1}, ValueError, "seed must be"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    p = nn.Parameter(torch.full((2,), 0.3))
    with pytest.raises(error, match=words):
        SGLD([p], **{"lr": 0.1, "num_data": 10, **settings})
    sampler = SGLD([nn.Parameter(torch.zeros(1))], lr=0.1, num_data=10)
    with pytest.raises(error, match=words):
        sampler.add_param_group({"params": [p], **settings})
    assert len(sampler.param_groups) == 1
    assert torch.equal(p, torch.full((2,), 0.3))


def test_a_format_the_parameter_cannot_hold_is_refused_before_anything_is_changed() -> None:
    good, bad = nn.Parameter(torch.full((2,), 0.3)), nn.Parameter(torch.full((2,), 0.3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"parameter 1 .* cannot hold every number of fixed16.8"):
        SGLD([good, bad], lr=0.1, num_data=10, weights="fixed16.8")
    assert torch.equal(good, torch.full((2,), 0.3))
    with pytest.raises(ValueError, match="cannot hold every number of fp32"):
        SGLD([bad], lr=0.1, num_data=10, weights="fp32")
    with pytest.raises(TypeError, match="real floating-point"):
        SGLD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1, num_data=10)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("accumulator", [None, "fp32"])
def test_weights_that_are_not_finite_are_refused_before_anything_is_changed(
    bad: float, accumulator: str | None
) -> None:
    good, odd = nn.Parameter(torch.full((2,), 0.3)), nn.Parameter(torch.tensor([0.3, bad, 0.1]))
    with pytest.raises(ValueError, match=r"parameter 'odd' holds an infinity or a NaN; a chain must begin at finite w"):
        SGLD([("good", good), ("odd", odd)], lr=0.1, num_data=10, weights="bfp8", accumulator=accumulator)
    assert torch.equal(good, torch.full((2,), 0.3))
    sampler = SGLD([good], lr=0.1, num_data=10)
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 \(shape \(3,\)\) holds an infinity or a NaN"):
        sampler.add_param_group({"params": [odd]})
    assert len(sampler.param_groups) == 1


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_num_data_is_said_to_be_an_integer(kind: Any) -> None:
    assert inspect.signature(kind).parameters["num_data"].annotation == "int"


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("priorstd", 0.05, "unknown setting 'priorstd'; did you mean 'prior_std'\\?"),
        ("wieghts", "bfp8", "did you mean 'weights'\\?"),
        ("momentum", 0.9, "unknown setting 'momentum'; settings of a group are lr, num_data, temperature, "),
        ("step_in_backward", True, "it holds for all groups: give it to the sampler"),
    ],
)
def test_unknown_settings_of_a_group_are_refused(kind: Any, name: str, value: Any, words: str) -> None:
    good, odd = (nn.Parameter(torch.full((2,), 0.3)) for _ in range(2))
    with pytest.raises(ValueError, match=f"parameter group 1: .*{words}"):
        kind([{"params": [good]}, {"params": [odd], name: value}], lr=0.1, num_data=10, weights="bfp8", prior_std=1.0)
    assert torch.equal(good, torch.full((2,), 0.3))
    sampler = kind([good], lr=0.1, num_data=10)
    with pytest.raises(ValueError, match=f"parameter group 1: .*{words}"):
        sampler.add_param_group({"params": [odd], name: value})
    assert len(sampler.param_groups) == 1


@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_a_group_may_have_what_torch_and_its_users_note_there(kind: Any) -> None:
    """Groups that schedulers have written to make another sampler, and are loaded into one."""
    a, b = (nn.Parameter(torch.full((2,), 0.3)) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [("a", a)], "name": "first", "lr_scale": 0.5}, {"params": [("b", b)]}]
    sampler = kind(groups, lr=0.1, num_data=10, mask={"a": torch.tensor([True, False])})
    CyclicalLR(sampler, 10, 2, 1, exploration_temperature=0.0)
    torch.optim.lr_scheduler.OneCycleLR(sampler, max_lr=0.1, total_steps=10, cycle_momentum=False)
    torch.optim.swa_utils.SWALR(sampler, swa_lr=0.05)
    plain = [
        {**group, "params": [*zip(group["param_names"], group["params"], strict=True)]}
        for group in sampler.param_groups
    ]
    other = kind(plain, lr=0.1, num_data=10)
    assert other.param_groups[0]["swa_lr"] == 0.05
    state = sampler.state_dict()
    state["param_groups"][0]["what_an_earlier_release_kept"] = 1
    other.load_state_dict(state)
    assert other.param_groups[0]["initial_temperature"] == 1.0


def test_true_is_not_one_even_after_one_was_accepted() -> None:
    SGLD([nn.Parameter(torch.zeros(1))], lr=1.0, num_data=1)
    with pytest.raises(ValueError, match="num_data must be"):
        SGLD([nn.Parameter(torch.zeros(1))], lr=1.0, num_data=True)
    with pytest.raises(ValueError, match="lr must be"):
        SGLD([nn.Parameter(torch.zeros(1))], lr=True, num_data=1)
    SGLD([nn.Parameter(torch.zeros(1))], lr=1.0, num_data=6e4, maximize=np.True_)  # type: ignore[arg-type]


def test_numpys_numbers_are_numbers() -> None:
    ours, numpys = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    for sampler in (
        SGLD([ours], 0.5, 100, seed=3),
        SGLD([numpys], np.float32(0.5), np.int64(100), seed=np.int64(3)),
    ):
        sampler.param_groups[0]["params"][0].grad = torch.ones(2)
        sampler.step()
    assert torch.equal(ours, numpys)


def test_settings_changed_by_hand_are_checked_and_followed() -> None:
    p = nn.Parameter(torch.full((3,), 0.3))
    sampler = SGLD([p], 0.1, 10**9, temperature=0.0)
    p.grad = torch.ones(3)
    sampler.param_groups[0].update(weights=BlockFloat(8), accumulator="fp32")
    sampler.step()
    assert torch.allclose(sampler.state[p]["accumulator"], torch.full((3,), 0.2))
    assert sampler.param_groups[0]["weights"] == "bfp8"
    sampler.param_groups[0]["weights"] = "bfp1"
    with pytest.raises(ValueError, match="bits must be"):
        sampler.step()
    half = nn.Parameter(torch.full((3,), 100.0, dtype=torch.bfloat16))
    sampler = SGLD([half], 0.1, 10**9)
    half.grad = torch.ones(3, dtype=torch.bfloat16)
    sampler.param_groups[0]["weights"] = "fixed16.4"
    with pytest.raises(ValueError, match=r"cannot hold every number of fixed16.4"):
        sampler.step()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model, x, y = problem()
    sampler = SGLD(model.named_parameters(), 0.1, 100, weights="bfp8", accumulator="fp32")
    backward(model, x, y)
    model[2].bias.grad[1] = bad  # type: ignore[index]
    before, state = values(model), copy.deepcopy(sampler.state_dict())
    with pytest.raises(FloatingPointError, match=r"parameter '2.bias' .* no parameter was changed"):
        sampler.step()
    assert all(torch.equal(p, q) for p, q in zip(before, values(model), strict=True))
    assert str(state) == str(sampler.state_dict())


def test_gradients_it_cannot_use_are_type_errors() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    sampler = SGLD(embedding.parameters(), 0.1, 100)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"parameter 0 \(shape \(5, 2\)\) has a sparse gradient"):
        sampler.step()


def test_a_model_in_the_place_of_its_parameters_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"got a Linear; give model.parameters\(\)"):
        SGLD(nn.Linear(2, 2), 0.1, 100)  # type: ignore[arg-type]
