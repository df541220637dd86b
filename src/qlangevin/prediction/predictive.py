"""From what a network gives to a prediction, and from many predictions to their average and its uncertainty.

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

__all__ = ["Average", "Link", "Uncertainty", "predicted"]

Link: TypeAlias = Literal["softmax", "sigmoid", "identity"]


class Uncertainty(NamedTuple):
    """The average, and how uncertain it is: total = aleatoric + epistemic.

    With softmax and sigmoid these are entropies in nats: of the average, the mean entropy of the samples' own predictions, and
    the difference, which is the mutual information of label and weights. With the identity they are variances: the noise of
    the data plus the variance over samples, the first, and the second. One number an example with softmax, one an output
    otherwise.
    """

    mean: Tensor
    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def predicted(output: Tensor, link: Link) -> Tensor:
    """Predictions of several samples from outputs (sample, example, ...); classes are along the next dim, as in torch."""
    output = output.to(torch.promote_types(output.dtype, torch.float32))  # half precision is for weights, not for sums
    if link != "softmax":
        return output.sigmoid() if link == "sigmoid" else output
    if output.dim() < 3 or output.shape[2] < 2:
        raise ValueError(
            f"link='softmax' needs outputs (example, class, ...) with two classes or more, got {tuple(output.shape[1:])}; "
            "for yes or no take link='sigmoid', for regression link='identity'"
        )
    return output.softmax(2)


def entropy(p: Tensor, link: Link, dim: int) -> Tensor:
    """H(p) in nats: of the classes along a dim, or of each yes and no."""
    each: Tensor = torch.special.entr(p)
    return each.sum(dim) if link == "softmax" else each + torch.special.entr(1 - p)


class Average:
    """Predictions that come a few samples at a time, averaged, with their spread if asked for; no sample is kept."""

    def __init__(self, link: Link, noise: float = 0.0, spread: bool = True) -> None:
        self.link, self.noise, self.wants_spread, self.count = link, noise, spread, 0
        self.mean: Tensor = torch.zeros(())
        self.spread: Tensor = torch.zeros(())  # Σ H(p_s), or Σ (p_s - mean)²

    def add(self, p: Tensor) -> None:
        """Predictions of some more samples, (sample, example, ...)."""
        mean = p.mean(0)
        shift, weight = mean - self.mean, len(p) / (self.count + len(p))
        if self.wants_spread and self.link == "identity":  # the parallel form of Welford's sum of squares
            self.spread = self.spread + (p - mean).square().sum(0) + shift.square() * (self.count * weight)
        elif self.wants_spread:
            self.spread = self.spread + entropy(p, self.link, 2).sum(0)
        self.mean = self.mean + shift * weight
        self.count += len(p)

    def uncertainty(self) -> Uncertainty:
        spread = self.spread / self.count
        if self.link == "identity":
            noise = torch.full_like(spread, self.noise)
            return Uncertainty(self.mean, spread + noise, noise, spread)
        total = entropy(self.mean, self.link, 1)
        aleatoric = torch.minimum(spread, total)  # which it is, but for rounding
        return Uncertainty(self.mean, total, aleatoric, total - aleatoric)
