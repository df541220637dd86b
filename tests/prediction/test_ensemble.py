"""A model run with many sets of weights: one after the other, at once, chosen by itself; and left as it was."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import qlangevin as ql
from qlangevin import lowering
from qlangevin.experiments import models
from qlangevin.prediction import ensemble
from tests.helpers.networks import CASES, build

KINDS = ["plain", "packed", "bfp8", "bfp8/tensor", "fixed8.4", "fp8_e4m3", "packed bfp8"]
SINGLY = {"lstm", "transformer"}  # torch cannot vmap these
Fill = Callable[..., ql.SampleStore]


@pytest.fixture
def fill(tmp_path: Path) -> Fill:
    """A store of samples of a model: its weights moved at random, its buffers too."""

    def filled(model: nn.Module, count: int = 3, seed: int = 0, name: str = "run") -> ql.SampleStore:
        model = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        with ql.SampleStore.create(tmp_path / name, model) as store, torch.no_grad():
            for _ in range(count):
                for t in (*model.parameters(), *model.buffers()):
                    if t.is_floating_point():
                        step = 0.05 * torch.randn(t.shape, generator=generator)
                        t.copy_((t.decode() if isinstance(t, ql.QTensor) else t) + step.to(t.dtype))
                for name_, t in model.named_buffers():
                    if name_.endswith("running_var"):
                        t.abs_()
                store.append(model)
        return store

    return filled


def prepared(name: str, kind: str) -> tuple[nn.Module, Tensor]:
    model, x, _ = build(name)
    if "packed" in kind:
        ql.pack(model, "bfp8")
    if kind not in ("plain", "packed"):
        ql.lower(model, kind.removeprefix("packed "), "bfp8")
    return model, x


@torch.no_grad()
def by_hand(model: nn.Module, store: Any, x: Tensor) -> Tensor:
    """Load each sample into a copy of the model, and call it."""
    model = copy.deepcopy(model).eval()
    outputs = []
    for sample in store:
        sample.load_into(model)
        outputs.append(model(x))
    return torch.stack(outputs)


def opened(store: Any, model: nn.Module, vectorize: bool | None = None, **options: Any) -> ql.Posterior:
    return ql.Posterior.open(store, model, **{"link": "identity", **options}, vectorize=vectorize)


# ---- the same answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_the_ways_to_compute_agree(name: str, kind: str, fill: Fill, capfd: pytest.CaptureFixture[str]) -> None:
    """Singly: bit for bit what loading each sample gives. At once: within 1e-5, the order of float32 sums.

    A sum that differs in its last digit may be rounded to another number of an 8-bit grid; with these seeds none is.
    """
    model, x = prepared(name, kind)
    store = fill(model)
    hand = by_hand(model, store, x)
    assert float((hand[0] - hand[1]).abs().max()) > 0
    assert torch.equal(opened(store, model, False).samples(x), hand)
    average = torch.zeros_like(hand[0])
    for s, y in enumerate(hand.softmax(2)):
        average = average + (y - average) * (1 / (s + 1))
    assert torch.equal(opened(store, model, False, link="softmax").predict(x), average)
    torch.testing.assert_close(average, hand.softmax(2).mean(0), rtol=1e-6, atol=1e-7)
    automatic = opened(store, model)
    if name in SINGLY:
        assert torch.equal(automatic.samples(x), hand)
    else:
        torch.testing.assert_close(opened(store, model, True).samples(x), hand, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(automatic.samples(x), hand, rtol=1e-5, atol=1e-5)
    assert capfd.readouterr() == ("", "")


def test_stacks_and_inputs_too_large_for_one_go(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared("mlp", "plain")
    store = fill(model, 7)
    weights = sum(p.numel() for p in model.parameters())
    for stack, inputs in ((weights * 3, 1 << 26), (1 << 24, x.numel() * 2), (weights * 3, x.numel() * 2), (1, 1)):
        monkeypatch.setattr(ensemble, "STACK", stack)
        monkeypatch.setattr(ensemble, "STACKED_INPUT", inputs)
        found = opened(store, model, True).samples(x)
        torch.testing.assert_close(found, by_hand(model, store, x), rtol=1e-5, atol=1e-5)


def test_weights_are_stacked_once(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared("mlp", "packed")
    posterior = opened(fill(model), model, True)
    decoded: list[int] = []
    monkeypatch.setattr(ql.Sample, "decode", _noting(decoded, ql.Sample.decode))
    assert torch.equal(posterior.samples(x), posterior.samples(x))
    assert decoded == [0, 1, 2]


def _noting(noted: list[int], decode: Any) -> Any:
    def note(sample: ql.Sample, device: Any = None) -> Any:
        noted.append(sample.index)
        return decode(sample, device)

    return note


def test_weights_of_a_parametrization(fill: Fill) -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    x, store = torch.ones(2, 4), fill(model)
    hand = by_hand(model, store, x)
    assert torch.equal(opened(store, model, False).samples(x), hand)
    torch.testing.assert_close(opened(store, model).samples(x), hand)


# ---- which way


class WeightDependent(nn.Linear):
    """What it does depends on the value of a weight."""

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


def at_once(posterior: ql.Posterior, x: Any) -> bool:
    calls: list[int] = []
    run = posterior._ensemble._run

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return run(*args)

    posterior.predict(x)  # when it finds out
    posterior._ensemble._run = counted  # type: ignore[method-assign, assignment]
    posterior.predict(x)
    del posterior._ensemble._run
    assert len(calls) in (1, len(posterior))
    return len(calls) == 1


def test_small_models_at_once_and_large_or_recurrent_ones_singly(fill: Fill) -> None:
    model, x = prepared("mlp", "plain")
    assert at_once(opened(fill(model, name="mlp"), model), x)
    lstm, words = prepared("lstm", "plain")
    assert not at_once(opened(fill(lstm, name="lstm"), lstm), words)
    large = models.MLP(4000, 10, 2500)  # 10 million weights
    assert not at_once(opened(fill(large, 2, name="large"), large), torch.zeros(2, 4000))
    linear = nn.Linear(100, 100)
    posterior = opened(fill(linear, name="linear"), linear)
    assert at_once(posterior, torch.zeros(10, 100))
    assert not at_once(posterior, torch.zeros(20_000, 100))  # many examples are enough work for one sample
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    images(torch.zeros(1, 3, 16, 16))
    posterior = opened(fill(images, name="images"), images)
    assert at_once(posterior, torch.zeros(2, 3, 16, 16))
    assert not at_once(posterior, torch.zeros(64, 3, 16, 16))


@pytest.mark.parametrize("layer", [WeightDependent, WithHistogram])
def test_models_that_cannot_are_run_singly_without_a_word(
    layer: Any, fill: Fill, capfd: pytest.CaptureFixture[str]
) -> None:
    model, x = layer(4, 3), torch.linspace(-1, 1, 8).reshape(2, 4)
    store = fill(model)
    posterior = opened(store, model)
    assert not at_once(posterior, x)
    assert torch.equal(posterior.samples(x), by_hand(model, store, x))
    assert capfd.readouterr() == ("", "")


def test_a_random_forward_is_run_singly(fill: Fill) -> None:
    model, x = RandomInForward(4, 3), torch.ones(2, 4)
    store = fill(model)
    posterior = opened(store, model)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        found = posterior.samples(x)
        torch.manual_seed(3)
        assert torch.equal(found, by_hand(model, store, x))


class SometimesDependent(WeightDependent):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) > 2 else nn.Linear.forward(self, x)


class SometimesHistogram(WithHistogram):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if len(x) > 2 else nn.Linear.forward(self, x)


@pytest.mark.parametrize("layer", [SometimesDependent, SometimesHistogram])
def test_other_inputs_may_take_another_way_through_the_model(layer: Any, fill: Fill) -> None:
    """That the first batch could be run at once does not say that the next can."""
    model, x = layer(4, 3), torch.linspace(-1, 1, 20).reshape(5, 4)
    store = fill(model)
    posterior = opened(store, model)
    for some in (x[:2], x):
        torch.testing.assert_close(posterior.samples(some), by_hand(model, store, some))


def test_errors_of_the_model_are_its_own(fill: Fill) -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        opened(fill(model), model).predict(torch.ones(2, 5))


# ---- memory


@pytest.mark.parametrize("kind", ["packed", "packed bfp8"])
@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_one_decoded_sample_at_a_time(name: str, kind: str, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a sample is decoded, none before it is in memory any more."""
    model, x = prepared(name, kind)
    packed = [n for n, p in model.named_parameters() if isinstance(p, ql.QTensor)]
    monkeypatch.setattr(ensemble, "STACK", 1)  # which makes any model large
    posterior, decode = opened(fill(model, 5), model), ql.Sample.decode
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def recorded(sample: ql.Sample, device: Any = None) -> dict[str, Tensor]:
        alive.append(sum(ref() is not None for ref in seen))
        tensors = decode(sample, device)
        seen.extend(weakref.ref(tensors[n]) for n in packed)
        return tensors

    monkeypatch.setattr(ql.Sample, "decode", recorded)
    list(posterior.predict_loader([x, x, x]))
    assert len(seen) == 5 * len(packed)
    assert alive == [0] * 5


