"""Posteriors: what is opened and what is refused, and the averages of their predictions."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import diagnostics, metrics
from tests.helpers.posteriors import (
    LABELS,
    X,
    append_draws,
    predict_alike,
    small_model,
    store_draws,
)

Posterior = ql.Posterior


def test_a_path_a_store_or_its_samples(store: ql.SampleStore) -> None:
    model = small_model()
    first = Posterior.open(store, model)
    assert len(first) == 6
    assert predict_alike(Posterior.open(store.path, model), first)
    assert predict_alike(Posterior.open(str(store.path), model), first)
    assert predict_alike(Posterior.open(list(store), model), first)
    assert predict_alike(Posterior.open(store[:], model), first)
    assert predict_alike(Posterior.open([store], model), first)
    assert predict_alike(Posterior.open((store.path,), model), first)
    assert predict_alike(Posterior.open([store[:3], store[3:]], model), first)
    assert repr(first) == "Posterior(Sequential, 6 samples of one chain, softmax)"


def test_a_slice_is_a_posterior_over_those_samples(store: ql.SampleStore) -> None:
    model = small_model()
    whole = Posterior.open(store, model, link="sigmoid", vectorize=False)
    for some in (slice(5, None), slice(None, None, 2), slice(-2, None), slice(1, 4), slice(None, None, -1)):
        cut = whole[some]
        assert predict_alike(cut, Posterior.open(store[some], model, link="sigmoid", vectorize=False))
        assert torch.equal(cut.samples(X), whole.samples(X)[range(6)[some]])
        assert cut.link == "sigmoid"
    with pytest.raises(ValueError, match="no sample would be left"):
        whole[6:]
    with pytest.raises(TypeError, match=r"cut by slices, such as posterior\[10:\], got 2"):
        whole[2]  # type: ignore[index]


def test_several_stores_are_averaged_as_one(tmp_path: Path) -> None:
    a, b = store_draws(tmp_path / "a"), store_draws(tmp_path / "b", 4, seed=1)
    model = small_model()
    stores: list[Any] = [a, b.path]
    both = Posterior.open(stores, model)
    assert len(both) == 10
    assert predict_alike(both, Posterior.open([*a, *b], model))
    means = [Posterior.open(one, model).predict(X) for one in (a, b)]
    torch.testing.assert_close(both.predict(X), (6 * means[0] + 4 * means[1]) / 10)


def test_chains_of_different_formats_are_averaged(tmp_path: Path) -> None:
    packed, plain = ql.pack(small_model(), "bfp8"), small_model()
    a, b = store_draws(tmp_path / "a", model=packed), store_draws(tmp_path / "b", model=plain)
    for model in (packed, plain):
        both = Posterior.open([a, b], model)
        torch.testing.assert_close(both.samples(X), torch.cat([chain.samples(X) for chain in both.chains]))


def test_chains_and_slices_of_each(two: Posterior) -> None:
    assert [len(chain) for chain in two.chains] == [6, 4]
    assert torch.equal(torch.cat([chain.samples(X) for chain in two.chains]), two.samples(X))
    cut = two[1::2]
    assert [len(chain) for chain in cut.chains] == [3, 2]
    assert torch.equal(cut.samples(X), two.samples(X)[[1, 3, 5, 7, 9]])
    assert [sample.index for sample in two[-1:].members] == [5, 3]


def test_a_slice_that_leaves_a_chain_without_samples(two: Posterior) -> None:
    """It is refused, or that chain is gone: what it gives can be used either way."""
    try:
        cut = two[5:]
    except ValueError:
        return
    assert [len(chain) for chain in cut.chains] == [1]
    assert diagnostics.predictions(cut, X).shape == (1, 1, 23, 3)


def test_a_generator_of_stores_loses_none(tmp_path: Path) -> None:
    for i in range(3):
        store_draws(tmp_path / f"chain{i}", 2, seed=i)
    for stores in (sorted(tmp_path.glob("chain*")), (tmp_path / f"chain{i}" for i in range(3))):
        assert len(Posterior.open(stores, small_model())) == 6


def test_a_posterior_keeps_its_samples_while_the_store_grows(tmp_path: Path) -> None:
    model = small_model()
    with ql.SampleStore.create(tmp_path / "run", model) as writer:
        append_draws(writer, model, 3, 0)
        reader = ql.SampleStore.open(tmp_path / "run")
        early = Posterior.open(reader, model)
        of_writer = Posterior.open(writer, model)
        append_draws(writer, model, 2, 1)
        assert len(reader) == 5
        assert len(early) == len(of_writer) == 3
        late = Posterior.open(reader, model)
        assert torch.equal(early.samples(X), late[:3].samples(X))
        assert torch.equal(early.samples(X), of_writer.samples(X))
        assert len(late) == 5


def test_a_wrapped_model_is_the_model_in_it(store: ql.SampleStore) -> None:
    model = small_model()
    assert predict_alike(Posterior.open(store, nn.DataParallel(model)), Posterior.open(store, model))


# ---- messages


def test_stores_without_samples_are_refused(tmp_path: Path, store: ql.SampleStore) -> None:
    empty = store_draws(tmp_path / "empty", 0)
    for stores in (empty, empty.path, [], [store, empty], store[6:]):
        with pytest.raises(ValueError, match="a posterior needs samples"):
            Posterior.open(stores, small_model())
    with pytest.raises(FileNotFoundError, match=r"there is no store in .*nowhere"):
        Posterior.open(tmp_path / "nowhere", small_model())


def test_another_model_is_refused_and_the_message_names_the_tensors(tmp_path: Path, store: ql.SampleStore) -> None:
    with pytest.raises(ValueError, match=r"of another model: '2.weight' is .*\[3, 8\] there and .*\[5, 8\] in the mod"):
        Posterior.open(store, small_model(5))
    with pytest.raises(ValueError, match=r"'0.weight' is missing in the model.*'weight' is in the model only"):
        Posterior.open(store, nn.Linear(4, 8))
    with pytest.raises(ValueError, match=r"float32.* there and .*float64"):
        Posterior.open(store, small_model().double())
    other = store_draws(tmp_path / "other", model=small_model(5))
    with pytest.raises(ValueError, match=r"other is of another model: '2.weight'"):
        Posterior.open([store, other], small_model())


def test_samples_of_another_store_in_the_list_are_checked_too(tmp_path: Path, store: ql.SampleStore) -> None:
    other = store_draws(tmp_path / "other", model=small_model(5))
    with pytest.raises(ValueError, match=r"other is of another model: '2.weight'"):
        Posterior.open([store[0], other[0]], small_model())


def test_one_sample_alone(store: ql.SampleStore) -> None:
    """A sample is a mapping: its names are not taken for folders."""
    assert predict_alike(Posterior.open(store[2], small_model()), Posterior.open(store[2:3], small_model()))
    with pytest.raises(TypeError, match="must be stores"):
        Posterior.open(5, small_model())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": "logit"}, "link must be one of 'softmax', 'sigmoid', 'identity', got 'logit'"),
        ({"link": None}, "link must be one of .* got None"),
        ({"noise": 0.1}, "noise must be a variance, and goes with link='identity', got 0.1 with link='softmax'"),
        ({"noise": 0.1, "link": "sigmoid"}, "got 0.1 with link='sigmoid'"),
        ({"noise": -1.0, "link": "identity"}, "noise must be a variance.*got -1.0"),
        ({"noise": math.nan, "link": "identity"}, "noise must be a variance.*got nan"),
        ({"noise": math.inf, "link": "identity"}, "noise must be a variance.*got inf"),
        ({"batch_norm": "train"}, "batch_norm must be 'stored' or a loader, got 'train'"),
    ],
)
def test_options_that_are_refused(store: ql.SampleStore, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Posterior.open(store, small_model(), **options)


class Outputs(nn.Linear):
    """A layer with configured outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 2)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"dict": {"scores": y}, "tuple": (y, y), "flat": y[:, 0], "one": y[:, :1]}[self.kind]


