"""One-dimensional regression with a gap in the data, sampled by SGLD in full precision and in 8 bits.

    y = f(x) + ε,   ε ~ N(0, NOISE²),   all weights of f ~ N(0, 1)

Two models of f. `features` is linear in its weights, f(x) = √(2/D) Σ w_j cos(ω_j x + b_j) with fixed ω and b: the posterior is
Gaussian and known. `network` has a hidden layer of tanh: its reference is a long run of HMC (`reference`). Both models take the
gradient over all data, so that rounding is the only error beside the stepsize. Many chains run as the rows of one tensor, from
draws of the prior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantization import random
from ...quantization.random import Key
from ...sampling.sgld import SGLD
from ..processes import Progress
from .methods import Method

__all__ = ["GRID", "NOISE", "Features", "Network", "Sampled", "Schedule", "make_data", "sample"]

NOISE = 0.15
RECORDS = 40  # of each chain, after burn-in
GRID = torch.linspace(-2.5, 2.5, 101, device="cpu")


def make_data() -> tuple[Tensor, Tensor]:
    """Return 40 points on both sides of a gap from -0.6 to 0.9."""
    u = random.uniform(Key(11), 40).double()
    x = torch.where(u < 0.5, -2.0 + 2.8 * u, 0.9 + 2.2 * (u - 0.5))
    return x, torch.sin(2 * x) + 0.3 * x + NOISE * random.normal(Key(12), 40).double()


class Features:
    """A linear model on fixed random features, with its exact posterior."""

    name, format, size = "random features", "fixed8.3", 40

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.frequencies = 1.6 * random.normal(Key(13), self.size).double()
        self.phases = 2 * math.pi * random.uniform(Key(14), self.size).double()
        self.x, self.y, phi = x, y, self._features(x)
        self.precision = phi.T @ phi / NOISE**2 + torch.eye(self.size, dtype=torch.float64)
        self.mean = torch.linalg.solve(self.precision, phi.T @ y / NOISE**2)
        n = len(x)
        self._curvature, self._pull = (self.precision / n).float(), (self.precision @ self.mean / n).float()

    def _features(self, x: Tensor) -> Tensor:
        return math.sqrt(2 / self.size) * torch.cos(x.double()[:, None] * self.frequencies + self.phases)

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the gradient of U/N: H (w - mean)/N, H the precision of the posterior."""
        return torch.addmm(self._pull, weights, self._curvature, beta=-1)

    def predict(self, weights: Tensor, x: Tensor) -> Tensor:
        """Return f(x) of each row of weights."""
        return weights.double() @ self._features(x).T

    def exact(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of f(x) under the exact posterior."""
        phi = self._features(x)
        return phi @ self.mean, (phi * torch.linalg.solve(self.precision, phi.T).T).sum(1).sqrt()


class Network:
    """A network with one hidden layer: f(x) = S Σ w_j tanh(u_j x + 1.5 b_j) with S = 1.5/√H; its weights are rows (w, u, b)."""

    name, format, hidden = "network", "fixed8.4", 20
    size = 3 * hidden

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.scale = x, y, 1.5 / math.sqrt(self.hidden)

    def _hidden(self, weights: Tensor, x: Tensor) -> Tensor:
        _, u, b = weights.unflatten(1, (3, self.hidden)).unbind(1)
        return torch.tanh(x[None, :, None] * (2 * u)[:, None] + (1.5 * b)[:, None])

    def predict(self, weights: Tensor, x: Tensor) -> Tensor:
        """Return f(x) of each row of weights."""
        h = self._hidden(weights, x.to(weights.dtype))
        return self.scale * torch.bmm(h, weights[:, : self.hidden, None]).squeeze(2)

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the gradient of U/N, with U = Σ (y - f(x))²/(2 NOISE²) + |w|²/2; written out, it takes half the time."""
        x, y, w = self.x.to(weights.dtype), self.y.to(weights.dtype), weights[:, : self.hidden]
        h = self._hidden(weights, x)
        f = self.scale * torch.bmm(h, w.unsqueeze(2)).squeeze(2)
        error = (self.scale / (NOISE**2 * len(x))) * (f - y)
        inner = (1 - h * h) * error.unsqueeze(2)
        by_u = 2 * w * (x @ inner)
        parts = torch.bmm(error.unsqueeze(1), h).squeeze(1), by_u, 1.5 * w * inner.sum(1)
        return torch.cat(parts, 1).add_(weights, alpha=1 / len(x))

    def energy(self, weights: Tensor) -> Tensor:
        """Return U of each row of weights."""
        error = self.y.to(weights.dtype) - self.predict(weights, self.x)
        return (error / NOISE).square().sum(1) / 2 + weights.square().sum(1) / 2


@dataclass(frozen=True)
class Schedule:
    """Chains, stepsize α and steps; the first two thirds are burn-in."""

    chains: int
    alpha: float
    steps: int


@dataclass(frozen=True, eq=False)
class Sampled:
    """Values of f on `GRID` [chain, draw, point]."""

    method: Method
    values: Tensor


def sample(model: Features | Network, method: Method, schedule: Schedule, progress: Progress) -> Sampled:
    """Run all chains with one method. ``progress`` receives the share of the steps just taken."""
    n, steps = len(model.x), schedule.steps
    weights = torch.nn.Parameter(random.normal(Key(15), schedule.chains * model.size).view(schedule.chains, -1))
    low = model.format if method.low_precision else None
    sampler = SGLD([weights], lr=schedule.alpha * n, num_data=n, weights=low, rounding=method.rounding, seed=16)
    every, tick, kept = max(1, steps // 3 // RECORDS), max(1, steps // 50), []
    with torch.no_grad():
        for k in range(1, steps + 1):
            weights.grad = model.gradient(weights)
            sampler.step()
            if k > steps * 2 // 3 and (steps - k) % every == 0:
                kept.append(model.predict(weights, GRID))
            if k % tick == 0:
                progress(f"{model.name}, {method.name}", tick / steps)
    values = torch.stack(kept, 1).double()
    return Sampled(method, values)