def test_a_sample_is_decoded_once_for_several_small_batches(fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared("lstm", "packed")
    posterior = opened(fill(model), model)
    decoded: list[int] = []
    monkeypatch.setattr(ql.Sample, "decode", _noting(decoded, ql.Sample.decode))
    assert len(list(posterior.predict_loader([x] * 10))) == 10
    assert decoded == [0, 1, 2]


# ---- the model is left as it was


def state(model: nn.Module) -> dict[str, Any]:
    """All that could be changed: which objects the tensors are, their numbers, their versions, and every mode."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    plain = {n: t.decode().detach() if isinstance(t, ql.QTensor) else t.detach() for n, t in named}
    return {
        "tensors": [(n, id(t), t.requires_grad, t._version, t.grad is None) for n, t in named],
        "numbers": {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in plain.items()},
        "modes": [(n, m.training) for n, m in model.named_modules()],
        "momenta": [m.momentum for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)],
        "attributes": [(n, sorted(m.__dict__)) for n, m in model.named_modules()],
        "counts": lowering.state_dict(model),
        "generator": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "grad": torch.is_grad_enabled(),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "packed bfp8"])
@pytest.mark.parametrize("name", CASES)
def test_the_model_is_untouched(name: str, kind: str, fill: Fill) -> None:
    model, x = prepared(name, kind)
    store = fill(model)
    model(x)  # counts, and moves averages
    for i, module in enumerate(model.modules()):
        module.training = i % 3 != 1
    next(model.parameters()).requires_grad_(False)
    before = state(model)
    for vectorize in (None, False):
        posterior = opened(store, model, vectorize, link="softmax")
        posterior.predict(x)
        posterior.uncertainty(x)
        posterior.samples(x)
        list(posterior.predict_loader([x, x]))
        assert state(model) == before
    reestimated = opened(store, model, link="softmax", batch_norm=[x, x])
    reestimated.predict(x)
    assert state(model) == before


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
    before = state(model)
    failing.left[0] = n
    posterior = opened(store, model, vectorize, batch_norm=[x, x] if batch_norm else "stored")
    for _ in range(7):  # at once, it is called less often
        with contextlib.suppress(Interrupted):
            posterior.predict(x)
        assert state(model) == before
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
    hand = by_hand(model, store, x)
    for training in (True, False):
        assert torch.equal(opened(store, model.train(training), False).samples(x), hand)
        torch.testing.assert_close(opened(store, model.train(training), True).samples(x), hand, rtol=1e-5, atol=1e-5)
    for t in (*model.parameters(), *model.buffers()):
        t.detach().fill_(7)
    assert torch.equal(opened(store, model, False).samples(x), hand)


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
    posterior = opened(store, model, vectorize)
    for _ in range(3):
        torch.testing.assert_close(posterior.samples(x), by_hand(model, list(ql.SampleStore.open(store.path)), x))


class Remembering(nn.Linear):
    """Keeps what it gave, as models do with their attention."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


def test_what_a_model_keeps_of_a_forward_can_be_used_afterwards(fill: Fill) -> None:
    model, x = Remembering(4, 3), torch.ones(2, 4)
    opened(fill(model), model).predict(x)
    if model.last is not None:
        model.last.tolist()
    copy.deepcopy(model)


def test_inference_mode_makes_no_difference(fill: Fill) -> None:
    model, x = prepared("resnet", "bfp8")
    store = fill(model)
    for vectorize in (False, True):
        posterior = opened(store, model, vectorize, batch_norm=[x])
        with torch.inference_mode():
            inside = posterior.samples(x)
        assert torch.equal(posterior.samples(x), inside)


# ---- batch normalization


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, 16, 16, generator=generator) * scale, torch.zeros(8)) for scale in (8, 8, 5)]


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_reestimated_statistics_are_those_of_update_bn(kind: str, vectorize: bool, fill: Fill) -> None:
    model, x = prepared("resnet", kind)
    store = fill(model)
    hand, stored = [], by_hand(model, store, x)
    for sample in store:
        other = copy.deepcopy(model)
        sample.load_into(other)
        update_bn(batches(), other)
        with torch.no_grad():
            hand.append(other.eval()(x))
    found = opened(store, model, vectorize, batch_norm=batches()).samples(x)
    torch.testing.assert_close(
        found, torch.stack(hand), rtol=0 if not vectorize else 1e-5, atol=0 if not vectorize else 1e-5
    )
    assert float((found - stored).abs().max()) > 0.01


