"""How good predictions are, and whether they know it: error, NLL, Brier score, calibration, out-of-distribution AUROC.

Predictions are probabilities p, averaged over samples or not, of labels y:

    multiclass   p (N, C, ...), y (N, ...) integers: classes along dim 1, as in `torch.nn.functional.cross_entropy`
    binary       p and y of one shape, y 0 or 1: each entry is a decision of its own (multilabel too, and one-hot)

torchmetrics adds up over batches and processes. Its own calibration error is not used: it has bins [a, b) and one more for a
confidence of 1, where Guo et al. (2017) have (a, b]. The paper's reference code has 9 bins where it says 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["Reliability", "Scored", "Scores", "auroc", "evaluate", "ood", "reliability"]

Predictions: TypeAlias = Tensor | Iterable[tuple[Tensor, Tensor]]
Uncertainties: TypeAlias = "Scored | Iterable[Scored | tuple[Scored, Tensor]]"

TINY = torch.finfo(torch.float32).tiny  # log of what underflowed is that of the smallest normal number: -87.3


@runtime_checkable
class Scored(Protocol):
    """The uncertainty about some examples, such as `Posterior.uncertainty` gives."""

    @property
    def total(self) -> Tensor:
        """Predictive entropy H[E p]."""

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights, H[E p] - E H[p]."""


@dataclass(frozen=True, eq=False)
class Reliability:
    """Bin m holds the decisions whose confidence is in (``edges[m]``, ``edges[m + 1]``]; confidence 0 is in the first.

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


class Scores(Metric):
    """The figures of `evaluate` as a torchmetrics metric: ``update(probabilities, labels)`` a batch, then ``compute()``.

    ``compute`` and `reliability` add up over the processes of torch.distributed, so each of them has to call. What is kept
    are sums in float64, on the device of the first batch. (mps has no float64: its batches are summed in float32, and the
    sums kept on the CPU.)
    """

    is_differentiable = False
    full_state_update = False

    table: Tensor  # a row for each bin: number of decisions, number of right ones, sum of confidences
    sums: Tensor  # of -log p(y) and of the squared error

    def __init__(self, bins: int = 10, **options: Any) -> None:
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise ValueError(f"bins must be a positive integer, got {bins!r}")
        super().__init__(**options)
        self.bins = bins
        self.add_state("table", torch.zeros(bins, 3, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        check(probabilities, labels)
        if probabilities.device.type != "mps":
            if self.update_count <= 1:
                self.to(probabilities.device)
            probabilities = probabilities.to(self.device)
        labels = labels.to(probabilities.device)
        confidence, rows, squares = _decisions(probabilities, labels)
        # Edges are rounded as the probabilities are, so that float32 0.3 is on the edge 0.3, and in the bin (0.2, 0.3].
        inner = _edges(self.bins)[1:-1].to(probabilities.dtype).to(probabilities.device)
        table = rows.new_zeros(self.bins, 3).index_add(0, torch.bucketize(confidence, inner), rows)
        sums = torch.stack((-log_likelihood(probabilities, labels).sum(), squares.sum()))
        self.table = self.table + table.to(self.table.device, self.table.dtype)
        self.sums = self.sums + sums.to(self.sums.device, self.sums.dtype)

    def compute(self) -> dict[str, float]:
        bins = self._reliability()
        count = int(bins.count.sum())
        nll, brier = (self.sums / count).tolist()
        wrong = count - int(self.table[:, 1].sum())
        return {"error": wrong / count, "nll": nll, "brier": brier, "ece": bins.ece, "count": count}

    def reliability(self) -> Reliability:
        """The bins behind the calibration error."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self.sync_on_compute):
            return self._reliability()

    def _reliability(self) -> Reliability:
        count, right, confidence = self.table.unbind(1)
        if not bool(count.any()):
            raise ValueError("there is nothing to evaluate: no batch had an example")
        some = count.clamp_min(1)
        return Reliability(_edges(self.bins).to(count.device), confidence / some, right / some, count.long())


def evaluate(predictions: Predictions, labels: Tensor | None = None, *, bins: int = 10) -> dict[str, float]:
    """How good probabilities are: a tensor and its labels, or batches of both, such as `Posterior.predict_loader` yields.

        error   share of wrong decisions: argmax_c p_c ≠ y, or for binary labels (p > 1/2) ≠ y
        nll     mean of -log p(y); p below the smallest normal float32 counts as that, so that none is above 87.34
        brier   mean over examples of Σ_c (p_c - 1[y = c])², from 0 to 2; for binary labels mean of (p - y)², from 0 to 1
        ece     expected calibration error over ``bins`` bins, see `Reliability`; the confidence is max_c p_c or max(p, 1 - p)
        count   number of decisions

    Batches are read once, and nothing of them is kept but sums. These are figures of the predictions given here, in this
    process; `Scores` adds up over processes.
    """
    return _scores(predictions, labels, bins).compute()


