"""Steps inside of torch.compile: one operator, no graph break, no new graph for each step, and the bits of eager ones."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._dynamo.variables.constant import CONSTANT_VARIABLE_NONE

from qlangevin import SGLD, lower, pack
from tests.helpers.deferred_kernels import deferred_kernels
from tests.sampling.test_deferred import bits, gradients, run, same, steps_of

KINDS = [(packed, accumulator) for packed in (False, True) for accumulator in (None, "fp32")]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    if not torch._dynamo.eval_frame.is_dynamo_supported():
        pytest.skip("no torch.compile here")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    # Torch 2.13 notes where it has read a gradient that is None in the None that all its graphs share, and reset() leaves it.
    CONSTANT_VARIABLE_NONE.source = None


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend)


def chain(packed: bool, accumulator: str | None, lowered: bool = False, **settings: Any) -> tuple[Any, SGLD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))
    if packed:
        pack(model, "bfp8")
    if lowered:
        lower(model, "bfp8", "bfp8")
    weights = None if packed else "bfp8"
    return model, SGLD(model.named_parameters(), 0.1, 1000, weights=weights, accumulator=accumulator, **settings)


@pytest.mark.parametrize(("packed", "accumulator"), KINDS)
@pytest.mark.parametrize("deferred", [False, True])
def test_a_compiled_step_is_one_graph_with_the_bits_of_an_eager_one(
    packed: bool, accumulator: str | None, deferred: bool
) -> None:
    one, two = chain(packed, accumulator), chain(packed, accumulator)
    with deferred_kernels() if deferred else nullcontext():
        step = compiled(two[1].step)
        for number in range(4):
            for _, sampler in (one, two):
                sampler.param_groups[0]["lr"] = 0.1 / (1 + number)  # a schedule
            run(one, range(number, number + 1))
            gradients(two[0], number)
            step()
        assert counters["stats"]["unique_graphs"] == 1
        assert same(bits(one), bits(two))
        assert steps_of(two[1]) == [4] * 4


def training_step(model: Any, sampler: SGLD) -> Callable[[Tensor, Tensor], Tensor]:
    def train(x: Tensor, y: Tensor) -> Tensor:
        sampler.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        sampler.step()
        return loss.detach()

    return train


@pytest.mark.parametrize(("packed", "accumulator"), KINDS)
@pytest.mark.parametrize("lowered", [False, True])
def test_a_whole_training_step_is_one_graph(packed: bool, accumulator: str | None, lowered: bool) -> None:
    one, two = chain(packed, accumulator, lowered), chain(packed, accumulator, lowered)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    with torch._dynamo.config.patch(trace_autograd_ops=True):  # or torch does not trace backward()
        eager, train = training_step(*one), compiled(training_step(*two))
        for _ in range(3):
            assert torch.equal(eager(x, y), train(x, y))
    assert counters["stats"]["unique_graphs"] == 1
    assert same(bits(one), bits(two))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler about torch
def test_inductor_steps_on_the_same_bits() -> None:
    for packed, accumulator in ((False, None), (True, "fp32")):
        one, two = chain(packed, accumulator), chain(packed, accumulator)
        step = compiled(two[1].step, "inductor")
        for number in range(3):
            run(one, range(number, number + 1))
            gradients(two[0], number)
            step()
        assert same(bits(one), bits(two))


def test_a_loaded_state_needs_no_new_graph() -> None:
    one, two = chain(False, "fp32"), chain(False, "fp32")
    step = compiled(two[1].step)
    for number in range(3):
        run(one, range(number, number + 1))
        gradients(two[0], number)
        step()
        two[1].load_state_dict(two[1].state_dict())
    assert counters["stats"]["unique_graphs"] == 1
    assert same(bits(one), bits(two))


@pytest.mark.parametrize("deferred", [False, True])
def test_weights_written_between_compiled_steps_are_not_undone(deferred: bool) -> None:
    one, two = chain(False, "fp32"), chain(False, "fp32")
    with deferred_kernels() if deferred else nullcontext():
        for (model, _), step in ((one, one[1].step), (two, compiled(two[1].step))):
            for number in range(4):
                if number == 2:
                    with torch.no_grad():
                        model[0].weight.fill_(0.7)
                gradients(model, number)
                step()
    assert same(bits(one), bits(two))


def test_a_gradient_that_is_not_finite_raises() -> None:
    model, sampler = chain(False, None)
    step = compiled(sampler.step)
    gradients(model, 0)
    step()
    kept = bits((model, sampler))
    gradients(model, 1)
    model[2].bias.grad[1] = torch.nan
    with pytest.raises(FloatingPointError, match=r"the gradient of parameter '2.bias' holds an infinity or a NaN"):
        step()
    assert same(bits((model, sampler)), kept)
    assert steps_of(sampler) == [1] * 4


def test_gradients_can_be_zeroed_in_place() -> None:
    model, sampler = chain(False, None)
    gradients(model, 0)
    grad = model[0].weight.grad
    compiled(lambda: sampler.zero_grad(set_to_none=False))()
    assert model[0].weight.grad is grad
    assert not grad.any()


def test_a_sampler_that_steps_in_backward_says_that_it_cannot_be_compiled() -> None:
    model, sampler = chain(False, None, step_in_backward=True)
    gradients(model, 0)
    with pytest.raises(RuntimeError, match=r"step_in_backward=True cannot step inside of torch.compile"):
        compiled(sampler.step)()
