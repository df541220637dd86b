"""Metrics: small cases by hand, scikit-learn and torchmetrics, batches against the whole, and what is refused."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

from qlangevin.prediction.metrics import Scores, auroc, evaluate, ood, reliability

P = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.05, 0.9, 0.05]], dtype=torch.float64)
Y = torch.tensor([0, 2, 2, 1])


def drawn(n: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities, and labels drawn from flatter ones: a model that is too sure."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=generator) * 2
    return (1.5 * logits).softmax(1), torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)


def test_multiclass_by_hand() -> None:
    """Decisions 0, 1, 2, 1 with confidence 0.7, 0.6, 0.5, 0.9: the second is wrong."""
    scores = evaluate(P, Y)
    assert scores == {
        "error": 0.25,
        "nll": pytest.approx(-(math.log(0.7) + math.log(0.3) + math.log(0.5) + math.log(0.9)) / 4),
        "brier": pytest.approx((0.14 + 0.86 + 0.375 + 0.015) / 4),
        "ece": pytest.approx((0.3 + 0.6 + 0.5 + 0.1) / 4),  # each in a bin of its own
        "count": 4,
    }
    assert isinstance(scores["count"], int)


def test_binary_by_hand() -> None:
    """Decisions 1, 0, 0 with confidence 0.8, 0.9, 0.5: 0.5 is not above 0.5. The last is wrong."""
    p, y = torch.tensor([0.8, 0.1, 0.5], dtype=torch.float64), torch.tensor([1, 0, 1])
    expected = {
        "error": pytest.approx(1 / 3),
        "nll": pytest.approx(-(math.log(0.8) + math.log(0.9) + math.log(0.5)) / 3),
        "brier": pytest.approx((0.04 + 0.01 + 0.25) / 3),
        "ece": pytest.approx((0.2 + 0.1 + 0.5) / 3),
        "count": 3,
    }
    assert evaluate(p, y) == expected
    assert evaluate(p, y.double()) == expected  # as binary_cross_entropy wants them
    assert evaluate(p, y.bool()) == expected
    assert evaluate(p[:, None], y[:, None]) == expected  # multilabel, of one label


def test_reliability_by_hand() -> None:
    """Two bins: 0.5 alone in (0, 0.5], right; 0.7, 0.6, 0.9 in (0.5, 1], two of three right."""
    bins = reliability(P, Y, bins=2)
    assert bins.edges.tolist() == [0, 0.5, 1]
    assert bins.count.tolist() == [1, 3]
    assert bins.confidence.tolist() == pytest.approx([0.5, 2.2 / 3])
    assert bins.accuracy.tolist() == pytest.approx([1, 2 / 3])
    assert bins.ece == pytest.approx((0.5 + 0.2) / 4)
    assert bins.mce == pytest.approx(0.5)
    assert reliability(P, Y, bins=1).ece == pytest.approx(0.75 - 2.7 / 4, abs=1e-12)


def test_empty_bins_are_zero() -> None:
    bins = reliability(P, Y, bins=100)
    assert int((bins.count == 0).sum()) == 96
    for values in (bins.confidence, bins.accuracy):
        assert bool((values[bins.count == 0] == 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", range(1, 11))
def test_a_confidence_on_an_edge_belongs_to_the_bin_below_it(k: int, dtype: torch.dtype) -> None:
    p = torch.full((1, 11), (1 - k / 10) / 10, dtype=torch.float64)
    p[0, 0] = k / 10
    assert reliability(p.to(dtype), torch.tensor([0])).count.tolist() == [int(m == k - 1) for m in range(10)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", range(5, 11))
def test_the_confidence_of_a_no_is_rounded_as_that_of_a_yes(k: int, dtype: torch.dtype) -> None:
    p = torch.tensor([k / 10, (10 - k) / 10], dtype=dtype)
    assert int(reliability(p, torch.ones(2)).count[k - 1]) == 2


@pytest.mark.parametrize("k", range(5, 11))
def test_just_above_an_edge_is_the_next_bin(k: int) -> None:
    p = torch.nextafter(torch.tensor([k / 10]), torch.tensor(2.0)).clamp_max(1)
    assert int(reliability(p, torch.ones(1)).count.argmax()) == min(k, 9)


def test_underflow_counts_as_the_smallest_normal_number() -> None:
    most = -math.log(torch.finfo(torch.float32).tiny)
    assert most == pytest.approx(87.34, abs=0.01)
    assert evaluate(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))["nll"] == pytest.approx(most)
    assert evaluate(torch.tensor([0.0]), torch.tensor([1]))["nll"] == pytest.approx(most)
    assert evaluate(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))["nll"] == 0


def test_against_scikit_learn() -> None:
    p, y = drawn(500, 4)
    scores, wide = evaluate(p, y), p.double() / p.double().sum(1, keepdim=True)
    assert scores["nll"] == pytest.approx(log_loss(y, wide), rel=1e-6)
    assert scores["brier"] == pytest.approx(brier_score_loss(y, wide, scale_by_half=False), rel=1e-6)
    q, z = p[:, 0].double(), (y == 0).long()
    scores = evaluate(q, z)
    assert scores["nll"] == pytest.approx(log_loss(z, q), rel=1e-12)
    assert scores["brier"] == pytest.approx(brier_score_loss(z, q), rel=1e-12)
    bins = reliability(q, z, bins=15)
    right, confidence = ((q > 0.5) == z).long(), torch.maximum(q, 1 - q)
    accuracy, mean = calibration_curve(right, confidence, n_bins=15)
    np.testing.assert_allclose(bins.accuracy[bins.count > 0], accuracy, rtol=1e-12)
    np.testing.assert_allclose(bins.confidence[bins.count > 0], mean, rtol=1e-12)


@pytest.mark.parametrize("bins", [1, 7, 10, 15])
def test_calibration_is_that_of_torchmetrics_away_from_edges(bins: int) -> None:
    p, y = drawn(2000, 5, seed=1)
    theirs = multiclass_calibration_error(p, y, num_classes=5, n_bins=bins)
    assert evaluate(p, y, bins=bins)["ece"] == pytest.approx(float(theirs), abs=1e-6)


def test_a_calibrated_model_has_little_error() -> None:
    """Labels drawn from p itself. Σ |B_m|/n · |gap| is about Σ √(n_m)/2n <= √10/(2√n) = 0.011; twice that never happens."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(20_000, generator=generator)
    assert evaluate(p, torch.rand(20_000, generator=generator) < p)["ece"] < 0.022