def reliability(predictions: Predictions, labels: Tensor | None = None, *, bins: int = 10) -> Reliability:
    """Mean confidence and accuracy in each bin of confidence; arguments as those of `evaluate`."""
    return _scores(predictions, labels, bins).reliability()


def _scores(predictions: Predictions, labels: Tensor | None, bins: int) -> Scores:
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
    """Refuse what cannot be probabilities and labels that belong together; see the top of this file."""
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
        least, most = (float(x) for x in p.sum(1, dtype=_wide(p)).aminmax())
        if least < 1 - slack or most > 1 + slack:
            hint = "normalize them; or, if each is a yes or no of its own, give labels of the same shape"
            raise ValueError(f"probabilities must sum to 1 along dim 1, got {least:.4g} to {most:.4g}: {hint}")


def _sum_to_one(x: Tensor) -> bool:
    return bool(((x.sum(1, dtype=_wide(x)) - 1).abs() < 1e-3).all())


def _check_labels(y: Tensor, classes: int, binary: bool) -> None:
    wanted = f"labels must be integers from 0 to {classes - 1}"
    if y.is_floating_point() and not binary:  # PyTorch's binary cross entropy wants 0.0 and 1.0
        raise ValueError(f"{wanted}, got {y.dtype}")
    wrong = y[(y < 0) | (y >= classes) | (y != y.long())]
    if len(wrong):
        raise ValueError(f"{wanted}, got {wrong[0].item():g}")


def log_likelihood(probabilities: Tensor, labels: Tensor) -> Tensor:
    """log p(y) for each label, in float64; p below the smallest normal float32 counts as that.

    A binary p that was rounded to 1 counts as 1 - ε/4, half-way to the next number below: 1 - p was not 0.
    """
    p, y = _exact(probabilities), labels.long()
    if p.shape == y.shape:
        chosen = torch.where(y == 1, p, (1 - p).clamp_min(torch.finfo(probabilities.dtype).eps / 4))
    else:
        chosen = p.gather(1, y.unsqueeze(1)).squeeze(1)
    return chosen.clamp_min(TINY).log()


def _decisions(p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(confidence, what it adds to `Scores.table`, squared error) of each decision."""
    y, wide = labels.long(), _exact(p)
    if p.shape == y.shape:
        yes = p > 0.5
        confidence, right = torch.where(yes, p, 1 - p), yes == y
        sure, squares = torch.where(yes, wide, 1 - wide), (wide - y).square()
    else:
        confidence, chosen = p.max(1)
        sure, right, truth = _exact(confidence), chosen == y, y.unsqueeze(1)
        squares = wide.scatter(1, truth, wide.gather(1, truth) - 1).square().sum(1)
    rows = torch.stack([x.to(wide.dtype).flatten() for x in (torch.ones_like(right), right, sure)], 1)
    return confidence.flatten(), rows, squares


def _exact(p: Tensor) -> Tensor:
    return p.to(_wide(p)).clamp(0, 1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def _edges(bins: int) -> Tensor:
    return torch.arange(bins + 1, dtype=torch.float64) / bins


def auroc(inside: Tensor, outside: Tensor) -> float:
    """P(a < b) + P(a = b)/2 for scores a of ``inside`` and b of ``outside``: the area under the ROC curve.

    Higher scores mean out of distribution. It is counted, not integrated: torchmetrics would put scores beyond [0, 1] through
    a sigmoid first, after which 1000 and 1001 are the same.
    """
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.numel() == 0 or bool(scores.isnan().any()):
            got = f"{int(scores.isnan().sum())} NaN among {scores.numel()}"
            raise ValueError(f"{name} must be one score or more, and all of them numbers, got {got}")
    a = inside.detach().flatten().to(_wide(inside)).sort().values
    b = outside.detach().flatten().to(a.device, a.dtype)
    below, up_to = torch.searchsorted(a, b), torch.searchsorted(a, b, right=True)
    return int((below + up_to).sum()) / (2 * len(a) * len(b))


def ood(inside: Uncertainties, outside: Uncertainties) -> dict[str, float]:
    """How well uncertainty tells examples of another distribution from those of the model's own: `auroc` of two scores.

    Keys are "entropy", of the prediction, and "mutual_information", of label and weights. Each argument is what
    `Posterior.uncertainty` gives, or batches of it, alone or with labels, such as `Posterior.uncertainty_loader` yields.
    An example with several labels or pixels has the sum of theirs.
    """
    a, b = _uncertainty("inside", inside), _uncertainty("outside", outside)
    return {"entropy": auroc(a[0], b[0]), "mutual_information": auroc(a[1], b[1])}


def _uncertainty(name: str, given: Any) -> tuple[Tensor, Tensor]:
    """(entropy, mutual information) of all examples, one number each."""
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
