"""Posteriors over the batches of a loader, and what metrics and diagnostics make of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import qlangevin as ql
from qlangevin import diagnostics, metrics
from tests.helpers.posteriors import (
    LABELS,
    X,
    small_model,
)

Posterior = ql.Posterior


@pytest.mark.slow
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), limit=st.sampled_from([1, 7, 512]))
def test_batches_of_any_size_are_predicted_as_all_together(posterior: Posterior, sizes: list[int], limit: int) -> None:
    x = X.repeat(4, 1)[: sum(sizes)]
    labels = torch.arange(len(x))
    batches = list(zip(x.split(sizes), labels.split(sizes), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qlangevin.prediction.posterior.GROUP_SIZE", limit)
        pairs = list(posterior.predict_loader(batches))
        uncertain = list(posterior.uncertainty_loader(batches))
    assert [len(p) for p, _ in pairs] == sizes
    torch.testing.assert_close(torch.cat([p for p, _ in pairs]), posterior.predict(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cat([y for _, y in pairs]), labels)
    whole = posterior.uncertainty(x)
    for i, expected in enumerate(whole):
        torch.testing.assert_close(torch.cat([u[i] for u, _ in uncertain]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_shuffled_loader_is_gone_through_once(store: ql.SampleStore, vectorize: bool) -> None:
    """Each batch meets all samples before the next is asked for: no second pass in another order."""
    posterior = Posterior.open(store, small_model(), vectorize=vectorize)
    expected = posterior.predict(X)
    shuffled = ql.Loader(TensorDataset(X, torch.arange(23)), batch_size=5, seed=3)
    pairs = list(posterior.predict_loader(shuffled))
    assert shuffled.steps == 0  # looking is not training
    order = torch.cat([i for _, i in pairs])
    assert not torch.equal(order, torch.arange(23))
    torch.testing.assert_close(torch.cat([p for p, _ in pairs]), expected[order], rtol=1e-5, atol=1e-6)
    once = (batch for batch in DataLoader(TensorDataset(X), batch_size=4))  # lists of one thing
    torch.testing.assert_close(torch.cat(list(posterior.predict_loader(once))), expected, rtol=1e-5, atol=1e-6)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


def test_a_dataset_without_a_length(posterior: Posterior) -> None:
    """A DataLoader over one has a __len__ that raises."""
    found = torch.cat(list(posterior.predict_loader(DataLoader(Stream(), batch_size=4))))
    torch.testing.assert_close(found, posterior.predict(X), rtol=1e-5, atol=1e-6)


def test_an_empty_loader_gives_nothing(posterior: Posterior) -> None:
    assert list(posterior.predict_loader([])) == []
    with pytest.raises(ValueError, match="predictions has no batches"):
        metrics.evaluate(posterior.predict_loader([]))


def test_a_loader_that_fails_says_so(posterior: Posterior) -> None:
    def failing() -> Iterator[Tensor]:
        yield X
        raise OSError("no such image")

    with pytest.raises(OSError, match="no such image"):
        list(posterior.predict_loader(failing()))


def test_nothing_is_drawn_but_by_the_loader(posterior: Posterior) -> None:
    before = torch.get_rng_state()
    list(posterior.predict_loader([(X, LABELS)] * 3))
    posterior.uncertainty(X)
    assert torch.equal(torch.get_rng_state(), before)
    assert not posterior.predict(X).requires_grad


def test_a_bar_is_shown_on_a_terminal_only(
    posterior: Posterior, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    list(posterior.predict_loader([X] * 3))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    list(posterior.predict_loader([X] * 3))
    shown = capsys.readouterr()
    assert "averaging 6 samples" in shown.err
    assert shown.out == ""
    list(posterior.predict_loader(x for x in [X] * 3))  # of unknown length
    assert "averaging 6 samples" in capsys.readouterr().err
    list(posterior.predict_loader([X] * 3, progress=False))
    assert capsys.readouterr() == ("", "")


def test_the_bar_is_full_at_the_end(posterior: Posterior, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[float] = []
    totals: list[Any] = []

    class Bar:
        def __init__(self, total: Any, label: str, shown: bool) -> None:
            totals.append(total)

        def __enter__(self) -> Any:
            return lambda label, steps: moved.append(steps)

        def __exit__(self, *_: Any) -> None: ...

    monkeypatch.setattr("qlangevin.prediction.posterior.progress_bar", Bar)
    list(posterior.predict_loader([X] * 3))
    assert totals == [18]
    assert sum(moved) == 18


# ---- with metrics and diagnostics


def test_metrics_take_what_loaders_give(posterior: Posterior) -> None:
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=4)
    streamed = metrics.evaluate(posterior.predict_loader(loader))
    together = metrics.evaluate(posterior.predict(X), LABELS)
    assert streamed == pytest.approx(together, rel=1e-5)
    assert streamed["count"] == 23
    far = DataLoader(TensorDataset(100 * X, LABELS), batch_size=7)
    found = metrics.ood(posterior.uncertainty_loader(loader), posterior.uncertainty_loader(far))
    assert found == pytest.approx(metrics.ood(posterior.uncertainty(X), posterior.uncertainty(100 * X)), abs=0.01)
    unlabelled = posterior.uncertainty_loader([X, X])
    assert metrics.ood(unlabelled, posterior.uncertainty(X))["entropy"] == pytest.approx(0.5, abs=1e-3)


def test_diagnostics_of_two_chains(two: Posterior) -> None:
    drawn = diagnostics.predictions(two, X)
    assert drawn.shape == (2, 4, 23, 3)
    assert torch.equal(drawn[0], two.samples(X)[2:6])
    assert torch.equal(drawn[1], two.samples(X)[6:])
    likelihood = diagnostics.log_likelihood(two, X, LABELS)
    expected = drawn.double().gather(3, LABELS.expand(2, 4, 23)[..., None]).squeeze(3).log()
    torch.testing.assert_close(likelihood, expected)
    weights = diagnostics.weights(two, {"0.weight": (0, slice(2)), "2.bias": slice(None)})
    assert weights["0.weight"].shape == (2, 4, 2)
    assert torch.equal(weights["2.bias"][1], torch.stack([sample["2.bias"] for sample in two.chains[1].members]))
    summary = diagnostics.summarize(drawn)
    assert np.isfinite(summary.r_hat).all()


def test_the_log_likelihood_of_regression_has_the_noise_of_the_posterior(store: ql.SampleStore) -> None:
    posterior = Posterior.open(store, small_model(), link="identity", noise=0.25)
    y = torch.zeros(23, 3)
    expected = torch.distributions.Normal(posterior.samples(X).double(), 0.5).log_prob(y).sum(-1)
    torch.testing.assert_close(diagnostics.log_likelihood(posterior, X, y)[0], expected)
