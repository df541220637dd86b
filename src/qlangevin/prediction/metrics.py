"""Metrics of predictions: error, NLL, Brier score, calibration, and AUROC of out-of-distribution examples.

Predictions are probabilities p, averaged over samples or not, of labels y:

    multiclass   p (N, C, ...), y (N, ...) integers: classes along dim 1, as in `torch.nn.functional.cross_entropy`
    binary       p and y of one shape, y 0 or 1: each entry is a decision of its own (multilabel too, and one-hot)

`Scores` sums over batches and processes. It is imported when first used, because it needs torchmetrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .scores import Scores

__all__ = ["Reliability", "Scored", "Scores", "auroc", "evaluate", "ood", "reliability"]

Predictions: TypeAlias = Tensor | Iterable[tuple[Tensor, Tensor]]
Uncertainties: TypeAlias = "Scored | Iterable[Scored | tuple[Scored, Tensor]]"

TINY = torch.finfo(
    torch.float32
).tiny  # p that underflowed counts as the smallest normal number, of which the log is -87.3


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


@dataclass(frozen=True, eq=False)
class Reliability:
    """Calibration by bins of confidence.

    Bin m holds the decisions whose confidence is in (``edges[m]``, ``edges[m + 1]``]; confidence 0 is in the first.

    ``confidence`` and ``accuracy`` are means over the bin, 0 where ``count`` is 0.
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def ece(self) -> float:
        """Σ_m |B_m|/n · |acc(B_m) - conf(B_m)|, the expected calibration error of Guo et al. (2017)."""
        return float((self.count * (self.accuracy - self.confidence).abs()).sum() / self.count.sum())

    @property
    def mce(self) -> float:
        """max_m |acc(B_m) - conf(B_m)|, the maximum calibration error."""
        return float((self.accuracy - self.confidence).abs().max())


def evaluate(predictions: Predictions, labels: Tensor | None = None, *, bins: int = 10) -> dict[str, float]:
    """Score probabilities: a tensor and its labels, or batches of both, such as `Posterior.predict_loader` yields.

        error   share of wrong decisions: argmax_c p_c ≠ y, or for binary labels (p > 1/2) ≠ y
        nll     mean of -log p(y); p below the smallest normal float32 counts as that, so that none is above 87.34
        brier   mean over examples of Σ_c (p_c - 1[y = c])², from 0 to 2; for binary labels mean of (p - y)², from 0 to 1
        ece     expected calibration error over ``bins`` bins, see `Reliability`; the confidence is max_c p_c or max(p, 1 - p)
        count   number of decisions

    Batches are read once; only sums are kept. The figures are of the predictions of this process; `Scores` adds up over
    processes.
    """
    return _update_scores(predictions, labels, bins).compute()


def reliability(predictions: Predictions, labels: Tensor | None = None, *, bins: int = 10) -> Reliability:
    """Return mean confidence and accuracy in each bin of confidence; arguments as those of `evaluate`."""
    return _update_scores(predictions, labels, bins).reliability()


def _update_scores(predictions: Predictions, labels: Tensor | None, bins: int) -> Scores:
    from .scores import Scores

    scores = Scores(bins, sync_on_compute=False)
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


def check(probabilities: Tensor, labels: Tensor) -> None:
    """Raise TypeError or ValueError unless these are probabilities and their labels, as the top of this file has them."""
    for name, value in (("probabilities", probabilities), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if not probabilities.is_floating_point():
        raise TypeError(f"probabilities must be floating point, got {probabilities.dtype}")
    binary, shape = probabilities.shape == labels.shape, tuple(probabilities.shape)
    if labels.ndim == 0 or not (binary or shape[:1] + shape[2:] == labels.shape):
        wanted = "they must be (N, C, ...) and (N, ...), or equal for binary labels"
        raise ValueError(f"shapes do not fit: probabilities {shape} and labels {tuple(labels.shape)}; {wanted}")
    if not binary and shape[1] < 2:
        raise ValueError(f"probabilities {shape} have {shape[1]} class; for binary labels give both the same shape")
    if labels.numel():
        _check_probabilities(probabilities, binary)
        _check_labels(labels, 2 if binary else shape[1], binary)
        if binary and len(shape) > 1 and shape[1] > 1 and _sum_to_one(probabilities) and _sum_to_one(labels):
            raise ValueError("these look like probabilities of classes with one-hot labels; give labels.argmax(1)")


def _check_probabilities(p: Tensor, binary: bool) -> None:
    low, high = (float(x) for x in p.aminmax())
    if low != low:  # aminmax of a NaN is NaN
        raise ValueError(f"probabilities must be numbers, got {int(p.isnan().sum())} NaN among {p.numel()}")
    slack = max(1e-3, torch.finfo(p.dtype).eps)  # bfloat16 rounds more coarsely than 1e-3
    hint = f"these look like logits; apply {'sigmoid' if binary else 'softmax'}"
    if low < -slack and high <= 0:
        hint = "these look like logarithms of probabilities; apply exp"
    if low < -slack or high > 1 + slack:
        raise ValueError(f"probabilities must be between 0 and 1, got values from {low:.4g} to {high:.4g}: {hint}")
    if not binary:
        least, most = (float(x) for x in p.sum(1, dtype=_wide_dtype(p)).aminmax())
        if least < 1 - slack or most > 1 + slack:
            hint = "normalize them; or, if each is a yes or no of its own, give labels of the same shape"
            raise ValueError(f"probabilities must sum to 1 along dim 1, got {least:.4g} to {most:.4g}: {hint}")


def _sum_to_one(x: Tensor) -> bool:
    return bool(((x.sum(1, dtype=_wide_dtype(x)) - 1).abs() < 1e-3).all())


def _check_labels(y: Tensor, classes: int, binary: bool) -> None:
    wanted = f"labels must be integers from 0 to {classes - 1}"
    if y.is_floating_point() and not binary:  # PyTorch's binary cross entropy wants 0.0 and 1.0
        raise ValueError(f"{wanted}, got {y.dtype}")
    wrong = y[(y < 0) | (y >= classes) | (y != y.long())]
    if len(wrong):
        raise ValueError(f"{wanted}, got {wrong[0].item():g}")


def log_likelihood(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return log p(y) for each label, in float64; p below the smallest normal float32 counts as that.

    A binary p that was rounded to 1 counts as 1 - ε/4, half-way to the next number below: 1 - p was not 0.
    """
    p, y = widen(probabilities), labels.long()
    if p.shape == y.shape:
        chosen = torch.where(y == 1, p, (1 - p).clamp_min(torch.finfo(probabilities.dtype).eps / 4))
    else:
        chosen = p.gather(1, y.unsqueeze(1)).squeeze(1)
    return chosen.clamp_min(TINY).log()


def widen(p: Tensor) -> Tensor:
    """Return probabilities in float64, cut to [0, 1]."""
    return p.to(_wide_dtype(p)).clamp(0, 1)


def _wide_dtype(x: Tensor) -> torch.dtype:
    """Return float64, or float32 on mps, which has no float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return P(a < b) + P(a = b)/2 for scores a of ``inside`` and b of ``outside``: the area under the ROC curve.

    Higher scores mean out of distribution. Pairs are counted here because torchmetrics would put scores beyond [0, 1] through
    a sigmoid first, after which 1000 and 1001 are the same.
    """
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.numel() == 0 or bool(scores.isnan().any()):
            got = f"{int(scores.isnan().sum())} NaN among {scores.numel()}"
            raise ValueError(f"{name} must be one score or more, and all of them numbers, got {got}")
    a = inside.detach().flatten().to(_wide_dtype(inside)).sort().values
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
