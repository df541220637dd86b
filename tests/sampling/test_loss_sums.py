"""A loss that is a sum over the batch is warned of in the first backward pass of any loop; a mean never is.

The warning is read from autograd's graph, so nothing here is left to chance.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qlangevin as ql

Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]
SUMS: dict[str, Loss] = {
    "cross_entropy": lambda m, x, y, t: F.cross_entropy(m(x), y, reduction="sum"),
    "unreduced": lambda m, x, y, t: F.cross_entropy(m(x), y, reduction="none").sum(),
    "nll_loss": lambda m, x, y, t: F.nll_loss(m(x).log_softmax(1), y, reduction="sum"),
    "pixels": lambda m, x, y, t: F.cross_entropy(m(x).view(2, 3, 2, 2), y.view(2, 2, 2), reduction="sum"),
    "texts": lambda m, x, y, t: F.cross_entropy(m(x.view(2, 4, 4)).float().view(-1, 3), y, reduction="sum"),
    "mse_loss": lambda m, x, y, t: F.mse_loss(m(x), t, reduction="sum"),
    "huber_loss": lambda m, x, y, t: F.huber_loss(m(x), t, reduction="sum"),
    "squares": lambda m, x, y, t: ((m(x) - t) ** 2).sum(),
    "one output": lambda m, x, y, t: F.binary_cross_entropy_with_logits(m(x)[:, :1].squeeze(1), y / 2, reduction="sum"),
    "penalty": lambda m, x, y, t: F.mse_loss(m(x), t, reduction="sum") + 0.1 * squares(m),
}
OTHERS: dict[str, Loss] = {
    "mean": lambda m, x, y, t: F.cross_entropy(m(x), y),
    "divided": lambda m, x, y, t: F.cross_entropy(m(x), y, reduction="sum") / len(x),
    "multiplied": lambda m, x, y, t: F.mse_loss(m(x), t, reduction="sum") * (1 / len(x)),
    "weighted": lambda m, x, y, t: (F.cross_entropy(m(x), y, reduction="none") * torch.full((8,), 1 / 8)).sum(),
    "outputs summed": lambda m, x, y, t: ((m(x) - t) ** 2).sum(1).mean(),
    "examples averaged": lambda m, x, y, t: ((m(x) - t) ** 2).mean(0).sum(),
    "penalty": lambda m, x, y, t: F.cross_entropy(m(x), y) + squares(m),
    "distance": lambda m, x, y, t: F.cross_entropy(m(x), y) + sum(((p - 1) ** 2).sum() for p in m.parameters()),
    "distance by mse_loss": lambda m, x, y, t: (
        F.cross_entropy(m(x), y) + sum(F.mse_loss(p, torch.zeros_like(p), reduction="sum") for p in m.parameters())
    ),
    "one example": lambda m, x, y, t: F.cross_entropy(m(x[:1]), y[:1], reduction="sum"),
    "without a batch": lambda m, x, y, t: F.mse_loss(m(x[0]), t[0], reduction="sum"),
    "one text": lambda m, x, y, t: F.cross_entropy(m(x[None]).view(-1, 3), y, reduction="sum"),
    "row of a batch": lambda m, x, y, t: F.cross_entropy(m(x[None])[0], y, reduction="sum"),
}


def squares(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def network(eight_bits: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return ql.pack(ql.lower(model, "bfp8", "bfp8"), "bfp8") if eight_bits else model


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.arange(8) % 3, torch.randn(8, 3, generator=generator)


def sampler_of(model: nn.Module, **settings: Any) -> ql.SGLD:
    return ql.SGLD(model.parameters(), **{"lr": 1e-4, "num_data": 1000, **settings})


def train(sampler: ql.SGLD, loss: Callable[[], Tensor], steps: int = 2) -> list[warnings.WarningMessage]:
    """Take some steps; return the warnings of sums."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            sampler.zero_grad()
            loss().backward()
            sampler.step()
    return [w for w in caught if "is a sum over" in str(w.message)]


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_warned_of_once_and_at_the_call_of_backward(name: str, eight_bits: bool) -> None:
    model = network(eight_bits)
    [warning] = train(sampler_of(model, step_in_backward=eight_bits), lambda: SUMS[name](model, *batch()))
    assert warning.category is ql.QLangevinWarning
    assert warning.filename == __file__
    terms = 2 if name in ("pixels", "texts") else 8
    assert f"sum over {terms} examples or more" in str(warning.message)
    assert "reduction='mean'" in str(warning.message)


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_what_may_be_a_mean_is_not(name: str, eight_bits: bool) -> None:
    model = network(eight_bits)
    assert train(sampler_of(model, step_in_backward=eight_bits), lambda: OTHERS[name](model, *batch())) == []


@pytest.mark.parametrize("settings", [{"num_data": 1}, {"num_data": 7}, {"temperature": 0.0}], ids=str)
def test_sums_that_are_right(settings: dict[str, Any]) -> None:
    """With num_data=1 the loss is all of U; at temperature 0 nothing is sampled."""
    model = network()
    assert train(sampler_of(model, **settings), lambda: SUMS["mse_loss"](model, *batch())) == []


def test_gradients_given_to_backward_are_not_judged() -> None:
    model = network()
    sampler_of(model)
    SUMS["mse_loss"](model, *batch()).backward(torch.tensor(1 / 8))


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_loss_is_found_behind_checkpointed_regions(reentrant: bool) -> None:
    model, (x, y, _) = network(), batch()
    x.requires_grad_()

    def loss(reduction: str) -> Tensor:
        return F.cross_entropy(checkpoint(model, x, use_reentrant=reentrant), y, reduction=reduction)

    assert len(train(sampler_of(model), lambda: loss("sum"))) == 1
    assert train(sampler_of(model), lambda: loss("mean")) == []


def test_a_closure_is_a_loop_like_any_other() -> None:
    model = network()
    sampler = sampler_of(model)

    def closure() -> float:
        loss = SUMS["mse_loss"](model, *batch())
        loss.backward()
        return float(loss.detach())

    with pytest.warns(ql.QLangevinWarning, match="sum over 8"):
        sampler.step(closure)


def test_two_backward_passes_at_a_time_are_not_judged() -> None:
    """Threads of GPUs call hooks, so nobody knows whose loss it is."""
    model, other, inside, go_on = network(), torch.ones(1, requires_grad=True), threading.Event(), threading.Event()

    def wait(_: Tensor) -> None:
        inside.set()
        go_on.wait(60)

    other.register_post_accumulate_grad_hook(wait)
    thread = threading.Thread(target=lambda: other.sum().backward())
    thread.start()
    assert inside.wait(60)
    sampler = sampler_of(model)
    SUMS["mse_loss"](model, *batch()).backward()
    go_on.set()
    thread.join()
    assert sampler.warned == set()


def test_hooks_go_with_the_first_pass_or_with_the_sampler() -> None:
    model = network()
    sampler = sampler_of(model)
    OTHERS["mean"](model, *batch()).backward()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    del sampler
    sampler = sampler_of(model)
    del sampler
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_models_and_samplers_are_copied_with_hooks() -> None:
    model = network()
    sampler = sampler_of(model)
    copies = copy.deepcopy((model, sampler)), pickle.loads(pickle.dumps((model, sampler)))
    for each, _ in copies:
        OTHERS["mean"](each, *batch()).backward()
    assert len(train(sampler, lambda: SUMS["mse_loss"](model, *batch()))) == 1
