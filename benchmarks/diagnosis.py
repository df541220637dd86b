"""``python -m benchmarks.diagnosis``: the time that `SGLD.diagnose` costs a chain.

Every hundredth step keeps some rows of each gradient (``keep``), which is compared with the sampler's own step, without the
forward and the backward pass. ``diagnose`` is one call, with the search for remedies: the settings are those in which all of them
are searched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import qlangevin as ql
from qlangevin.experiments.models import MLP, ResNet18
from qlangevin.sampling.gradient_rows import keep_rows

from .timing import Contestant, measure

MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP of 79 510 weights": lambda: MLP(784, 10, 100),
    "ResNet-18, width 8": lambda: ResNet18(10, "cifar", 8),
    "ResNet-18, width 64": lambda: ResNet18(10, "cifar", 64),
}


@dataclass(frozen=True)
class Cost:
    """Seconds of a step of the sampler, of keeping rows, and of one diagnosis."""

    model: str
    step: float
    keep: float
    diagnose: float


def measure_cost(name: str, model: nn.Module, seconds: float) -> Cost:
    """Return the times of one model in bfp8, packed."""
    torch.manual_seed(0)
    ql.pack(model, "bfp8")
    sampler = ql.SGLD(model.parameters(), lr=1e-6, num_data=50_000, temperature=1e-3)
    gradients = [torch.randn(p.shape) * 1e-3 for p in model.parameters()]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    calls: dict[str, Callable[[], object]] = {
        "step": sampler.step,
        "keep": lambda: [keep_rows(g) for g in gradients],
        "diagnose": sampler.diagnose,
    }
    times = measure({name: Contestant(call) for name, call in calls.items()}, seconds)
    return Cost(name, times["step"], times["keep"], times["diagnose"])


def main() -> None:
    """Print the table."""
    table = Table(title="The diagnosis of a packed chain in bfp8, one thread", box=box.SIMPLE_HEAD)
    for column in ("model", "step", "keep", "of a step", "diagnose"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, build in MODELS.items():
        cost = measure_cost(name, build(), 6.0)
        times = (f"{1e3 * x:.3g} ms" for x in (cost.step, cost.keep))
        table.add_row(name, *times, f"{cost.keep / cost.step:.1%}", f"{cost.diagnose:.2f} s")
    Console().print(table)


if __name__ == "__main__":
    main()
