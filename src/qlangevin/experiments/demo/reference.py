"""The posterior of the demo's network as stored numbers: made by HMC, ``python -m benchmarks.demo_reference``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["LEVELS", "PATH", "Reference", "load_reference"]

PATH = Path(__file__).with_name("reference.json")
LEVELS = torch.cat((torch.tensor([0.001, 0.005, 0.01, 0.025]), torch.linspace(0.05, 0.95, 37),
                    torch.tensor([0.975, 0.99, 0.995, 0.999]))).double()  # fmt: skip


@dataclass(frozen=True, eq=False)
class Reference:
    """Mean, standard deviation and quantiles (level, point) of f on the grid, and how far the chains had converged."""

    mean: Tensor
    sd: Tensor
    quantiles: Tensor
    acceptance: float
    r_hat: float
    ess: float
    chains: int
    draws: int


def load_reference() -> Reference:
    """Read the numbers stored with the package."""
    found = json.loads(PATH.read_text(encoding="utf-8"))
    mean, sd, quantiles = (torch.tensor(found[name]).double() for name in ("mean", "sd", "quantiles"))
    figures = (found[name] for name in ("acceptance", "r_hat", "ess", "chains", "draws"))
    return Reference(mean, sd, quantiles, *figures)
