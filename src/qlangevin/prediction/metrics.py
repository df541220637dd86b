"""Metrics of predictions: error, NLL, Brier score, calibration, and AUROC of out-of-distribution examples.

Predictions are probabilities of labels, averaged over samples or not; `probabilities` says which shapes they have.
`Scores` sums over batches and processes. It is imported when first used, because it needs torchmetrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from .probabilities import Reliability, log_likelihood, wide_dtype

if TYPE_CHECKING:
    from .scores import Scores

__all__ = ["Reliability", "Scored", "Scores", "auroc", "evaluate", "log_likelihood", "ood", "reliability"]

Predictions: TypeAlias = Tensor | Iterable[tuple[Tensor, Tensor]]
Uncertainties: TypeAlias = "Scored | Iterable[Scored | tuple[Scored, Tensor]]"


def __getattr__(name: str) -> Any:
    if name == "Scores":
        from .scores import Scores

        return Scores
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@runtime_checkable
class Scored(Protocol):
    """The uncertainty about some examples, as `Posterior.uncertainty` returns it."""

    @property
    def total(self) -> Tensor:
        """Predictive entropy H[E p]."""

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights, H[E p] - E H[p]."""


def evaluate(
    predictions: Predictions,
    labels: Tensor | None = None,
    *,
    bins: int = 10,
    class_dim: int = 1,
    ignore_index: int | None = None,
) -> dict[str, float]:
    """Score probabilities: a tensor and its labels, or batches of both, such as `Posterior.predict_loader` yields.

        error   share of wrong decisions: argmax_c p_c ≠ y, or for binary labels (p > 1/2) ≠ y
        nll     mean of -log p(y); p below the smallest normal float32 counts as that, so that none is above 87.34
        brier   mean over examples of Σ_c (p_c - 1[y = c])², from 0 to 2; for binary labels mean of (p - y)², from 0 to 1
        ece     expected calibration error over ``bins`` bins, see `Reliability`; the confidence is max_c p_c or max(p, 1 - p)
        count   number of decisions

    Classes are along dim ``class_dim`` of the probabilities: -1 for (example, ..., class). Labels that are ``ignore_index``, such
    as the -100 of tokens that nobody predicts, are left out. Batches are read once; only sums are kept. The figures are of the
    predictions of this process; `Scores` adds up over processes.
    """
    return _update_scores(predictions, labels, bins, class_dim, ignore_index).compute()


def reliability(
    predictions: Predictions,
    labels: Tensor | None = None,
    *,
    bins: int = 10,
    class_dim: int = 1,
    ignore_index: int | None = None,
) -> Reliability:
    """Return mean confidence and accuracy in each bin of confidence; arguments as those of `evaluate`."""
    return _update_scores(predictions, labels, bins, class_dim, ignore_index).reliability()


def _update_scores(
    predictions: Predictions, labels: Tensor | None, bins: int, class_dim: int, ignore_index: int | None
) -> Scores:
    from .scores import Scores

    scores = Scores(bins, class_dim, ignore_index, sync_on_compute=False)
    for probabilities, truth in _batches(predictions, labels):
        scores.update(probabilities, truth)
    if not scores.update_called:
        raise ValueError("predictions has no batches; if it is a generator, it may have been read already")
    return scores


def _batches(predictions: Predictions, labels: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(predictions, Tensor):
        if labels is None:
            raise TypeError("labels are missing: with a tensor of probabilities pass the labels too")
        yield predictions, labels
        return
    if labels is not None or not isinstance(predictions, Iterable):
        wanted = "a tensor if labels are given, or else an iterable of pairs (probabilities, labels)"
        raise TypeError(f"predictions must be {wanted}, got {type(predictions).__name__}")
    for item in predictions:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            got = f"{len(item)} things" if isinstance(item, (tuple, list)) else type(item).__name__
            raise TypeError(f"predictions must yield pairs (probabilities, labels), got {got}")
        yield item[0], item[1]


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return P(a < b) + P(a = b)/2 for scores a of ``inside`` and b of ``outside``: the area under the ROC curve.

    Higher scores mean out of distribution. Pairs are counted here because torchmetrics would put scores beyond [0, 1] through
    a sigmoid first, after which 1000 and 1001 are the same.
    """
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.numel() == 0 or bool(scores.isnan().any()):
            got = f"{int(scores.isnan().sum())} NaN among {scores.numel()}"
            raise ValueError(f"{name} must be one score or more, and all of them numbers, got {got}")
    a = inside.detach().flatten().to(wide_dtype(inside)).sort().values
    b = outside.detach().flatten().to(a.device, a.dtype)
    below, up_to = torch.searchsorted(a, b), torch.searchsorted(a, b, right=True)
    return int((below + up_to).sum()) / (2 * len(a) * len(b))


def ood(inside: Uncertainties, outside: Uncertainties) -> dict[str, float]:
    """Score how well uncertainty tells examples of another distribution from those of the model's own, by `auroc`.

    Keys are "entropy", of the prediction, and "mutual_information", of label and weights. Each argument is what
    `Posterior.uncertainty` returns, or batches of it, alone or with labels, such as `Posterior.uncertainty_loader` yields.
    An example with several labels or pixels has the sum of their uncertainties.
    """
    a, b = _collect_uncertainty("inside", inside), _collect_uncertainty("outside", outside)
    return {"entropy": auroc(a[0], b[0]), "mutual_information": auroc(a[1], b[1])}


def _collect_uncertainty(name: str, given: Any) -> tuple[Tensor, Tensor]:
    """Return (entropy, mutual information) of all examples, one number each."""
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    for item in given if isinstance(given, Iterable) and not isinstance(given, Scored) else (given,):
        scored = item[0] if isinstance(item, (tuple, list)) and item and not isinstance(item, Scored) else item
        if not isinstance(scored, Scored):
            raise TypeError(f"{name} must have total and epistemic, or yield what has, got {type(scored).__name__}")
        for kept, scores in zip(both, (scored.total, scored.epistemic), strict=True):
            kept.append(scores.flatten(1).sum(1) if scores.ndim > 1 else scores.reshape(-1))
    if not both[0]:
        raise ValueError(f"{name} has no batches; if it is a generator, it may have been read already")
    return torch.cat(both[0]), torch.cat(both[1])