def test_classes_are_along_dim_1() -> None:
    p, y = drawn(2 * 3 * 5, 4)
    image = p.reshape(2, 3, 5, 4).movedim(-1, 1)
    flat, whole = evaluate(p, y), evaluate(image, y.reshape(2, 3, 5))
    assert whole == pytest.approx(flat)
    assert whole["count"] == 30


@pytest.mark.slow
@given(st.lists(st.integers(0, 60), max_size=6), st.booleans(), st.integers(1, 20))
def test_batches_equal_the_whole(cuts: list[int], binary: bool, bins: int) -> None:
    p, y = drawn(60, 3)
    if binary:
        p, y = p[:, :2], torch.nn.functional.one_hot(y, 3)[:, :2]
    ends = [0, *sorted(cuts), 60]  # some batches are empty
    batches = [(p[a:b], y[a:b]) for a, b in itertools.pairwise(ends)]
    assert evaluate(iter(batches), bins=bins) == pytest.approx(evaluate(p, y, bins=bins), rel=1e-12)
    assert torch.equal(reliability(batches, bins=bins).count, reliability(p, y, bins=bins).count)


def test_scores_is_a_metric() -> None:
    whole, half = evaluate(P, Y), evaluate(P[:2], Y[:2])
    scores = Scores()
    assert scores(P[:2], Y[:2]) == half  # forward gives the figures of the batch
    assert scores(P[2:], Y[2:]) == evaluate(P[2:], Y[2:])
    assert scores.compute() == pytest.approx(whole)
    other = Scores()
    other.update(P[:2], Y[:2])
    scores.reset()
    scores.update(P[2:], Y[2:])
    scores.merge_state(other)
    assert scores.compute() == pytest.approx(whole)
    assert scores.table.dtype == torch.float64
    assert "table" not in scores.state_dict()


