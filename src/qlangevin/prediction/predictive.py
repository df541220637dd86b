"""The predictive distribution: predictions from outputs of a network, their average over samples, and its uncertainty.

With samples θ_1 .. θ_S of the posterior and p_s = link(f(x, θ_s)), the Bayesian model average is p = 1/S Σ p_s, and

                   softmax, sigmoid                      identity
    total          H(p), the entropy in nats             σ² + Var_s p_s
    aleatoric      1/S Σ H(p_s)                          σ², the noise of the data
    epistemic      H(p) - 1/S Σ H(p_s), the mutual       Var_s p_s
                   information of label and weights
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Average", "Link", "Uncertainty", "apply_link", "find_class_dim"]

Link: TypeAlias = Literal["softmax", "sigmoid", "identity"]


class Uncertainty(NamedTuple):
    """The average prediction and its uncertainty: total = aleatoric + epistemic.

    With softmax and sigmoid, entropies in nats: ``total`` of the average, ``aleatoric`` the mean of those of the samples'
    predictions, ``epistemic`` the mutual information of label and weights. With the identity, variances: ``aleatoric`` the
    noise of the data, ``epistemic`` the variance over samples. One number per example with softmax, one per output otherwise.
    """

    mean: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def find_class_dim(shape: tuple[int, ...], class_dim: int | None) -> int:
    """Return the dim of outputs (example, ...) that has the classes; None is dim 1 of two, and is refused for more."""
    if class_dim is None and len(shape) > 2:
        raise ValueError(
            f"outputs of shape {shape} do not say which dim has the classes: give Posterior.open class_dim=1 if they are "
            "(example, class, ...), as torch's cross_entropy takes them, or class_dim=-1 if they are (example, ..., class)"
        )
    dim = 1 if class_dim is None else class_dim + (len(shape) if class_dim < 0 else 0)
    if not 1 <= dim < len(shape) or shape[dim] < 2:
        along = "" if class_dim is None else f" along dim {class_dim}"
        raise ValueError(
            f"link='softmax' needs outputs (example, class, ...) with two classes or more{along}, got {shape}; "
            "for yes or no take link='sigmoid', for regression link='identity'"
        )
    return dim


def apply_link(output: Tensor, link: Link, class_dim: int | None = None) -> Tensor:
    """Return predictions of several samples from outputs (sample, example, ...); see `find_class_dim`."""
    output = output.to(
        torch.promote_types(output.dtype, torch.float32)
    )  # sums over samples need more than half precision
    if link != "softmax":
        return output.sigmoid() if link == "sigmoid" else output
    return output.softmax(1 + find_class_dim(tuple(output.shape[1:]), class_dim))


def entropy(p: Tensor, link: Link, dim: int) -> Tensor:
    """Return H(p) in nats: of the classes along a dim, or with sigmoid of each binary decision."""
    each: Tensor = torch.special.entr(p)
    return each.sum(dim) if link == "softmax" else each + torch.special.entr(1 - p)


class Average:
    """A running average of predictions, and of their spread if ``spread``; it keeps sums, not samples."""

    def __init__(self, link: Link, noise: float = 0.0, spread: bool = True, class_dim: int | None = None) -> None:
        self.link, self.noise, self.wants_spread, self.class_dim, self.count = link, noise, spread, class_dim, 0
        self.mean: Tensor = torch.zeros(())
        self.spread: Tensor = torch.zeros(())  # Σ H(p_s), or Σ (p_s - mean)²

    def add(self, p: Tensor) -> None:
        """Add predictions of some more samples, (sample, example, ...)."""
        mean = p.mean(0)
        shift, weight = mean - self.mean, len(p) / (self.count + len(p))
        if self.wants_spread and self.link == "identity":  # the parallel form of Welford's sum of squares
            self.spread = self.spread + (p - mean).square().sum(0) + shift.square() * (self.count * weight)
        elif self.wants_spread:
            self.spread = self.spread + entropy(p, self.link, 1 + self._find_dim(p[0])).sum(0)
        self.mean = self.mean + shift * weight
        self.count += len(p)

    def uncertainty(self) -> Uncertainty:
        spread = self.spread / self.count
        if self.link == "identity":
            noise = torch.full_like(spread, self.noise)
            return Uncertainty(self.mean, spread + noise, noise, spread)
        total = entropy(self.mean, self.link, self._find_dim(self.mean))
        aleatoric = torch.minimum(spread, total)  # Jensen: it is at most the total; rounding may differ
        return Uncertainty(self.mean, total, aleatoric, total - aleatoric)

    def _find_dim(self, p: Tensor) -> int:
        """Return the dim of the classes; without softmax there is none, and none is summed over."""
        return find_class_dim(tuple(p.shape), self.class_dim) if self.link == "softmax" else 0
