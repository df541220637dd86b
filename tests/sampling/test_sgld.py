"""SGLD as an optimizer of torch, and as the paper's table of methods."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import SGLD, Key, corrected, native, parse, quantize
from qlangevin.quantization import random
from qlangevin.sampling.settings import StepSettings, parameter_key
from qlangevin.sampling.step import sgld_op
from tests.helpers.sgld import METHODS, backward, problem, values


def train(settings: dict[str, Any], steps: int = 6) -> tuple[nn.Module, SGLD]:
    model, x, y = problem()
    sampler = SGLD(model.named_parameters(), lr=0.1, num_data=1000, weight_decay=1e-3, **settings)
    for _ in range(steps):
        backward(model, x, y)
        sampler.step()
    return model, sampler


@pytest.mark.parametrize("method", METHODS)
def test_both_paths_give_the_same_chain_and_stay_on_the_grid(method: str) -> None:
    settings = METHODS[method]
    model, sampler = train(settings)
    with native.disabled():
        other, _ = train(settings)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        if "weights" in settings:
            assert parse(settings["weights"]).is_representable(p.detach()).all()
        if "accumulator" in settings:
            assert parse(settings["accumulator"]).is_representable(sampler.state[p]["accumulator"]).all()


def test_parameters_are_on_the_grid_from_construction_on() -> None:
    model, _, _ = problem()
    before = values(model)
    SGLD(model.parameters(), lr=0.1, num_data=10, weights="bfp4", rounding="nearest")
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, quantize(old, "bfp4"))


def test_one_step_is_the_equation() -> None:
    theta = nn.Parameter(torch.randn(40, 9, generator=torch.Generator().manual_seed(0)))
    sampler = SGLD(
        [theta], lr=0.1, num_data=50, temperature=0.5, weight_decay=0.01, weights="bfp8", gradients="bfp8", seed=9
    )
    start = theta.detach().clone()
    theta.grad = torch.randn(40, 9, generator=torch.Generator().manual_seed(1))
    sampler.step()
    key = parameter_key(9, 0, 0, 1)
    g = torch.ops.qlangevin.quantize(
        theta.grad, "bfp8", "stochastic", key.seed, key.stream - 2**64 * (key.stream >= 2**63), 1, random.GRADIENT
    )
    mu = start - 0.1 * (g + 0.01 * start)
    assert torch.equal(theta, corrected(mu, 2 * 0.1 * 0.5 / 50, "bfp8", key))


def test_without_noise_and_formats_it_is_torchs_sgd() -> None:
    ours, x, y = problem()
    theirs = copy.deepcopy(ours)
    a = SGLD(ours.parameters(), lr=0.1, num_data=1000, temperature=0.0, weight_decay=0.01)
    b = torch.optim.SGD(theirs.parameters(), lr=0.1, weight_decay=0.01)
    for _ in range(5):
        backward(ours, x, y)
        a.step()
        backward(theirs, x, y)
        b.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6)


def test_the_noise_has_variance_2_lr_t_over_n() -> None:
    theta = nn.Parameter(torch.zeros(200_000))
    sampler = SGLD([theta], lr=0.2, num_data=40, temperature=0.5)
    theta.grad = torch.zeros_like(theta)
    sampler.step()
    expected = 2 * 0.2 * 0.5 / 40
    # the relative standard error of a variance of n normals is sqrt(2/n) = 0.0032: five of them
    assert float(theta.detach().double().square().mean()) == pytest.approx(expected, rel=0.016)


def test_half_precision_without_a_format_is_unbiased_on_its_own_grid() -> None:
    # bfloat16 near 1 has a gap of 2^-7; a step of 2^-12 vanishes if it is rounded to nearest.
    p = nn.Parameter(torch.ones(100_000, dtype=torch.bfloat16))
    sampler = SGLD([p], lr=2.0**-12, num_data=1, temperature=0.0)
    p.grad = torch.ones_like(p)
    sampler.step()
    # Bernoulli with probability 1/16 below 1 (gap 2^-8): standard error of the mean 3e-6
    assert float(p.detach().double().mean()) == pytest.approx(1 - 2.0**-12, abs=1.6e-5)


def test_the_printed_algorithm_with_an_accumulator_is_unbiased() -> None:
    # Its last rounding and that of the weights must not share random bits; z beyond 5.5 has probability 4e-8.
    start = torch.tensor([7.0, 7.0, 7.0, 3.0]).expand(40_000, 4)
    p = nn.Parameter(start.clone())
    sampler = SGLD([p], 0.3, 1, weights="fixed8.-2", accumulator="bfp4", algorithm="paper")
    p.grad = torch.zeros_like(p)
    sampler.step()
    error = (p.detach() - sampler.state[p]["accumulator"]).double()
    assert (error.mean(0) / (error.var(0) / len(error)).sqrt()).abs().max() < 5.5


def test_seeds_and_parameters_differ_and_repeat() -> None:
    def noise(seed: int, stream: int = 0) -> list[Tensor]:
        a, b = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))
        sampler = SGLD([a, b], 0.1, 100, seed=seed, stream=stream)
        a.grad, b.grad = torch.zeros(50), torch.zeros(50)
        sampler.step()
        return [a.detach(), b.detach()]

    (a, b), (again, _), (other, _), (stream, _) = noise(1), noise(1), noise(2), noise(1, 1)
    assert torch.equal(a, again)
    assert not torch.equal(a, b)
    assert not torch.equal(a, other)
    assert not torch.equal(a, stream)
    assert torch.equal(stream, noise(1, 1)[0])
    assert Key(1).fold(0) != Key(1).fold(1)


def test_saturated_weights_are_counted() -> None:
    p = nn.Parameter(torch.tensor([0.0, 15.0, -15.0, 3.0]))
    sampler = SGLD([p], lr=1.0, num_data=10**9, weights="fixed8.3", rounding="nearest")
    assert sampler.saturated() == 0
    p.grad = torch.tensor([0.0, -100.0, 100.0, 0.0])
    sampler.step()
    assert sampler.saturated() == 2
    assert p.tolist() == [0.0, 15.875, -16.0, 3.0]


# ---- as an optimizer of torch


def test_groups_override_any_setting() -> None:
    a, b, c = (nn.Parameter(torch.full((4,), 0.3)) for _ in range(3))
    groups: list[dict[str, Any]] = [
        {"params": [a]},
        {"params": [b], "weights": "fixed4.1", "lr": 0.0, "temperature": 0.0},
    ]
    sampler = SGLD(groups, lr=0.1, num_data=10, weights="fixed8.3", seed=1)
    sampler.add_param_group({"params": [c], "weights": None, "temperature": 0.0, "maximize": True})
    assert parse("fixed4.1").is_representable(b.detach()).all()
    for p in (a, b, c):
        p.grad = torch.ones(4)
    before = b.detach().clone()
    sampler.step()
    assert torch.equal(b, before)
    assert torch.allclose(c, torch.full((4,), 0.4))
    assert parse("fixed8.3").is_representable(a.detach()).all()


def test_schedulers_and_tensor_learning_rates() -> None:
    theta = nn.Parameter(torch.zeros(3))
    sampler = SGLD([theta], lr=0.5, num_data=10, temperature=0.0)
    schedule = torch.optim.lr_scheduler.StepLR(sampler, step_size=1, gamma=0.5)
    for _ in range(2):
        theta.grad = torch.ones(3)
        sampler.step()
        schedule.step()
    assert torch.equal(theta, torch.full((3,), -0.75))
    sampler.param_groups[0]["lr"] = torch.tensor(1.0)
    sampler.step()
    assert torch.equal(theta, torch.full((3,), -1.75))


def test_closures_are_called_with_gradients_on() -> None:
    model, x, y = problem()
    sampler = SGLD(model.parameters(), 0.1, 1000, weights="bfp8")
    before = values(model)
    loss = sampler.step(lambda: backward(model, x, y))  # type: ignore[arg-type, return-value]
    assert isinstance(loss, Tensor)
    assert any(not torch.equal(p, q) for p, q in zip(before, values(model), strict=True))


def test_frozen_missing_and_shared_parameters() -> None:
    shared = nn.Linear(4, 4, bias=False)
    last = nn.Linear(4, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared, last)
    last.bias.requires_grad_(False)
    sampler = SGLD(model.parameters(), 0.1, 100, weights="bfp8", weight_decay=0.1)
    frozen = last.bias.detach().clone()
    model(torch.randn(3, 4)).sum().backward()
    sampler.step()
    assert torch.equal(last.bias, frozen)
    assert sampler.state[shared.weight]["step"] == 1
    assert sampler.state[last.bias]["step"] == 0


@pytest.mark.parametrize("method", ["VC SGLDLP-L", "SGLDLP-F", "naive SGLDLP-L"])
def test_strides_do_not_matter(method: str) -> None:
    start = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    plain, transposed = nn.Parameter(start.clone()), nn.Parameter(start.T.contiguous().T)
    assert not transposed.is_contiguous()
    for p in (plain, transposed):
        sampler = SGLD([p], 0.1, 100, **METHODS[method])
        p.grad = torch.ones_like(p)
        sampler.step()
    assert torch.equal(plain, transposed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_dtypes_and_shapes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for settings in ({"weights": "fixed8.3"}, {}, {"weights": "fixed8.3", "accumulator": "fp32"}):
        p = nn.Parameter(torch.ones(shape, dtype=dtype))
        sampler = SGLD([p], 0.1, 2, **settings)  # type: ignore[arg-type]
        for _ in range(3):
            p.grad = torch.ones_like(p)
            sampler.step()
        assert p.dtype == dtype
        assert p.isfinite().all()
        assert (p != 1).any()


def test_autograd_notices_that_parameters_changed() -> None:
    p = nn.Parameter(torch.ones(3))
    sampler = SGLD([p], 0.1, 100, weights="bfp8")
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    sampler.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_step_is_an_operator_that_keeps_torchs_rules() -> None:
    theta, gradient = quantize(torch.randn(4, 3), "bfp8"), torch.randn(4, 3)
    text = StepSettings(0.1, 200, weights="bfp8").text
    arguments: tuple[Any, ...] = ([theta], [gradient], [], [0, 0, 1], text)
    torch.library.opcheck(sgld_op, arguments, test_utils=["test_schema", "test_faketensor"])
