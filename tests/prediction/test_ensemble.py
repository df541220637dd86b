"""A model evaluated with many sets of weights: one after the other, vectorized, and as chosen by its size."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.experiments import models
from qlangevin.prediction import ensemble
from qlangevin.prediction.weights import Weights
from tests.helpers.networks import CASES
from tests.helpers.posteriors import (
    Fill,
    build_case,
    evaluate_by_hand,
    open_posterior,
)

KINDS = ["plain", "packed", "bfp8", "bfp8/tensor", "fixed8.4", "fp8_e4m3", "packed bfp8"]
SINGLY = {"lstm", "transformer"}  # torch cannot vmap these


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_the_ways_to_compute_agree(name: str, kind: str, fill: Fill, capfd: pytest.CaptureFixture[str]) -> None:
    """Singly: bit for bit what loading each sample gives. At once: within 1e-5, the order of float32 sums.

    A sum that differs in its last digit may be rounded to another number of an 8-bit grid; with these seeds none is.
    """
    model, x = build_case(name, kind)
    store = fill(model)
    hand = evaluate_by_hand(model, store, x)
    assert float((hand[0] - hand[1]).abs().max()) > 0
    assert torch.equal(open_posterior(store, model, False).samples(x), hand)
    average = torch.zeros_like(hand[0])
    for s, y in enumerate(hand.softmax(2)):
        average = average + (y - average) * (1 / (s + 1))
    assert torch.equal(open_posterior(store, model, False, link="softmax").predict(x), average)
    torch.testing.assert_close(average, hand.softmax(2).mean(0), rtol=1e-6, atol=1e-7)
    automatic = open_posterior(store, model)
    if name in SINGLY:
        assert torch.equal(automatic.samples(x), hand)
    else:
        torch.testing.assert_close(open_posterior(store, model, True).samples(x), hand, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(automatic.samples(x), hand, rtol=1e-5, atol=1e-5)
    assert capfd.readouterr() == ("", "")


def test_stacks_and_inputs_too_large_for_one_go(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build_case("mlp", "plain")
    store = fill(model, 7)
    weights = sum(p.numel() for p in model.parameters())
    for stack, inputs in ((weights * 3, 1 << 26), (1 << 24, x.numel() * 2), (weights * 3, x.numel() * 2), (1, 1)):
        monkeypatch.setattr(ensemble, "MAX_STACK", stack)
        monkeypatch.setattr(ensemble, "MAX_STACKED_INPUT", inputs)
        found = open_posterior(store, model, True).samples(x)
        torch.testing.assert_close(found, evaluate_by_hand(model, store, x), rtol=1e-5, atol=1e-5)


def test_weights_are_stacked_once(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build_case("mlp", "packed")
    posterior = open_posterior(fill(model), model, True)
    decoded: list[int] = []
    monkeypatch.setattr(Weights, "decode", _noting(decoded, Weights.decode))
    assert torch.equal(posterior.samples(x), posterior.samples(x))
    assert decoded == [0, 1, 2]


def _noting(noted: list[int], decode: Any) -> Any:
    def note(weights: Weights, sample: ql.Sample) -> Any:
        noted.append(sample.index)
        return decode(weights, sample)

    return note


def test_weights_of_a_parametrization(fill: Fill) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    x, store = torch.ones(2, 4), fill(model)
    hand = evaluate_by_hand(model, store, x)
    assert torch.equal(open_posterior(store, model, False).samples(x), hand)
    torch.testing.assert_close(open_posterior(store, model).samples(x), hand)


# ---- which way


class WeightDependent(nn.Linear):
    """A layer whose control flow depends on the value of a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(self.bias[0].detach()) > 0 else -x)


class RandomInForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(())