@pytest.mark.parametrize("vectorize", [None, True, False])
def test_models_whose_outputs_cannot_be_averaged(tmp_path: Path, vectorize: bool | None) -> None:
    for kind in ("dict", "tuple"):
        posterior = Posterior.open(
            store_draws(tmp_path / kind, model=Outputs(kind)), Outputs(kind), vectorize=vectorize
        )
        with pytest.raises(TypeError, match=f"the model must return a tensor of floating-point numbers, .* got {kind}"):
            posterior.predict(X)
    for kind, shape in (("flat", r"\(23,\)"), ("one", r"\(23, 1\)")):
        store, model = store_draws(tmp_path / kind, model=Outputs(kind)), Outputs(kind)
        with pytest.raises(ValueError, match=f"two classes or more, got {shape}; for yes or no take link='sigmoid'"):
            Posterior.open(store, model, vectorize=vectorize).predict(X)
        assert Posterior.open(store, model, link="sigmoid", vectorize=vectorize).predict(X).shape[0] == 23


# ---- predictions


@pytest.mark.parametrize("vectorize", [True, False])
def test_the_average_of_each_link(store: ql.SampleStore, vectorize: bool) -> None:
    outputs = Posterior.open(store, small_model(), link="identity", vectorize=vectorize).samples(X)
    softmax = Posterior.open(store, small_model(), vectorize=vectorize)
    sigmoid = Posterior.open(store, small_model(), link="sigmoid", vectorize=vectorize)
    identity = Posterior.open(store, small_model(), link="identity", noise=0.25, vectorize=vectorize)
    for one, each in ((softmax, outputs.softmax(2)), (sigmoid, outputs.sigmoid()), (identity, outputs)):
        torch.testing.assert_close(one.samples(X), each, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.predict(X), each.mean(0), rtol=1e-6, atol=1e-6)
        assert torch.equal(one.uncertainty(X).mean, one.predict(X))
    u = identity.uncertainty(X)
    np.testing.assert_allclose(u.epistemic, outputs.double().numpy().var(0), rtol=1e-5)
    torch.testing.assert_close(u.total, u.epistemic + 0.25)
    assert bool((u.aleatoric == 0.25).all())
    shapes = [one.uncertainty(X).total.shape for one in (softmax, sigmoid, identity)]
    assert shapes == [(23,), (23, 3), (23, 3)]


