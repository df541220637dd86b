"""Scores of a posterior on digits, their standard errors over test images, and comparisons that respect them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...prediction import metrics
from .digits import DigitsRun
from .images import ANGLES

__all__ = ["Scored", "compare", "reject_curve", "score"]

RESAMPLES = 100


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of one method; ``errors`` has their standard errors over test images."""

    name: str
    run: DigitsRun
    """Costs; predictions are dropped."""
    scores: dict[str, float]
    errors: dict[str, float]
    replicates: dict[str, Tensor]
    """Scores of resampled test images, the same for all methods, so that differences are paired."""
    by_angle: dict[str, list[float]]
    """Error and NLL of digits rotated by each of `ANGLES`."""
    rejection: list[float]
    """Error among the most certain of the digits rotated by 30°, in tenths: all, 90 %, ..., 10 %."""
    roc: tuple[Tensor, Tensor]
    """Letters called unknown, over digits called unknown."""


def score(run: DigitsRun, labels: Tensor, name: str, *, apart: bool = False) -> Scored:
    """Score the average of all predictions of a run; ``apart``: the mean of the scores of each chain alone."""
    parts = [{key: p[i : i + 1] for key, p in run.predictions.items()} for i in range(len(run.predictions["0"]))]
    averages = [{key: p.mean((0, 1)) for key, p in part.items()} for part in (parts if apart else [run.predictions])]
    drawn: dict[str, list[float]] = {}
    for of_digits, of_letters in _resample(len(labels), len(averages[0]["letters"])):
        again = [{"0": a["0"][of_digits], "letters": a["letters"][of_letters]} for a in averages]
        for key, value in _mean_scores(again, labels[of_digits]).items():
            drawn.setdefault(key, []).append(value)
    replicates = {key: torch.tensor(values) for key, values in drawn.items()}
    by_angle = {key: [_mean_scores(averages, labels, str(angle))[key] for angle in ANGLES] for key in ("error", "nll")}
    curves = torch.tensor([reject_curve(a["30"], labels) for a in averages]).mean(0).tolist()
    rocs = [_roc(a) for a in averages]
    roc = rocs[0][0], torch.stack([out for _, out in rocs]).mean(0)
    errors = {key: float(values.std()) for key, values in replicates.items()}
    scores, kept = _mean_scores(averages, labels), replace(run, predictions={})
    return Scored(name, kept, scores, errors, replicates, by_angle, curves, roc)


def _mean_scores(averages: list[dict[str, Tensor]], labels: Tensor, name: str = "0") -> dict[str, float]:
    each = [_scores(average[name], average["letters"], labels) for average in averages]
    return {key: sum(scores[key] for scores in each) / len(each) for key in each[0]}


def _resample(digits: int, letters: int) -> list[tuple[Tensor, Tensor]]:
    """Return bootstrap samples, the same at each call."""
    draw = torch.Generator().manual_seed(3)
    return [
        (torch.randint(digits, (digits,), generator=draw), torch.randint(letters, (letters,), generator=draw))
        for _ in range(RESAMPLES)
    ]


def _scores(p: Tensor, letters: Tensor, labels: Tensor) -> dict[str, float]:
    """Return error, NLL, ECE over 10 bins, and AUROC of letters against digits by the entropy of the prediction."""
    confidence, chosen = p.max(1)
    right = (chosen == labels).double()
    bins = ((confidence * 10).ceil().long() - 1).clamp(0, 9)
    gaps = torch.zeros(10, dtype=torch.float64).index_add(0, bins, right - confidence.double())
    return {
        "error": float(1 - right.mean()),
        "nll": float(-metrics.log_likelihood(p, labels).mean()),
        "ece": float(gaps.abs().sum() / len(labels)),
        "auroc": metrics.auroc(_entropy(p), _entropy(letters)),
    }


def _entropy(p: Tensor) -> Tensor:
    each: Tensor = torch.special.entr(p)
    return each.sum(1)


def reject_curve(p: Tensor, labels: Tensor) -> list[float]:
    """Return the error among the most certain 100 %, 90 %, ..., 10 %."""
    wrong = (p.argmax(1) != labels).float()[_entropy(p).argsort(stable=True)]
    return [float(wrong[: max(1, round(len(wrong) * kept / 10))].mean()) for kept in range(10, 0, -1)]


def _roc(average: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return shares of digits (0, 1 %, ..., 100 %), and the share of letters whose entropy is in that upper part."""
    inside, outside, shares = _entropy(average["0"]), _entropy(average["letters"]), torch.linspace(0, 1, 101)
    limits = torch.quantile(inside, 1 - shares)
    return shares, (outside[:, None] > limits).float().mean(0)


def compare(one: Scored, other: Scored, score: str) -> tuple[float, float]:
    """Return the difference of a score and its standard error over the same test images."""
    paired = one.replicates[score] - other.replicates[score]
    return one.scores[score] - other.scores[score], float(paired.std())