class WithHistogram(nn.Linear):
    """torch has no batched form of a histogram; it would run them singly, and warn."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.histc(y, bins=3)


def is_vectorized(posterior: ql.Posterior, x: Any) -> bool:
    """Return True if the model is called once for all samples, False if once for each."""
    calls: list[int] = []
    posterior.predict(x)  # the first time a model may turn out not to be vectorizable
    hook = posterior.model.register_forward_pre_hook(lambda *_: calls.append(1))
    posterior.predict(x)
    hook.remove()
    assert len(calls) in (1, len(posterior))
    return len(calls) == 1


def test_small_models_at_once_and_large_or_recurrent_ones_singly(fill: Fill) -> None:
    model, x = build_case("mlp", "plain")
    assert is_vectorized(open_posterior(fill(model, name="mlp"), model), x)
    lstm, words = build_case("lstm", "plain")
    assert not is_vectorized(open_posterior(fill(lstm, name="lstm"), lstm), words)
    large = models.MLP(4000, 10, 2500)  # 10 million weights
    assert not is_vectorized(open_posterior(fill(large, 2, name="large"), large), torch.zeros(2, 4000))
    linear = nn.Linear(100, 100)
    posterior = open_posterior(fill(linear, name="linear"), linear)
    assert is_vectorized(posterior, torch.zeros(10, 100))
    assert not is_vectorized(posterior, torch.zeros(20_000, 100))  # many examples are enough work for one sample
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    images(torch.zeros(1, 3, 16, 16))
    posterior = open_posterior(fill(images, name="images"), images)
    assert is_vectorized(posterior, torch.zeros(2, 3, 16, 16))
    assert not is_vectorized(posterior, torch.zeros(64, 3, 16, 16))


@pytest.mark.parametrize("layer", [WeightDependent, WithHistogram])
def test_models_that_cannot_are_run_singly_without_a_word(
    layer: Any, fill: Fill, capfd: pytest.CaptureFixture[str]
) -> None:
    model, x = layer(4, 3), torch.linspace(-1, 1, 8).reshape(2, 4)
    store = fill(model)
    posterior = open_posterior(store, model)
    assert not is_vectorized(posterior, x)
    assert torch.equal(posterior.samples(x), evaluate_by_hand(model, store, x))
    assert capfd.readouterr() == ("", "")


class OutOfMemory(nn.Linear):
    """Runs out of memory for more than two examples, if these come with many samples at once."""

    error: Exception = MemoryError()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if len(x) > 2 and torch._C._functorch.is_batchedtensor(y):
            raise self.error
        return y


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_memory_that_does_not_suffice_is_said_once_and_smaller_inputs_are_still_run_at_once(
    error: Exception, fill: Fill
) -> None:
    model = OutOfMemory(4, 3)
    model.error = error
    posterior = open_posterior(fill(model), model)
    few, many = torch.ones(2, 4), torch.ones(3, 4)
    with pytest.warns(ql.QLangevinWarning, match=r"memory did not suffice .* inputs of 12 numbers") as caught:
        found = posterior.predict(many)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    torch.testing.assert_close(found[:2], posterior.predict(few))
    assert is_vectorized(posterior, few)
    assert not is_vectorized(posterior, many)  # and not a second word
    with pytest.raises(type(error)):
        open_posterior(fill(model, name="forced"), model, vectorize=True).predict(many)


def test_inputs_that_do_not_fit_the_model_do_not_turn_vectorizing_off(fill: Fill) -> None:
    model = nn.Linear(4, 3)
    posterior = open_posterior(fill(model), model)
    with pytest.raises(RuntimeError):
        posterior.predict(torch.ones(2, 5))
    assert is_vectorized(posterior, torch.ones(2, 4))


def test_a_random_forward_is_run_singly(fill: Fill) -> None:
    model, x = RandomInForward(4, 3), torch.ones(2, 4)
    store = fill(model)
    posterior = open_posterior(store, model)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = posterior.samples(x)
        torch.manual_seed(3)
        assert torch.equal(found, evaluate_by_hand(model, store, x))


class SometimesDependent(WeightDependent):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) > 2 else nn.Linear.forward(self, x)


class SometimesHistogram(WithHistogram):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) > 2 else nn.Linear.forward(self, x)


@pytest.mark.parametrize("layer", [SometimesDependent, SometimesHistogram])
def test_other_inputs_may_take_another_way_through_the_model(layer: Any, fill: Fill) -> None:
    """A later batch may not be vectorizable although the first was."""
    model, x = layer(4, 3), torch.linspace(-1, 1, 20).reshape(5, 4)
    store = fill(model)
    posterior = open_posterior(store, model)
    for some in (x[:2], x):
        torch.testing.assert_close(posterior.samples(some), evaluate_by_hand(model, store, some))


def test_errors_of_the_model_are_its_own(fill: Fill) -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        open_posterior(fill(model), model).predict(torch.ones(2, 5))


# ---- memory


@pytest.mark.parametrize("kind", ["packed", "packed bfp8"])
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_one_decoded_sample_at_a_time(name: str, kind: str, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a sample is decoded, none before it is in memory any more."""
    model, x = build_case(name, kind)
    packed = [n for n, p in model.named_parameters() if isinstance(p, ql.QTensor)]
    monkeypatch.setattr(ensemble, "MAX_STACK", 1)  # which makes any model large
    posterior, decode = open_posterior(fill(model, 5), model), Weights.decode
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def recorded(weights: Weights, sample: ql.Sample) -> dict[str, Tensor]:
        alive.append(sum(ref() is not None for ref in seen))
        tensors = decode(weights, sample)
        seen.extend(weakref.ref(tensors[n]) for n in packed)
        return tensors

    monkeypatch.setattr(Weights, "decode", recorded)
    list(posterior.predict_loader([x, x, x]))
    assert len(seen) == 5 * len(packed)
    assert alive == [0] * 5


def test_a_sample_is_decoded_once_for_several_small_batches(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build_case("lstm", "packed")
    posterior = open_posterior(fill(model), model)
    decoded: list[int] = []
    monkeypatch.setattr(Weights, "decode", _noting(decoded, Weights.decode))
    assert len(list(posterior.predict_loader([x] * 10))) == 10
    assert decoded == [0, 1, 2]
