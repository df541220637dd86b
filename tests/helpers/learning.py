"""Models whose learning coefficients are known, for tests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qlangevin as ql

DATA = 500


def half_square(output: Tensor, target: Tensor, reduction: str = "none") -> Tensor:
    """Half the squared error: with noise of variance 1, the negative log likelihood up to a constant."""
    return (output.squeeze(-1) - target).square() / 2


HALF_SQUARE = ql.slt.supervised(half_square)


def regression(weights: int = 16, batch: int = DATA, seed: int = 0) -> tuple[nn.Linear, DataLoader[Any]]:
    """Linear regression at its minimum, with orthonormal inputs: L(w) = L(w*) + |w - w*|²/2."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linalg.qr(torch.randn(DATA, weights, generator=generator))[0] * math.sqrt(DATA)
    y = x @ (torch.randn(weights, generator=generator) * 0.1) + torch.randn(DATA, generator=generator)
    model = nn.Linear(weights, 1, bias=False)
    model.weight.data = (y @ x / DATA)[None]
    return model, DataLoader(TensorDataset(x, y), batch_size=batch)


def exact(settings: ql.slt.Settings, weights: int, curvature: float = 1.0) -> float:
    """λ̂ of SGLD on a quadratic loss, with the effects of localization and stepsize: the variance of its AR(1) process.

    w - w* is multiplied by 1 - εK/2 in each step, with K = nβ h + γ, and gets noise of variance ε: var = 1 / (K (1 - εK/4)).
    """
    k = settings.nbeta * curvature + settings.localization
    return settings.nbeta * curvature * weights / 2 / (k * (1 - settings.lr * k / 4))


def two_layers(seed: int = 0) -> tuple[nn.Module, DataLoader[Any]]:
    """A small classifier, trained to a flat loss, with dropout and batch normalisation."""
    torch.manual_seed(seed)
    x = torch.randn(96, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
