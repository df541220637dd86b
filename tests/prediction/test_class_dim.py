"""Classes along another dim than 1: language models, whose outputs are (example, time, class)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qlangevin import Posterior, diagnostics, metrics
from tests.helpers.posteriors import X, small_model, store_draws

WORDS = torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(0))
NEXT = torch.randint(6, (4, 5), generator=torch.Generator().manual_seed(1))


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 6))


@pytest.mark.parametrize("shape", [(4, 5), (4, 6)])
def test_outputs_of_three_dims_are_refused_unless_it_is_said_which_has_the_classes(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    posterior = Posterior.open(store_draws(tmp_path, model=language_model()), language_model())
    words = torch.zeros(shape, dtype=torch.int64)
    for call in (posterior.predict, posterior.uncertainty, posterior.samples):
        with pytest.raises(
            ValueError, match=r"outputs of shape \(4, ., 6\) do not say .* class_dim=1 if .* class_dim=-1"
        ):
            call(words)


@pytest.mark.parametrize("class_dim", [-1, 2])
@pytest.mark.parametrize("vectorize", [True, False])
def test_classes_along_the_last_dim(tmp_path: Path, class_dim: int, vectorize: bool) -> None:
    store, model = store_draws(tmp_path, model=language_model()), language_model()
    posterior = Posterior.open(store, model, class_dim=class_dim, vectorize=vectorize)
    outputs = Posterior.open(store, model, link="identity", vectorize=vectorize).samples(WORDS)
    p = outputs.softmax(-1)
    torch.testing.assert_close(posterior.samples(WORDS), p)
    u = posterior[1:].uncertainty(WORDS)
    torch.testing.assert_close(u.mean, p[1:].mean(0))
    torch.testing.assert_close(u.total, torch.special.entr(p[1:].mean(0)).sum(-1))
    torch.testing.assert_close(u.aleatoric, torch.special.entr(p[1:]).sum(-1).mean(0))
    assert u.epistemic.shape == (4, 5)
    scores = metrics.evaluate(posterior.predict_loader([(WORDS[:3], NEXT[:3]), (WORDS[3:], NEXT[3:])]), class_dim=-1)
    rows, labels = p.mean(0).flatten(0, 1), NEXT.flatten()
    assert scores == pytest.approx(metrics.evaluate(rows, labels), rel=1e-5)
    assert scores["count"] == 20
    bins = metrics.reliability(p.mean(0), NEXT, class_dim=-1)
    torch.testing.assert_close(bins.accuracy, metrics.reliability(rows, labels).accuracy)
    each = diagnostics.log_likelihood(posterior, WORDS, NEXT)
    right = p.double().gather(-1, NEXT.expand(6, 4, 5).unsqueeze(-1)).log().squeeze(-1).sum(-1)
    torch.testing.assert_close(each, right.unsqueeze(0), rtol=1e-5, atol=1e-5)


def test_metrics_say_what_to_do_with_classes_along_the_last_dim() -> None:
    p = torch.rand(4, 5, 6).softmax(-1)
    with pytest.raises(
        ValueError, match=r"shapes do not fit: .* if the last dim has the classes, class_dim=-1 says so"
    ):
        metrics.evaluate(p, NEXT)
    with pytest.raises(ValueError, match=r"class_dim must be a dim of \(4, 5, 6\) other than 0, got 3"):
        metrics.evaluate(p, NEXT, class_dim=3)


@pytest.mark.parametrize(
    "options",
    [{"class_dim": 0}, {"class_dim": 1.0}, {"class_dim": True}, {"class_dim": -1, "link": "sigmoid"}],
    ids=str,
)
def test_class_dims_that_are_none(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="class_dim must be a dim of the outputs other than 0"):
        Posterior.open(store_draws(tmp_path), small_model(), **options)


def test_a_class_dim_that_the_outputs_do_not_have(tmp_path: Path) -> None:
    store = store_draws(tmp_path)
    with pytest.raises(ValueError, match=r"two classes or more along dim 2, got \(23, 3\)"):
        Posterior.open(store, small_model(), class_dim=2).predict(X)
    same = Posterior.open(store, small_model(), class_dim=-1).predict(X)
    assert torch.equal(same, Posterior.open(store, small_model()).predict(X))
