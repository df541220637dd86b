"""A model is left as it was, whatever happens while it is evaluated."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from tests.helpers.networks import CASES
from tests.helpers.posteriors import (
    Fill,
    build_case,
    evaluate_by_hand,
    model_state,
    open_posterior,
)


@pytest.mark.parametrize("kind", ["plain", "packed bfp8"])
@pytest.mark.parametrize("name", CASES)
def test_the_model_is_untouched(name: str, kind: str, fill: Fill) -> None:
    model, x = build_case(name, kind)
    store = fill(model)
    model(x)  # counts, and moves averages
    for i, module in enumerate(model.modules()):
        module.training = i % 3 != 1
    next(model.parameters()).requires_grad_(False)
    before = model_state(model)
    for vectorize in (None, False):
        posterior = open_posterior(store, model, vectorize, link="softmax")
        posterior.predict(x)
        posterior.uncertainty(x)
        posterior.samples(x)
        list(posterior.predict_loader([x, x]))
        assert model_state(model) == before
    reestimated = open_posterior(store, model, link="softmax", batch_norm=[x, x])
    reestimated.predict(x)
    assert model_state(model) == before


class Interrupted(Exception):
    pass


class Failing(nn.Module):
    """Raises the n-th time it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.left = [0]  # a list, which lasts whatever happens to attributes

    def forward(self, x: Tensor) -> Tensor:
        self.left[0] -= 1
        if self.left[0] == 0:
            raise Interrupted
        return x


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("vectorize", [None, False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_model_is_untouched_when_forward_raises(
    n: int, vectorize: bool | None, batch_norm: bool, fill: Fill
) -> None:
    failing = Failing()
    inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), failing, nn.Dropout(), nn.Linear(6, 3))
    model, x = ql.lower(inner, "bfp8", "bfp8"), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    store = fill(model, 6)
    model(x)
    model[1].eval()
    before = model_state(model)
    failing.left[0] = n
    posterior = open_posterior(store, model, vectorize, batch_norm=[x, x] if batch_norm else "stored")
    for _ in range(7):  # at once, it is called less often
        with contextlib.suppress(Interrupted):
            posterior.predict(x)
        assert model_state(model) == before
    assert failing.left[0] < 0


def test_a_wrong_link_leaves_the_model_as_it_was(fill: Fill) -> None:
    model = nn.Linear(4, 1).train()
    for vectorize in (False, True):
        posterior = ql.Posterior.open(fill(model, name=f"{vectorize}"), model, vectorize=vectorize)
        for use in (posterior.predict, posterior.samples):
            with pytest.raises(ValueError, match="two classes or more"):
                use(torch.ones(2, 4))
            assert model.training
            assert torch.is_grad_enabled()


def test_predictions_do_not_depend_on_the_mode_or_the_weights_of_the_model(fill: Fill) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))
    ql.lower(model, "bfp8", "bfp8")
    store, x = fill(model), torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    hand = evaluate_by_hand(model, store, x)
    for training in (True, False):
        assert torch.equal(open_posterior(store, model.train(training), False).samples(x), hand)
        torch.testing.assert_close(
            open_posterior(store, model.train(training), True).samples(x), hand, rtol=1e-5, atol=1e-5
        )
    for t in (*model.parameters(), *model.buffers()):
        t.detach().fill_(7)
    assert torch.equal(open_posterior(store, model, False).samples(x), hand)


class Counting(nn.Linear):
    """Writes to a buffer whenever it is called."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x) * self.calls


@pytest.mark.parametrize("vectorize", [None, False, True])
def test_what_a_model_writes_into_a_buffer_does_not_change_the_samples(vectorize: bool | None, fill: Fill) -> None:
    model, x = Counting(), torch.ones(2, 4)
    store = fill(model)
    posterior = open_posterior(store, model, vectorize)
    for _ in range(3):
        torch.testing.assert_close(
            posterior.samples(x), evaluate_by_hand(model, list(ql.SampleStore.open(store.path)), x)
        )


class Remembering(nn.Linear):
    """Keeps what it gave, as models do with their attention."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


def test_what_a_model_keeps_of_a_forward_can_be_used_afterwards(fill: Fill) -> None:
    model, x = Remembering(4, 3), torch.ones(2, 4)
    open_posterior(fill(model), model).predict(x)
    if model.last is not None:
        model.last.tolist()
    copy.deepcopy(model)


def test_inference_mode_makes_no_difference(fill: Fill) -> None:
    model, x = build_case("resnet", "bfp8")
    store = fill(model)
    for vectorize in (False, True):
        posterior = open_posterior(store, model, vectorize, batch_norm=[x])
        with torch.inference_mode():
            inside = posterior.samples(x)
        assert torch.equal(posterior.samples(x), inside)
