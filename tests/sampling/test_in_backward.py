"""Parameters that are stepped as soon as autograd has their gradient."""

import copy
import gc

import pytest
import torch
from torch import Tensor

from qlangevin import SGLD
from tests.helpers.packing import backward, build, numbers, packed, run, same, sampler_of


@pytest.mark.parametrize("pack_it", [True, False])
def test_there_is_never_more_than_one_gradient(pack_it: bool) -> None:
    model, x = packed() if pack_it else build()
    sampler, seen = sampler_of(model, step_in_backward=True), []

    def look(p: Tensor) -> None:
        seen.append([q.grad is None for q in model.parameters()])

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    before = numbers(model)
    backward(model, x)
    assert seen == [[True] * 4] * 4
    assert not same(numbers(model), before)
    stepped = numbers(model)
    sampler.step()  # has nothing left to do
    assert same(numbers(model), stepped)
    assert all(sampler.state[p]["step"] == 1 for p in model.parameters())


def test_schedulers_take_effect_in_backward() -> None:
    after, x = packed()
    within = copy.deepcopy(after)
    for model, flag in ((after, False), (within, True)):
        sampler = sampler_of(model, step_in_backward=flag)
        schedule = torch.optim.lr_scheduler.StepLR(sampler, 1, gamma=0.3)
        for _ in range(4):
            run(model, x, sampler, 1)
            schedule.step()
        sampler.param_groups[0]["lr"] = 0.5
        run(model, x, sampler, 1)
        sampler.param_groups[0].update(lr=0.0, temperature=0.0)
        still = numbers(model)
        run(model, x, sampler, 1)
        assert same(numbers(model), still)
    assert same(numbers(after), numbers(within))


def test_groups_in_backward() -> None:
    after, x = packed()
    within = copy.deepcopy(after)
    for model, flag in ((after, False), (within, True)):
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.3, "temperature": 0.0}]
        sampler = SGLD(groups, 0.1, 1000, step_in_backward=flag)
        run(model, x, sampler, 3)
    assert same(numbers(after), numbers(within))


def test_closures_in_backward() -> None:
    after, x = packed()
    within = copy.deepcopy(after)
    a, b = sampler_of(after), sampler_of(within, step_in_backward=True)
    for _ in range(2):
        a.zero_grad()
        assert a.step(lambda: backward(after, x).item()) == b.step(lambda: backward(within, x).item())
    assert same(numbers(after), numbers(within))


def test_a_sampler_that_is_gone_no_longer_steps() -> None:
    model, x = packed()
    sampler = sampler_of(model, step_in_backward=True)
    backward(model, x)
    del sampler
    gc.collect()
    before = numbers(model)
    backward(model, x)
    assert same(numbers(model), before)
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    again = sampler_of(model, step_in_backward=True)  # a new one takes its place
    backward(model, x)
    assert again.state[model[0].weight]["step"] == 1
    assert not same(numbers(model), before)


@pytest.mark.parametrize("pack_it", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_one_parameter_has_one_sampler(pack_it: bool, flag: bool) -> None:
    model, x = packed() if pack_it else build()
    sampler = sampler_of(model, step_in_backward=True)
    before = numbers(model)
    with pytest.raises(ValueError, match=r"parameter '0.weight': another sampler steps it in backward; one parameter"):
        sampler_of(model, step_in_backward=flag, weights="bfp8" if pack_it else "bfp4")
    assert same(numbers(model), before)
    backward(model, x)
    assert sampler.state[model[0].weight]["step"] == 1  # the refused one left nothing behind


def test_a_sampler_refuses_to_step_parameters_that_a_later_one_steps_in_backward() -> None:
    model, _ = packed()
    first = sampler_of(model)
    second = sampler_of(model, step_in_backward=True)
    with pytest.raises(ValueError, match="another sampler steps it in backward"):
        first.step()
    del second


@pytest.mark.parametrize("pack_it", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_in_backward(pack_it: bool, bad: float) -> None:
    model, x = packed() if pack_it else build()
    sampler = sampler_of(model, step_in_backward=True)
    model[0].bias.register_hook(lambda g: g * bad)
    before = numbers(model)
    with pytest.raises(FloatingPointError, match=r"gradient of parameter '0.bias' holds .* it was not changed"):
        backward(model, x)
    assert torch.equal(model[0].bias, before["0.bias"])
    assert sampler.state[model[0].bias]["step"] == 0


@pytest.mark.parametrize("move", ["to", "float", "double"])
@pytest.mark.parametrize("pack_it", [True, False])
def test_a_model_that_is_moved_is_still_stepped(pack_it: bool, move: str) -> None:
    model, x = packed() if pack_it else build()
    sampler, parameters = sampler_of(model, step_in_backward=True), list(model.parameters())
    model.to("cpu") if move == "to" else getattr(model, move)()
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    backward(model, x.to(parameters[0].dtype))
    sampler.step()  # has nothing left to do, unless the hooks were lost on the way
    assert [sampler.state[p]["step"] for p in parameters] == [1] * 4
    assert all(p.grad is None for p in parameters)
    backward(model, x.to(parameters[0].dtype))
    assert [sampler.state[p]["step"] for p in parameters] == [2] * 4
    assert all(p.grad is None for p in parameters)


def test_the_users_own_hooks_stay() -> None:
    model, x = packed()
    sampler, seen = sampler_of(model, step_in_backward=True), []
    model[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
    backward(model, x)
    model[0].bias.grad = torch.ones(7)  # set by the user; step() takes it
    sampler.step()
    assert sampler.state[model[0].bias]["step"] == 2
    backward(model, x)
    assert seen == [True, True]
    assert sampler.state[model[0].bias]["step"] == 3


def test_hooks_of_samplers_that_are_gone_do_not_pile_up() -> None:
    model, x = packed()
    for _ in range(5):
        sampler = sampler_of(model, step_in_backward=True)
        del sampler
    sampler = sampler_of(model, step_in_backward=True)
    counts = {len(p._post_accumulate_grad_hooks) for p in model.parameters()}
    assert counts == {2}  # the step, and the first look at the loss
    backward(model, x)
    assert sampler.state[model[0].bias]["step"] == 1