def test_pixels_are_classified_one_by_one(tmp_path: Path) -> None:
    model = nn.Conv2d(2, 3, 3, padding=1)
    x = torch.randn(4, 2, 5, 6, generator=torch.Generator().manual_seed(0))
    posterior = Posterior.open(store_draws(tmp_path / "run", model=model), model, class_dim=1)
    u = posterior.uncertainty(x)
    assert u.mean.shape == (4, 3, 5, 6)
    assert u.total.shape == u.epistemic.shape == (4, 5, 6)
    torch.testing.assert_close(u.mean.sum(1), torch.ones(4, 5, 6))
    labels = torch.randint(3, (4, 5, 6), generator=torch.Generator().manual_seed(0))
    assert metrics.evaluate(posterior.predict_loader([(x, labels)]))["count"] == 120


def test_no_examples(posterior: Posterior) -> None:
    assert posterior.predict(X[:0]).shape == (0, 3)
    assert posterior.uncertainty(X[:0]).total.shape == (0,)


class TwoInputs(nn.Linear):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(first) - 2 * super().forward(second)


@pytest.mark.parametrize("vectorize", [None, True, False])
def test_inputs_are_a_tensor_a_tuple_or_a_dict(tmp_path: Path, vectorize: bool | None) -> None:
    store, model = store_draws(tmp_path / "run", model=TwoInputs(4, 3)), TwoInputs(4, 3)
    posterior = Posterior.open(store, model, vectorize=vectorize, link="identity")
    a, b = X, X.flip(0)
    expected = torch.stack([nn.functional.linear(a - 2 * b, s["weight"], -s["bias"]) for s in store])
    for inputs in ((a, b), [a, b], {"first": a, "second": b}, {"second": b, "first": a}):
        torch.testing.assert_close(posterior.samples(inputs), expected, rtol=1e-4, atol=1e-4)
        pairs = list(posterior.predict_loader([(inputs, LABELS)]))
        torch.testing.assert_close(pairs[0][0], expected.mean(0), rtol=1e-4, atol=1e-4)
        assert pairs[0][1] is LABELS
    named: list[Any] = list(posterior.predict_loader([{"first": a, "second": b}]))
    torch.testing.assert_close(named[0], expected.mean(0), rtol=1e-4, atol=1e-4)


class InPlace(nn.Module):
    """Centres its input where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.sub_(x.mean()))
        return y


@pytest.mark.parametrize("vectorize", [None, True, False])
def test_a_model_that_writes_into_its_input_is_refused(tmp_path: Path, vectorize: bool | None) -> None:
    model = InPlace()
    posterior = Posterior.open(store_draws(tmp_path / "run", model=model), model, vectorize=vectorize)
    with pytest.raises(ValueError, match="changes its input in place"):
        posterior.predict(torch.randn(5, 4))


@pytest.mark.parametrize("vectorize", [True, False])
def test_threads_take_turns_with_the_model(store: ql.SampleStore, vectorize: bool) -> None:
    model = small_model()
    before, posterior = [p.clone() for p in model.parameters()], Posterior.open(store, model, vectorize=vectorize)
    expected = posterior.predict(X)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: posterior.predict(X), range(40)))
    assert all(torch.equal(p, expected) for p in found)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert model.training


@pytest.mark.parametrize("vectorize", [True, False])
def test_predictions_in_inference_mode(tmp_path: Path, vectorize: bool) -> None:
    model = ql.pack(small_model(), weights="bfp8")
    with ql.SampleStore.create(tmp_path, model) as store:
        store.append(model)
        store.append(model)
    posterior = Posterior.open(tmp_path, model, vectorize=vectorize)
    expected = posterior.predict(X)
    with torch.inference_mode():
        torch.testing.assert_close(Posterior.open(tmp_path, model, vectorize=vectorize).predict(X.clone()), expected)


def test_averages_of_half_precision_models_are_probabilities(tmp_path: Path) -> None:
    model = small_model().to(torch.bfloat16)
    posterior = Posterior.open(store_draws(tmp_path, model=model), model)
    assert metrics.evaluate(posterior.predict(X.to(torch.bfloat16)), LABELS)["count"] == len(LABELS)
