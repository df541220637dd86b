"""The paper's methods as settings of SGLD, and a small classification problem to run them on."""

from typing import Any

import torch
from torch import Tensor, nn

METHODS: dict[str, dict[str, Any]] = {
    "SGDFP": {"temperature": 0.0},
    "SGLDFP": {},
    "SGDLP-F": {"temperature": 0.0, "weights": "bfp8", "gradients": "bfp8", "accumulator": "fp32"},
    "SGDLP-L": {"temperature": 0.0, "weights": "bfp8", "gradients": "bfp8", "rounding": "stochastic"},
    "SGLDLP-F": {"weights": "bfp8", "gradients": "bfp8", "accumulator": "fp32"},
    "naive SGLDLP-L": {"weights": "bfp8", "gradients": "bfp8", "rounding": "stochastic"},
    "VC SGLDLP-L": {"weights": "bfp8", "gradients": "bfp8"},
    "VC SGLDLP-L, as printed": {"weights": "bfp8", "gradients": "bfp8", "algorithm": "paper"},
    "VC SGLDLP-L, fixed": {"weights": "fixed8.5", "gradients": "fixed8.6"},
    "VC SGLDLP-L, float": {"weights": "e4m3", "gradients": "fp8_e5m2"},
    "8 bits over 16": {"weights": "bfp8", "accumulator": "bfp16"},
    "nearest": {"weights": "bfp8/32", "gradients": "bfp8/tensor", "rounding": "nearest"},
}


def problem(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model of two layers, inputs and labels."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))
    return model, torch.randn(32, 6), torch.randint(0, 3, (32,))


def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Compute new gradients and return the loss."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def values(model: nn.Module) -> list[Tensor]:
    """Return copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]
