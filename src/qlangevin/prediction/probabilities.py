"""Probabilities p of labels y: checks, log likelihoods, and calibration by bins.

multiclass   p (N, C, ...), y (N, ...) integers: classes along dim 1, as in `torch.nn.functional.cross_entropy`
binary       p and y of one shape, y 0 or 1: each entry is a decision of its own (multilabel too, and one-hot)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Reliability",
    "check_probabilities",
    "drop_ignored",
    "log_likelihood",
    "move_classes",
    "wide_dtype",
    "widen",
]

REGRESSION = (
    "evaluate scores classes; for regression see diagnostics.log_likelihood, of a posterior with link='identity'"
)
TINY = torch.finfo(torch.float32).tiny  # a p that underflowed counts as this, and its log is -87.3


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


def move_classes(probabilities: Tensor, labels: Tensor, class_dim: int) -> Tensor:
    """Return multiclass probabilities with their classes along dim 1; binary ones, of the labels' shape, as they are."""
    if not (isinstance(probabilities, Tensor) and isinstance(labels, Tensor)) or probabilities.shape == labels.shape:
        return probabilities  # `check_probabilities` says what is wrong
    if class_dim == 1 or probabilities.ndim < 2:
        return probabilities
    if not -probabilities.ndim < class_dim < probabilities.ndim or class_dim == 0:
        raise ValueError(f"class_dim must be a dim of {tuple(probabilities.shape)} other than 0, got {class_dim}")
    return probabilities.movedim(class_dim, 1)


def drop_ignored(probabilities: Tensor, labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Return probabilities and labels without those whose label is to be ignored; classes are along dim 1."""
    if ignore_index is None or not (isinstance(probabilities, Tensor) and isinstance(labels, Tensor)):
        return probabilities, labels  # `check_probabilities` says what is wrong
    kept = labels != ignore_index
    if bool(kept.all()):
        return probabilities, labels
    if probabilities.shape == labels.shape:
        return probabilities[kept], labels[kept]
    if probabilities.ndim != labels.ndim + 1:
        return probabilities, labels
    return probabilities.movedim(1, -1)[kept.to(probabilities.device)], labels[kept]


def check_probabilities(probabilities: Tensor, labels: Tensor) -> None:
    """Raise TypeError or ValueError unless these are probabilities and their labels, as the top of this file has them."""
    for name, value in (("probabilities", probabilities), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if not probabilities.is_floating_point():
        raise TypeError(f"probabilities must be floating point, got {probabilities.dtype}")
    binary, shape = probabilities.shape == labels.shape, tuple(probabilities.shape)
    if labels.ndim == 0 or not (binary or shape[:1] + shape[2:] == labels.shape):
        wanted = "they must be (N, C, ...) and (N, ...), or equal for binary labels"
        if labels.ndim and shape[:-1] == labels.shape:
            wanted += "; if the last dim has the classes, class_dim=-1 says so"
        raise ValueError(f"shapes do not fit: probabilities {shape} and labels {tuple(labels.shape)}; {wanted}")
    if not binary and shape[1] < 2:
        hint = REGRESSION if labels.is_floating_point() else "for binary labels give both the same shape"
        raise ValueError(f"probabilities {shape} have {shape[1]} class; {hint}")
    if labels.numel():
        _check_labels(labels, 2 if binary else shape[1], binary)
        _check_range(probabilities, binary)
        if binary and len(shape) > 1 and shape[1] > 1 and _sum_to_one(probabilities) and _sum_to_one(labels):
            raise ValueError("these look like probabilities of classes with one-hot labels; give labels.argmax(1)")


def _check_range(p: Tensor, binary: bool) -> None:
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
        least, most = (float(x) for x in p.sum(1, dtype=wide_dtype(p)).aminmax())
        if least < 1 - slack or most > 1 + slack:
            hint = "normalize them; or, if each is a yes or no of its own, give labels of the same shape"
            raise ValueError(f"probabilities must sum to 1 along dim 1, got {least:.4g} to {most:.4g}: {hint}")


def _sum_to_one(x: Tensor) -> bool:
    return bool(((x.sum(1, dtype=wide_dtype(x)) - 1).abs() < 1e-3).all())


def _check_labels(y: Tensor, classes: int, binary: bool) -> None:
    wanted = f"labels must be integers from 0 to {classes - 1}"
    if y.is_floating_point() and not binary:  # PyTorch's binary cross entropy wants 0.0 and 1.0
        raise ValueError(f"{wanted}, got {y.dtype}; {REGRESSION}")
    wrong = y[(y < 0) | (y >= classes) | (y != y.long())]
    if len(wrong):
        hint = f"; {REGRESSION}" if y.is_floating_point() else ""
        hint = "; ignore_index=-100 leaves such labels out" if wrong[0] == -100 else hint
        raise ValueError(f"{wanted}, got {wrong[0].item():g}{hint}")


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
    return p.to(wide_dtype(p)).clamp(0, 1)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return float64, or float32 on mps, which has no float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64
