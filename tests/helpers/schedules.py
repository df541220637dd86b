"""Schedules of every kind, and short chains to run them on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from qlangevin import SGLD
from qlangevin.sampling.schedules import ConstantLR, CyclicalLR, LinearDecayLR, Schedule, StepDecayLR

Make = Callable[[torch.optim.Optimizer], Schedule]

STEPS = 12
SCHEDULES: dict[str, Make] = {
    "constant": lambda sampler: ConstantLR(sampler, STEPS, 3),
    "linear": lambda sampler: LinearDecayLR(sampler, STEPS, 2),
    "step": lambda sampler: StepDecayLR(sampler, STEPS, 2),
    "cyclical": lambda sampler: CyclicalLR(sampler, STEPS, 5, 1, exploration=0.5),
    "cyclical with SGD": lambda sampler: CyclicalLR(sampler, STEPS, 2, 2, exploration=0.6, exploration_temperature=0),
}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def sgd(lr: Any = 0.1) -> torch.optim.SGD:
    """Return an optimizer of one number."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def chain(lr: float = 0.1, temperature: float = 1.0) -> tuple[nn.Module, SGLD]:
    """Return a small model and its sampler, in two groups that differ in learning rate and temperature."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    groups: list[dict[str, Any]] = [
        {"params": [*model[0].parameters()]},
        {"params": [*model[2].parameters()], "lr": 2 * lr, "temperature": temperature / 2},
    ]
    return model, SGLD(groups, lr=lr, num_data=100, temperature=temperature, weights="bfp8")


def run(model: nn.Module, sampler: SGLD, schedule: Schedule, steps: int) -> list[Any]:
    """Return for each step lr and temperature of the groups before it, the weights after it, and whether they are a sample."""
    x, seen = torch.arange(6.0).view(2, 3) / 3, []
    for _ in range(steps):
        used = [(group["lr"], group["temperature"]) for group in sampler.param_groups]
        sampler.zero_grad()
        model(x).square().mean().backward()
        sampler.step()
        schedule.step()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
        seen.append((used, weights, schedule.collect, schedule.get_last_lr()))
    return seen