def test_statistics_are_those_of_each_sample_and_computed_once(fill: Fill) -> None:
    model, x = prepared("resnet", "bfp8")
    model.train()
    passes = 0

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            nonlocal passes
            passes += 1
            return iter(batches())

    posterior = opened(fill(model), model, batch_norm=Loader())
    before = state(model)
    first = posterior.samples(x)
    assert passes == 3
    assert torch.equal(posterior.samples(x), first)
    list(posterior.predict_loader([x, x]))
    assert passes == 3
    assert state(model) == before
    assert torch.equal(opened(posterior.members, model, batch_norm=batches()).samples(x), first)
    means = [posterior._statistics[s]["norm.running_mean"] for s in posterior.members[:3]]
    assert not torch.equal(means[0], means[1])


def test_dropout_is_off_while_statistics_are_estimated(fill: Fill) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    store = fill(model)
    posterior = opened(store, model.train(), batch_norm=[data[:16], data[16:]])
    generator = torch.get_rng_state()
    posterior.predict(data)
    assert torch.equal(torch.get_rng_state(), generator)
    inner = nn.functional.linear(data, store[0]["0.weight"], store[0]["0.bias"])
    expected = torch.stack((inner[:16].mean(0), inner[16:].mean(0))).mean(0)
    torch.testing.assert_close(posterior._statistics[posterior.members[0]]["2.running_mean"], expected)


def test_a_model_that_is_a_batch_norm_itself(fill: Fill) -> None:
    model, data = nn.BatchNorm1d(3), torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    found = opened(fill(model), model, batch_norm=[data]).samples(data)
    assert found.shape == (3, 32, 3)


def test_statistics_from_a_generator_are_refused(fill: Fill) -> None:
    model, x = prepared("resnet", "plain")
    store = fill(model)
    loaders: list[Any] = [(batch for batch in batches()), []]
    for empty in loaders:
        with pytest.raises(ValueError, match="batch_norm must be a loader that gives batches each time"):
            opened(store, model, batch_norm=empty).predict(x)


def test_models_without_batch_norm_take_a_loader_too(fill: Fill) -> None:
    for name in ("mlp", "lstm"):
        model, x = prepared(name, "bfp8")
        store = fill(model, name=name)
        assert torch.equal(opened(store, model, False, batch_norm=[x]).samples(x), by_hand(model, store, x))


def test_batch_norm_without_statistics_is_left_alone(fill: Fill) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 3))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    store = fill(model)
    assert torch.equal(opened(store, model, False, batch_norm=[x]).samples(x), by_hand(model, store, x))