def test_processes_are_added_up_by_scores_and_not_by_evaluate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with the same data, without starting any: what one gathers is its own state twice."""

    def gather(state: Tensor, group: Any = None) -> list[Tensor]:
        return [state, state]

    scores = Scores(dist_sync_fn=gather, distributed_available_fn=lambda: True)
    scores.update(P, Y)
    assert scores.compute() == pytest.approx(evaluate(P, Y) | {"count": 8})
    assert int(scores.reliability().count.sum()) == 8
    assert float(scores.table[:, 0].sum()) == 4
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # gathering would fail: it is not
    assert evaluate(P, Y)["count"] == 4
    assert int(reliability(P, Y).count.sum()) == 4


def test_no_graph_is_kept_and_inference_tensors_work() -> None:
    scores = Scores()
    scores.update(P.clone().requires_grad_(), Y)
    assert not scores.sums.requires_grad
    with torch.inference_mode():
        p = P * 1
    assert evaluate([(p, Y), (P, Y)])["count"] == 8


def test_low_precision_probabilities() -> None:
    p, y = drawn(400, 10)
    for dtype in (torch.bfloat16, torch.float16):
        scores = evaluate(p.to(dtype), y)
        assert scores == pytest.approx(evaluate(p, y), abs=0.02)


NAN = P.clone()
NAN[1, 1] = math.nan


@pytest.mark.parametrize(
    ("p", "y", "message"),
    [
        (P, Y[:3], r"probabilities \(4, 3\) and labels \(3,\)"),
        (P.T, Y, r"probabilities \(3, 4\) and labels \(4,\)"),
        (P[0], Y[0], r"probabilities \(3,\) and labels \(\)"),
        (P[:, :1], Y, r"\(4, 1\) have 1 class; for binary labels"),
        (
            P[:, :1],
            Y + 0.5,
            r"\(4, 1\) have 1 class; evaluate scores classes; for regression see diagnostics.log_likelihood",
        ),
        (P[:, :1], P[:, :1] + 3, "got 3.7; evaluate scores classes; for regression see"),
        (5 * P[:, 0], P[:, 0], "got 0.7; evaluate scores classes; for regression see"),
        (P.log(), Y, "values from -2.996 to -0.1054: these look like logarithms"),
        (P * 0.9, Y, "sum to 1 along dim 1, got 0.9 to 0.9: normalize them"),
        (torch.tensor([3.0]), torch.tensor([1]), "these look like logits; apply sigmoid"),
        (NAN, Y, "1 NaN among 12"),
        (P, Y + 1, "labels must be integers from 0 to 2, got 3"),
        (P, Y - 100, "labels must be integers from 0 to 2, got -100"),
        (P, Y.float(), "labels must be integers from 0 to 2, got torch.float32"),
        (torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.3]), "labels must be integers from 0 to 1, got 0.3"),
        (P[:0], Y[:0], "no batch had an example"),
    ],
)
def test_values_that_are_refused(p: Tensor, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(p, y)
    with pytest.raises(ValueError, match=message):
        reliability([(p, y)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((P,), "labels are missing"),
        (([(P, Y)], Y), "predictions must be a tensor if labels are given.*got list"),
        ((3,), "iterable of pairs.*got int"),
        (([P],), "pairs .probabilities, labels., got Tensor"),
        (([(P, Y, Y)],), "pairs .probabilities, labels., got 3 things"),
        ((P, Y.tolist()), "labels must be a tensor, got list"),
        ((Y, Y), "probabilities must be floating point, got torch.int64"),
    ],
)
def test_types_that_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        evaluate(*arguments)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="no batches; if it is a generator"):
        evaluate(iter(()))
    for bins in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"bins must be an integer, at least 1, got {bins}"):
            evaluate(P, Y, bins=bins)  # type: ignore[arg-type]


def test_small_errors_of_rounding_are_not_refused() -> None:
    p = torch.tensor([[1.0000001, 0.0], [0.9995, 0.0]])
    assert evaluate(p, torch.tensor([0, 0]))["nll"] == pytest.approx(-math.log(0.9995) / 2, abs=1e-6)


def test_auroc_by_hand() -> None:
    """Of the 6 pairs (a, b) three have a < b, and one is a tie."""
    assert auroc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0, 0.5])) == 3.5 / 6
    assert auroc(torch.tensor([1000.0]), torch.tensor([1001.0])) == 1
    assert auroc(torch.tensor([1001.0]), torch.tensor([1000.0])) == 0
    assert auroc(torch.tensor([-math.inf, 0.0]), torch.tensor([0, math.inf])) == 7 / 8
    assert auroc(torch.ones(5, dtype=torch.int64), torch.ones(2, 3)) == 0.5


@given(st.lists(st.integers(0, 8), min_size=1, max_size=20), st.lists(st.integers(0, 8), min_size=1, max_size=20))
def test_auroc_is_that_of_scikit_learn_and_torchmetrics(a: list[int], b: list[int]) -> None:
    inside, outside = torch.tensor(a) / 8, torch.tensor(b) / 8
    scores, labels = torch.cat((inside, outside)), torch.tensor([0] * len(a) + [1] * len(b))
    assert auroc(inside, outside) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert auroc(inside, outside) == pytest.approx(float(binary_auroc(scores, labels)), abs=1e-6)


def test_auroc_refuses() -> None:
    with pytest.raises(ValueError, match=r"outside must be one score or more.*got 0 NaN among 0"):
        auroc(torch.ones(2), torch.ones(0))
    with pytest.raises(ValueError, match=r"inside must be .*got 1 NaN among 2"):
        auroc(torch.tensor([1.0, math.nan]), torch.ones(1))


class Uncertainty(NamedTuple):
    """As a posterior gives it. That it is a tuple must not make it a pair."""

    mean: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def uncertainty(total: list[Any], epistemic: list[Any]) -> Uncertainty:
    return Uncertainty(torch.zeros(1), torch.tensor(total), torch.zeros(1), torch.tensor(epistemic))


def test_ood_from_one_object_from_batches_and_from_pairs() -> None:
    inside, outside = uncertainty([0.1, 0.2, 0.9], [0.0, 0.1, 0.5]), uncertainty([0.5, 1.0], [0.6, 0.7])
    expected = {"entropy": 5 / 6, "mutual_information": 1}
    first, second = uncertainty([0.1], [0.0]), uncertainty([0.2, 0.9], [0.1, 0.5])

    def pairs() -> Iterator[tuple[Uncertainty, Tensor]]:
        yield first, Y[:1]
        yield second, Y[:2]

    assert ood(inside, outside) == expected
    assert ood([first, second], [outside]) == expected
    assert ood(pairs(), outside) == expected


def test_ood_adds_up_labels() -> None:
    inside, outside = uncertainty([[0.1, 0.5]], [[0.0, 0.1]]), uncertainty([[0.4, 0.3]], [[0.05, 0.0]])
    assert ood(inside, outside) == {"entropy": 1, "mutual_information": 0}


@pytest.mark.parametrize(("given", "got"), [(3, "int"), ([P], "Tensor"), ([(P, Y)], "Tensor"), ([()], "tuple")])
def test_ood_refuses(given: Any, got: str) -> None:
    with pytest.raises(TypeError, match=f"inside must have total and epistemic, or yield what has, got {got}"):
        ood(given, uncertainty([1.0], [1.0]))
    with pytest.raises(ValueError, match="outside has no batches"):
        ood(uncertainty([1.0], [1.0]), [])


def test_a_probability_that_was_rounded_to_one_is_not_certain() -> None:
    """Logit 17.5 has p = 1 in float32; that of the other label is 2.5e-8, not the least there is."""
    p = torch.tensor([17.5]).sigmoid()
    assert float(p) == 1
    assert evaluate(p, torch.tensor([0]))["nll"] == pytest.approx(17.5, abs=0.3)


def test_one_hot_labels_are_not_taken_for_yes_and_no() -> None:
    p, y = drawn(20, 3)
    with pytest.raises(ValueError, match=r"one-hot labels; give labels.argmax\(1\)"):
        evaluate(p, torch.nn.functional.one_hot(y, 3))


def test_labels_to_be_ignored_are_left_out() -> None:
    p = torch.rand(4, 6, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    y = torch.arange(24).view(4, 6) % 5
    masked = y.masked_fill(y == 3, -100)
    kept = masked != -100
    expected = evaluate(p[kept], y[kept])
    assert evaluate(p, masked, class_dim=-1, ignore_index=-100) == pytest.approx(expected)
    assert evaluate(p.movedim(-1, 1), masked, ignore_index=-100) == pytest.approx(expected)
    assert evaluate(p, y.masked_fill(y == 3, 7), class_dim=-1, ignore_index=7) == pytest.approx(expected)
    assert evaluate(p[..., 0], (y == 1).long().masked_fill(y == 3, -100), ignore_index=-100)["count"] == int(kept.sum())
    with pytest.raises(ValueError, match="there is nothing to evaluate"):
        evaluate(p, torch.full((4, 6), -100), class_dim=-1, ignore_index=-100)
    with pytest.raises(ValueError, match="integers from 0 to 4, got -100; ignore_index=-100 leaves such labels out"):
        evaluate(p, masked, class_dim=-1)
