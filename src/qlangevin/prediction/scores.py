"""Error, NLL, Brier score and calibration error as a torchmetrics metric, which sums over batches and processes.

The calibration error of torchmetrics is not used: it has bins [a, b) and one more for a confidence of 1, where Guo et al. (2017)
have (a, b]. The paper's reference code has 9 bins where it says 10.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from .._validate import check_integer
from .probabilities import Reliability, check_probabilities, drop_ignored, log_likelihood, move_classes, widen

__all__ = ["Scores"]


class Scores(Metric):
    """The figures of `evaluate` as a torchmetrics metric: ``update(probabilities, labels)`` for each batch, then ``compute()``.

    ``compute`` and `reliability` sum over the processes of torch.distributed, so every process has to call them. The state is
    sums in float64, on the device of the first batch. (mps has no float64: its batches are summed in float32, and the sums
    kept on the CPU.)
    """

    is_differentiable = False
    full_state_update = False

    table: Tensor  # a row for each bin: number of decisions, number of right ones, sum of confidences
    sums: Tensor  # of -log p(y) and of the squared error

    def __init__(self, bins: int = 10, class_dim: int = 1, ignore_index: int | None = None, **options: Any) -> None:
        bins = check_integer("bins", bins, 1)
        super().__init__(**options)
        self.bins, self.class_dim, self.ignore_index = bins, class_dim, ignore_index
        self.add_state("table", torch.zeros(bins, 3, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        probabilities = move_classes(probabilities, labels, self.class_dim)
        probabilities, labels = drop_ignored(probabilities, labels, self.ignore_index)
        check_probabilities(probabilities, labels)
        if probabilities.device.type != "mps":
            if self.update_count <= 1:
                self.to(probabilities.device)
            probabilities = probabilities.to(self.device)
        labels = labels.to(probabilities.device)
        confidence, rows, squares = _score_decisions(probabilities, labels)
        # Edges are rounded to the dtype of the probabilities, so that float32 0.3 is on the edge 0.3, in the bin (0.2, 0.3].
        inner = _bin_edges(self.bins)[1:-1].to(probabilities.dtype).to(probabilities.device)
        table = rows.new_zeros(self.bins, 3).index_add(0, torch.bucketize(confidence, inner), rows)
        sums = torch.stack((-log_likelihood(probabilities, labels).sum(), squares.sum()))
        self.table = self.table + table.to(self.table.device, self.table.dtype)
        self.sums = self.sums + sums.to(self.sums.device, self.sums.dtype)

    def compute(self) -> dict[str, float]:
        bins = self._summarize_bins()
        count = int(bins.count.sum())
        nll, brier = (self.sums / count).tolist()
        wrong = count - int(self.table[:, 1].sum())
        return {"error": wrong / count, "nll": nll, "brier": brier, "ece": bins.ece, "count": count}

    def reliability(self) -> Reliability:
        """Return the bins behind the calibration error."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self.sync_on_compute):
            return self._summarize_bins()

    def _summarize_bins(self) -> Reliability:
        count, right, confidence = self.table.unbind(1)
        if not bool(count.any()):
            raise ValueError("there is nothing to evaluate: no batch had an example")
        some = count.clamp_min(1)
        return Reliability(_bin_edges(self.bins).to(count.device), confidence / some, right / some, count.long())


def _score_decisions(p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (confidence, row of `Scores.table`, squared error) of each decision."""
    y, wide = labels.long(), widen(p)
    if p.shape == y.shape:
        yes = p > 0.5
        confidence, right = torch.where(yes, p, 1 - p), yes == y
        sure, squares = torch.where(yes, wide, 1 - wide), (wide - y).square()
    else:
        confidence, chosen = p.max(1)
        sure, right, truth = widen(confidence), chosen == y, y.unsqueeze(1)
        squares = wide.scatter(1, truth, wide.gather(1, truth) - 1).square().sum(1)
    rows = torch.stack([x.to(wide.dtype).flatten() for x in (torch.ones_like(right), right, sure)], 1)
    return confidence.flatten(), rows, squares


def _bin_edges(bins: int) -> Tensor:
    return torch.arange(bins + 1, dtype=torch.float64) / bins
