"""How good the samples of a run are: their average, the last one alone, and each of them along the chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..prediction import diagnostics, metrics
from ..prediction.posterior import Posterior

__all__ = ["convergence", "score"]

Batch = tuple[Tensor, Tensor]


def score(posterior: Posterior, batches: Iterable[Batch], progress: Callable[[str, int], None]) -> dict[str, Any]:
    """The scores of the average and of the last sample, the bins of the calibration error, and a trace of the samples.

    The average of J samples is p(y | x) = 1/J Σ_j p(y | x, θ_j). ``progress`` is told how many examples more are done.
    """
    average, single = (metrics.Scores(sync_on_compute=False) for _ in range(2))  # other ranks do not score
    trace = torch.zeros(2, len(posterior), dtype=torch.float64)
    top5 = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        each = posterior.samples(inputs)
        mean = each.double().mean(0)  # of probabilities, so that they add up to one
        average.update(mean, labels)
        single.update(each[-1], labels)
        trace[0] += torch.stack([metrics.log_likelihood(p, labels).sum() for p in each])
        trace[1] += (each.argmax(2) != labels).sum(1)
        top5 += torch.stack([_missed(p, labels) for p in (mean, each[-1])])
        progress("evaluating", len(labels))
    count = average.compute()["count"]
    log_likelihood, error = (trace / count).tolist()
    return {
        "scores": _figures(average, top5[0]),
        "single": _figures(single, top5[1]),
        "reliability": _bins(average.reliability()),
        "trace": {
            "steps": [s.step for s in posterior.members],
            "log_likelihood": log_likelihood,
            "error": error,
            "chains": [len(chain) for chain in posterior.chains],
        },
        **convergence(_chains(log_likelihood, [len(chain) for chain in posterior.chains])),
    }


def _missed(probabilities: Tensor, labels: Tensor) -> Tensor:
    """How often the label is not among the five likeliest."""
    best = probabilities.topk(min(5, probabilities.shape[1])).indices
    return (best != labels[:, None]).all(1).sum()


def _figures(scores: metrics.Scores, missed: Tensor) -> dict[str, float]:
    figures = scores.compute()
    count = figures.pop("count")
    return {**figures, "top5": float(missed) / count}


def _bins(bins: metrics.Reliability) -> dict[str, list[float | None]]:
    empty = (bins.count == 0).tolist()
    named = {"confidence": bins.confidence, "accuracy": bins.accuracy}
    means = {name: [None if e else x for e, x in zip(empty, t.tolist(), strict=True)] for name, t in named.items()}
    return {"edges": bins.edges.tolist(), "counts": bins.count.tolist(), **means}


def _chains(values: list[float], lengths: list[int]) -> Tensor:
    """What belongs to samples, chain after chain, as (chain, draw): of each its last draws, as many as the shortest has."""
    return torch.stack([chain[-min(lengths) :] for chain in torch.tensor(values).split(lengths)])


def convergence(log_likelihood: Tensor) -> dict[str, float | None]:
    """R-hat and the effective number of samples of chains (chain, draw), or of the halves of one; None if too short."""
    chains, draws = log_likelihood.shape
    if draws < (diagnostics.MIN_DRAWS if chains > 1 else 2 * diagnostics.MIN_DRAWS):
        return {"r_hat": None, "ess": None}
    r_hat, ess, _ = diagnostics.summarize(log_likelihood).worst
    known = math.isfinite(r_hat)
    return {"r_hat": r_hat if known else None, "ess": ess if known else None}
