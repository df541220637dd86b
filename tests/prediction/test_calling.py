"""Models as others write them: outputs with logits, batches of many kinds, and ``forward`` for the rest."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import metrics
from tests.helpers.posteriors import LABELS, Fill, X, small_model, store_draws

Posterior = ql.Posterior
VECTORIZE = pytest.mark.parametrize("vectorize", [None, True, False])


class ModelOutput(OrderedDict[str, Tensor]):
    """An output as models of Hugging Face return it: entries are attributes, too."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Classifier(nn.Module):
    """A model with the interface of Hugging Face's, whose output has a loss if it was given labels."""

    def __init__(self, kind: str = "output") -> None:
        super().__init__()
        self.net, self.kind = small_model(), kind

    def forward(self, inputs: Tensor, scale: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = self.net(inputs) * (1 if scale is None else scale)
        if labels is not None:
            return ModelOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)
        kinds: dict[str, Any] = {
            "output": ModelOutput(logits=logits),
            "dict": {"logits": logits},
            "object": SimpleNamespace(logits=logits),
            "tuple": (logits, logits),
            "hidden": ModelOutput(last_hidden_state=logits),
            "classes": ModelOutput(logits=logits.argmax(1)),
        }
        return kinds[self.kind]


class PlainOf(nn.Module):
    """The tensor that a classifier's output has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_model()

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


@pytest.fixture
def store(tmp_path: Path) -> ql.SampleStore:
    return store_draws(tmp_path / "run", model=PlainOf())


@pytest.fixture
def expected(store: ql.SampleStore) -> Tensor:
    return Posterior.open(store, PlainOf(), vectorize=False).samples(X)


@VECTORIZE
@pytest.mark.parametrize("kind", ["output", "dict", "object"])
def test_outputs_with_logits_are_understood(
    kind: str, vectorize: bool | None, store: ql.SampleStore, expected: Tensor
) -> None:
    posterior = Posterior.open(store, Classifier(kind), vectorize=vectorize)
    torch.testing.assert_close(posterior.samples(X), expected)
    torch.testing.assert_close(posterior.predict({"inputs": X}), expected.mean(0))


@VECTORIZE
def test_forward_calls_the_model(vectorize: bool | None, store: ql.SampleStore, expected: Tensor) -> None:
    ways: list[Any] = [
        (lambda model, batch: model(batch)[0], "tuple", X),
        (lambda model, batch: model(**batch).logits, "output", {"inputs": X}),
        (lambda model, batch: model(**batch), "output", {"inputs": X, "labels": LABELS}),
        (lambda model, batch: model(batch["nested"]["x"][0]), "output", {"nested": {"x": [X]}}),
        (lambda model, batch: model.net(batch), "hidden", X),
    ]
    for forward, kind, batch in ways:
        posterior = Posterior.open(store, Classifier(kind), vectorize=vectorize, forward=forward)
        torch.testing.assert_close(posterior.samples(batch), expected)
        torch.testing.assert_close(posterior[:2].uncertainty(batch).mean, expected[:2].mean(0))
        assert len(posterior.chains[0].predict(batch)) == 23


def test_vectorized_evaluation_takes_forward(store: ql.SampleStore, expected: Tensor) -> None:
    """A small model is evaluated with all samples at once, in one call."""
    calls: list[int] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        return model(**batch)

    posterior = Posterior.open(store, Classifier(), forward=forward)
    torch.testing.assert_close(posterior.samples({"inputs": X}), expected)
    assert len(calls) == 1
    assert not posterior._ensemble.vmap_failed


@VECTORIZE
def test_batches_of_loaders(vectorize: bool | None, store: ql.SampleStore, expected: Tensor) -> None:
    posterior, two = Posterior.open(store, Classifier(), vectorize=vectorize), torch.full((23, 1), 2.0)
    half = Posterior.open(store, Classifier(), vectorize=False).predict((X, two))
    for batch, mean in (
        ((X, LABELS), expected.mean(0)),
        ([X, two, LABELS], half),
        (({"inputs": X}, LABELS), expected.mean(0)),
        (((X, two), LABELS), half),
        ({"inputs": X, "labels": LABELS}, expected.mean(0)),
        ({"inputs": X, "scale": two, "label": LABELS}, half),
        ([{"inputs": X, "labels": LABELS}], expected.mean(0)),
    ):
        pairs = list(posterior.predict_loader([batch]))
        torch.testing.assert_close(pairs[0][0], mean)
        assert pairs[0][1] is LABELS
        assert metrics.evaluate(posterior.predict_loader([batch, batch]))["count"] == 46
    alone: list[Any] = [{"inputs": X}, (X,), X, ((X, None),)]
    for batch in alone:
        torch.testing.assert_close(next(posterior.predict_loader([batch])), expected.mean(0))
    with pytest.raises(ValueError, match="a batch must be inputs, or inputs and labels, got nothing"):
        list(posterior.predict_loader([()]))


def test_forward_gets_a_dict_with_its_labels_and_a_tuple_without(store: ql.SampleStore) -> None:
    seen: list[Any] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        seen.append(batch)
        return model(X)

    posterior = Posterior.open(store, Classifier(), forward=forward, vectorize=False)[:1]
    batches = [{"inputs": X, "labels": LABELS}, (X, LABELS), (X, X, LABELS)]
    pairs = list(posterior.predict_loader(batches))
    assert seen[0] is batches[0]
    assert seen[1] is X
    assert isinstance(seen[2], tuple)
    assert len(seen[2]) == 2
    assert all(y is LABELS for _, y in pairs)


def test_tokens_and_pixels(tmp_path: Path) -> None:
    class Tokens(nn.Embedding):
        def forward(self, input_ids: Tensor) -> Any:
            return ModelOutput(logits=super().forward(input_ids))

    ids = torch.arange(12).view(3, 4) % 7
    store = store_draws(tmp_path / "tokens", model=Tokens(7, 5))
    u = Posterior.open(store, Tokens(7, 5), class_dim=-1).uncertainty({"input_ids": ids, "labels": ids})
    assert u.mean.shape == (3, 4, 5)
    assert u.total.shape == (3, 4)
    torch.testing.assert_close(u.mean.sum(-1), torch.ones(3, 4))
    with pytest.raises(ValueError, match="do not say which dim has the classes"):
        Posterior.open(store, Tokens(7, 5)).predict({"input_ids": ids})
    pixels = store_draws(tmp_path / "pixels", model=nn.Conv2d(2, 3, 1))
    images = torch.randn(2, 2, 4, 4)
    posterior = Posterior.open(
        pixels, nn.Conv2d(2, 3, 1), class_dim=1, forward=lambda model, batch: {"logits": model(batch["pixels"])}
    )
    torch.testing.assert_close(posterior.predict({"pixels": images}).sum(1), torch.ones(2, 4, 4))


def test_batch_norm_is_estimated_through_forward(fill: Fill) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    store = fill(model)
    plain = Posterior.open(store, model, batch_norm=[(5 * X, LABELS), (3 * X[:9], LABELS[:9])])
    batches = [{"x": 5 * X, "labels": LABELS}, {"x": 3 * X[:9], "labels": LABELS[:9]}]
    posterior = Posterior.open(store, model, batch_norm=batches, forward=lambda model, batch: model(batch["x"]))
    torch.testing.assert_close(posterior.samples({"x": X}), plain.samples(X))
    stored = Posterior.open(store, model).samples(X)
    assert float((plain.samples(X) - stored).abs().max()) > 0.01


# ---- messages


@VECTORIZE
@pytest.mark.parametrize(
    ("kind", "got"),
    [
        ("tuple", r"tuple; .*model\(batch\)\[0\]"),
        ("hidden", r"ModelOutput with 'last_hidden_state'; .*model\(batch\)\['last_hidden_state'\]"),
        ("classes", "torch.int64; "),
    ],
)
def test_outputs_without_logits(kind: str, got: str, vectorize: bool | None, store: ql.SampleStore) -> None:
    message = f"the model must return a tensor of floating-point numbers, or an output .* got {got}"
    with pytest.raises(TypeError, match=message):
        Posterior.open(store, Classifier(kind), vectorize=vectorize).predict(X)


@pytest.mark.parametrize("function", ["predict", "uncertainty", "samples"])
def test_a_loader_in_the_place_of_a_batch(function: str, store: ql.SampleStore) -> None:
    posterior, data = Posterior.open(store, Classifier()), torch.utils.data.TensorDataset(X, LABELS)
    remedy = "call it for each batch" if function == "samples" else rf"{function}_loader\(loader\) takes all batches"
    loader = torch.utils.data.DataLoader(data)
    for given, name in (
        (loader, "a loader, DataLoader"),
        (data, "a data set, TensorDataset"),
        (iter([X]), "an iterator"),
    ):
        with pytest.raises(TypeError, match=f"{function} takes the inputs of one batch, got {name}.*: {remedy}"):
            getattr(posterior, function)(given)


def test_a_forward_that_returns_no_tensor(store: ql.SampleStore) -> None:
    for forward, got in ((lambda model, batch: None, "NoneType"), (lambda model, batch: [model(batch)], "list")):
        with pytest.raises(TypeError, match=f"forward must return a tensor of floating-point numbers, .* got {got}"):
            Posterior.open(store, Classifier(), forward=forward).predict(X)


def test_a_forward_that_is_none(store: ql.SampleStore) -> None:
    with pytest.raises(
        TypeError, match=r"forward must be a function of model and batch, such as forward=lambda .* got 'x'"
    ):
        Posterior.open(store, Classifier(), forward="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"forward must take the model and a batch, .*this one takes \(batch\)"):
        Posterior.open(store, Classifier(), forward=lambda batch: batch)  # type: ignore[misc, arg-type]
    with pytest.raises(TypeError, match=r"forward must be a function of model and batch"):
        Posterior.open(store, Classifier(), forward=Classifier())
    assert len(Posterior.open(store, Classifier(), forward=max)) == 6  # it tells no signature


@VECTORIZE
def test_arguments_that_the_model_does_not_take(vectorize: bool | None, store: ql.SampleStore) -> None:
    posterior = Posterior.open(store, PlainOf(), vectorize=vectorize)
    message = r"gives PlainOf the keywords input_ids, mask, and its forward takes \(x: .*model\(batch\['input_ids'\]\)"
    with pytest.raises(TypeError, match=message):
        posterior.predict({"input_ids": X, "mask": X, "labels": LABELS})
    with pytest.raises(TypeError, match=r"gives PlainOf 2 arguments, and its forward takes"):
        posterior.predict((X, X))


def test_other_errors_of_the_model_are_its_own(store: ql.SampleStore) -> None:
    class Failing(PlainOf):
        def forward(self, x: Tensor) -> Any:
            raise TypeError("no such thing")

    with pytest.raises(TypeError, match=r"^no such thing$"):
        Posterior.open(store, Failing()).predict(X)
