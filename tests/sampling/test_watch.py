"""Warnings about chains that go wrong without an error: saturated weights, and drifts larger than the weights."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import SGHMC, SGLD, QLangevinWarning, pack
from qlangevin.sampling.watch import is_look

SATURATED = (
    r"288 of 288 weights of parameter '0.weight' are at an end of the range of fixed8.6, -2 to 1.98438, .* smaller lr"
)
TORN = r"a step moves the weights by .* times their norm: .* Is the loss a sum over the batch\?"


def digits() -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)), torch.rand(100, 36), torch.arange(100) % 3


def train(sampler: SGLD, model: nn.Module, x: Tensor, y: Tensor, steps: int, reduction: str = "mean") -> None:
    for _ in range(steps):
        sampler.zero_grad()
        nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
        sampler.step()


def test_looks_are_rare() -> None:
    assert [step for step in range(1, 100) if is_look(step)] == [1, 2, 4, 8, 16, 32, 64]
    assert sum(map(is_look, range(1, 100_001))) < 120


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_saturated_weights_are_said_once(packed: bool, in_backward: bool) -> None:
    model, *_ = digits()
    if packed:
        pack(model, "fixed8.6")
    weights = None if packed else "fixed8.6"
    sampler = SGLD(model.named_parameters(), lr=1e4, num_data=100, weights=weights, step_in_backward=in_backward)
    gradients = {p: torch.randn(p.shape) for p in model[0].parameters()}
    found: list[warnings.WarningMessage] = []
    for _ in range(5):
        sampler.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sum((p * g).sum() for p, g in gradients.items()).backward()
            sampler.step()
        found += [w for w in caught if "at an end" in str(w.message)]
    assert sampler.saturated() >= 288
    (warning,) = found
    assert warning.category is QLangevinWarning
    assert in_backward or warning.filename == __file__


def test_the_warning_names_parameter_share_format_and_remedy() -> None:
    model, *_ = digits()
    sampler = SGLD(model.named_parameters(), lr=0.1, num_data=100, weights="fixed8.6")
    with torch.no_grad():
        model[0].weight.fill_(-2.0)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = model[0].weight.clone()
    with pytest.raises(QLangevinWarning, match=SATURATED):
        sampler.step()
    assert torch.equal(model[0].weight, before)  # turned into an error, it comes before the step


@pytest.mark.parametrize("weights", ["fixed16.8", "bfp8", None])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_loss_summed_over_the_batch_is_noticed(weights: str | None, in_backward: bool, temperature: float) -> None:
    def start() -> tuple[SGLD, Any, Tensor, Tensor]:
        model, x, y = digits()
        settings: dict[str, Any] = {"weights": weights, "step_in_backward": in_backward, "temperature": temperature}
        return SGLD(model.named_parameters(), lr=0.5, num_data=10**5, **settings), model, x, y

    train(*start(), steps=20)  # the mean is fine
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(*start(), steps=8, reduction="sum")
    [torn] = [w for w in caught if re.search(TORN, str(w.message))]
    assert torn.category is QLangevinWarning


@pytest.mark.parametrize(
    "settings", [{"rounding": "nearest"}, {"temperature": 0.0, "rounding": "nearest"}, {}], ids=str
)
def test_weights_that_begin_at_zero_are_no_reason_to_warn(settings: dict[str, Any]) -> None:
    _, x, y = digits()
    for format in ("fixed8.3", "bfp8", None):
        model = nn.Linear(36, 3)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        train(SGLD(model.parameters(), 0.1, 100, weights=format, **settings), model, x, y, 20)


def test_a_first_step_without_gradients_is_said_once() -> None:
    model, x, y = digits()
    frozen = SGLD(model.requires_grad_(False).parameters(), 0.1, 100)
    with pytest.warns(QLangevinWarning, match=r"changes nothing: .*requires_grad=True") as caught:
        frozen.step()
    frozen.step()
    assert [w.filename for w in caught] == [__file__]
    model.requires_grad_(True)
    sampler = SGLD(model.parameters(), 0.1, 100)
    train(sampler, model, x, y, 1)
    sampler.zero_grad()
    sampler.step()  # others may step it alternately
    SGLD(model.parameters(), 0.1, 100, step_in_backward=True).step()  # ends a step that has not begun


def test_velocities_at_the_end_of_their_range_are_said_once() -> None:
    """A chain far from its mode at a low temperature: velocities of 2000 standard deviations, where fp8_e4m3 ends at 448."""

    def run(velocity: str) -> list[str]:
        p = nn.Parameter(torch.full((64,), 0.9))
        sampler = SGHMC([p], lr=0.5, num_data=50_000, temperature=1e-3, weights="fixed16.13", velocity=velocity)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(20):
                p.grad = 0.3 * p.detach()
                sampler.step()
        assert all(w.filename == __file__ for w in caught)
        return [str(w.message) for w in caught]

    (message,) = run("fp8_e4m3")
    assert "64 of 64 velocities of parameter 0 (shape (64,)) are at an end of the range of fp8_e4m3, 448" in message
    assert 'velocity="bf16"' in message
    assert run("bf16") == []


def test_accumulators_at_the_end_of_their_range_are_said() -> None:
    """Weights up to 15.9 over an accumulator that ends at 2: steps are clipped where the weights have no end."""
    p = nn.Parameter(torch.full((64,), 3.0))
    sampler = SGLD([p], lr=0.1, num_data=100, weights="fixed8.3", accumulator="fixed16.14")
    p.grad = torch.ones(64)
    with pytest.warns(
        QLangevinWarning, match=r"64 of 64 accumulators of .* range of fixed16.14, -2 to 1.99994, where updates"
    ):
        sampler.step()
