"""The backward passes that make up one step of a sampler that steps in backward: one, or several that add up."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import SGLD, QLangevinWarning
from tests.helpers.packing import MODELS, backward, build, numbers, packed, run, same, sampler_of

SECOND = r"parameter '2\..*' has stepped already, and was not changed .* step\(\) or zero_grad\(\) .* accumulate=k"


@pytest.mark.parametrize("pack_it", [True, False])
@pytest.mark.parametrize("end", ["step", "zero_grad"])
def test_a_second_pass_before_the_step_has_ended_is_refused(pack_it: bool, end: str) -> None:
    model, x = packed() if pack_it else build()
    sampler = sampler_of(model, step_in_backward=True)
    backward(model, x)
    before, state = numbers(model), copy.deepcopy(sampler.state_dict())
    with pytest.raises(RuntimeError, match=SECOND):
        backward(model, x)
    assert same(numbers(model), before)
    assert str(sampler.state_dict()) == str(state)
    assert all(p.grad is None for p in model.parameters())
    getattr(sampler, end)()
    assert same(numbers(model), before)  # the refused pass left no gradient to step on
    backward(model, x)
    assert [sampler.state[p]["step"] for p in model.parameters()] == [2] * 4


@pytest.mark.parametrize("name", MODELS)
def test_every_order_of_the_three_calls_is_the_same_chain(name: str) -> None:
    ends = []
    for order in ("zero backward step", "backward step zero", "backward zero", "zero backward", "step backward"):
        model, x = packed(name=name)
        sampler = sampler_of(model, step_in_backward=True)
        calls: dict[str, Callable[[], Any]] = {"zero": sampler.zero_grad, "step": sampler.step}
        calls["backward"] = partial(backward, model, x)
        for call in order.split() * 3:
            calls[call]()
        ends.append(numbers(model))
    assert all(same(ends[0], end) for end in ends[1:])


def test_losses_of_different_parameters_make_one_step() -> None:
    shared, a, b = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)
    sampler = SGLD([*a.parameters(), *b.parameters()], 0.1, 100, step_in_backward=True)
    hidden = shared(torch.ones(2, 3))
    a(hidden).sum().backward(retain_graph=True)
    b(hidden).sum().backward()
    sampler.step()
    assert [sampler.state[p]["step"] for p in (a.weight, b.weight)] == [1, 1]


def accumulated(model: nn.Module, batches: list[Tensor], sampler: SGLD, steps: int) -> None:
    for _ in range(steps):
        for x in batches:
            (model(x).square().mean() / len(batches)).backward()
        sampler.step()
        sampler.zero_grad()


@pytest.mark.parametrize("pack_it", [True, False])
@pytest.mark.parametrize("settings", [{}, {"accumulator": "fp32"}], ids=str)
def test_accumulating_is_the_chain_of_an_ordinary_sampler_that_accumulates(
    pack_it: bool, settings: dict[str, Any]
) -> None:
    after, x = packed() if pack_it else build()
    within, batches = copy.deepcopy(after), [x, x + 1, -x]
    accumulated(after, batches, sampler_of(after, **settings), 4)
    sampler = sampler_of(within, step_in_backward=True, accumulate=3, **settings)
    accumulated(within, batches, sampler, 4)
    assert same(numbers(after), numbers(within))
    assert all(sampler.state[p]["step"] == 4 and p.grad is None for p in within.parameters())
    assert not any("gradient" in state or "passes" in state for state in sampler.state.values())
    for x in batches:
        backward(within, x)
    with pytest.raises(RuntimeError, match="after each 3 backward passes"):
        backward(within, x)


def test_a_state_between_two_passes_resumes_bit_for_bit() -> None:
    def start() -> tuple[Any, SGLD]:
        model, _ = packed()
        return model, sampler_of(model, step_in_backward=True, accumulate=3)

    (one, sampler), x = start(), MODELS["mlp"][1]
    backward(one, x)
    backward(one, 2 * x)
    buffer = io.BytesIO()
    torch.save((one.state_dict(), sampler.state_dict()), buffer)
    backward(one, 3 * x)
    buffer.seek(0)
    two, resumed = start()
    weights, state = torch.load(buffer, weights_only=True)
    two.load_state_dict(weights)
    resumed.load_state_dict(state)
    backward(two, 3 * x)
    assert same(numbers(one), numbers(two))
    assert resumed.state[two[0].weight]["step"] == 1
    state["state"][0]["gradient"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"the saved gradient has shape \(1,\), its parameter"):
        resumed.load_state_dict(state)


def test_a_parameter_that_not_every_pass_uses_steps_on_what_it_has() -> None:
    both: list[dict[str, Any]] = [{}, {"step_in_backward": True, "accumulate": 2}]
    ends = []
    for options in both:
        torch.manual_seed(0)
        a, b = nn.Linear(2, 1), nn.Linear(2, 1)
        sampler = SGLD([*a.parameters(), *b.parameters()], 0.1, 100, **options)
        for passes in ((a, b), (a,)), ((b,), (a, b)):
            for used in passes:
                torch.stack([layer(torch.ones(3, 2)).sum() for layer in used]).sum().backward()
            sampler.step()
            sampler.zero_grad()
        ends.append([p.detach() for layer in (a, b) for p in layer.parameters()])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_a_step_that_ends_too_early_is_taken_and_said_once() -> None:
    model, x = packed()
    sampler = sampler_of(model, step_in_backward=True, accumulate=4)
    backward(model, x)
    with pytest.warns(
        QLangevinWarning, match=r"step\(\) takes the gradient of parameter '0.weight' after 1 of accumul"
    ) as w:
        sampler.step()
    assert w[0].filename == __file__
    assert sampler.state[model[0].weight]["step"] == 1
    backward(model, x)
    sampler.step()  # it was said
    backward(model, x)
    before = numbers(model)
    with pytest.warns(QLangevinWarning, match=r"zero_grad\(\) drops the gradient of .* call step\(\) after all") as w:
        sampler.zero_grad()
    assert w[0].filename == __file__
    assert same(numbers(model), before)
    assert "gradient" not in sampler.state[model[0].weight]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_pass_that_is_not_finite_is_not_added(bad: float) -> None:
    model, x = build()
    sampler = sampler_of(model, step_in_backward=True, accumulate=2)
    backward(model, x)
    waiting = sampler.state[model[2].bias]["gradient"].clone()
    handle = model[2].bias.register_hook(lambda g: g * bad)
    with pytest.raises(FloatingPointError, match=r"parameter '2.bias' holds .* it was not changed"):
        backward(model, x)
    assert torch.equal(sampler.state[model[2].bias]["gradient"], waiting)
    assert all(sampler.state[p]["step"] == 0 for p in [model[2].bias])
    handle.remove()


def test_each_gradient_is_clipped_to_its_own_norm() -> None:
    ends, most = [], 0.05
    for in_backward in (False, True):
        model, x = packed()
        options: dict[str, Any] = {"step_in_backward": True, "max_grad_norm": most} if in_backward else {}
        sampler = sampler_of(model, gradients=None, **options)
        for scale in (1.0, 100.0, 1e-6):
            (scale * model(x).square().mean()).backward()
            if not in_backward:
                for p in model.parameters():
                    norm = float(p.grad.double().norm())
                    p.grad.mul_(min(1.0, most / norm))
            sampler.step()
            sampler.zero_grad()
        ends.append(numbers(model))
    assert same(ends[0], ends[1])


def test_options_of_steps_in_backward_are_checked() -> None:
    p, options = nn.Parameter(torch.ones(2)), dict[str, Any]()
    for options, words in (
        ({"accumulate": 2}, "accumulate=2 goes with step_in_backward=True"),
        ({"max_grad_norm": 1.0}, r"step_in_backward=True; else call torch.nn.utils.clip_grad_norm_\(.*, 1.0\)"),
        ({"step_in_backward": True, "accumulate": 0}, "accumulate must be an integer, at least 1, got 0"),
        ({"step_in_backward": True, "accumulate": True}, "accumulate must be an integer, at least 1, got True"),
        ({"step_in_backward": True, "max_grad_norm": 0}, "max_grad_norm must be positive, got 0"),
        ({"step_in_backward": True, "max_grad_norm": -1.0}, "max_grad_norm must be a finite number"),
        ({"step_in_backward": "no"}, "step_in_backward must be True or False, got 'no'"),
    ):
        with pytest.raises(ValueError, match=words):
            SGLD([p], 0.1, 100, **options)
    sampler = SGLD([p], 0.1, 100)
    with pytest.raises(ValueError, match="accumulate=3 goes with step_in_backward"):
        sampler.add_param_group({"params": [nn.Parameter(torch.ones(1))], "accumulate": 3})
    assert "accumulate" not in sampler.param_groups[0]  # defaults leave states and manifests as they are


def test_options_of_steps_in_backward_are_saved_with_the_group() -> None:
    model, x = packed()
    sampler = sampler_of(model, step_in_backward=True, accumulate=2, max_grad_norm=0.5)
    copied = copy.deepcopy((model, sampler))
    for one, its in ((model, sampler), copied):
        run(one, x, its, 0)
        backward(one, x)
        assert its.state[one[0].weight]["step"] == 0
        backward(one, x)
        assert its.state[one[0].weight]["step"] == 1
    assert sampler.state_dict()["param_groups"][0]["accumulate"] == 2
    assert same(numbers(model), numbers(copied[0]))
