"""Small training runs of every kind, to be checkpointed, resumed and compared to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import qlangevin as ql
from qlangevin.quantization.qtensor import QTensor
from qlangevin.storage import model_tensors, state_json

STEPS = 12


@dataclass
class Run:
    model: nn.Module
    sampler: Optimizer
    schedule: Any
    loader: ql.Loader

    def save(self, path: Path, **more: Any) -> None:
        ql.save_checkpoint(path, self.model, self.sampler, self.schedule, self.loader, **more)

    def load(self, path: Path, store: ql.SampleStore | None = None) -> dict[str, Any]:
        return ql.load_checkpoint(path, self.model, self.sampler, self.schedule, self.loader, store)

    def train(self, until: int, each: Callable[[int], None] = lambda step: None) -> list[float]:
        """Train up to a step and return the losses; ``each`` is called before every step with the number of steps done."""
        batches, losses = chain.from_iterable(repeat(self.loader)), []
        while self.schedule.last_epoch < until:
            each(self.schedule.last_epoch)
            x, labels = next(batches)
            self.sampler.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), labels)
            loss.backward()
            self.sampler.step()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    def state(self) -> Any:
        """Return all that makes up a run, for comparison to the bit."""
        states = [part.state_dict() for part in (self.sampler, self.schedule, self.loader)]
        layers = ql.lowering.state_dict(self.model)
        return comparable([model_tensors.named_tensors(self.model), layers, *states, state_json.random_state()])


def comparable(tree: Any) -> Any:
    """Return a tree of bytes and strings that compares to the bit."""
    if isinstance(tree, QTensor):
        return comparable([tree.codes, tree.exponents])
    if isinstance(tree, Tensor):
        return str(tree.dtype), tuple(tree.shape), bytes(tree.detach().reshape(-1).view(torch.uint8).numpy())
    if isinstance(tree, dict):
        return {k: comparable(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [comparable(item) for item in tree]
    return repr(tree)


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class Augmented(Dataset[tuple[Tensor, int]]):
    """A data set that draws from the global generators of NumPy and Python."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), np.random.standard_normal() + random.gauss(0, 1)), index % 3


def make(kind: str = "plain", samples: int = 4, batch_size: int = 6, lower: bool | None = None, **options: Any) -> Run:
    """Make a run that has not begun; it has 20 examples, so that 12 steps are 3 epochs."""
    seed_all(0)
    middle = {"dropout": nn.Dropout(0.5), "batchnorm": nn.BatchNorm1d(5)}.get(kind, nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 5), middle, nn.Linear(5, 3))
    examples = TensorDataset(torch.randn(20, 4), torch.arange(20) % 3)
    if kind == "float64":
        model.double()
        examples = TensorDataset(examples.tensors[0].double(), examples.tensors[1])
    if kind == "lowered" if lower is None else lower:
        ql.lower(model, "bfp8", "bfp8", seed=2)
    if kind in ("packed", "in backward"):
        ql.pack(model, "bfp8")
    loader = ql.Loader(Augmented() if kind == "augmented" else examples, batch_size, seed=3)
    if kind == "torch":
        momentum = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return Run(model, momentum, torch.optim.lr_scheduler.StepLR(momentum, 5), loader)
    given: dict[str, Any] = {"weights": None if kind in ("packed", "in backward", "float64", "fp32") else "bfp8"}
    given |= {"accumulator": {"weights": "fixed8.6", "accumulator": "fp32"}}.get(kind, {})
    given |= {"bf16 accumulator": {"weights": "bfp8", "accumulator": "bf16"}}.get(kind, {})
    sampler = ql.SGLD(model.parameters(), 0.1, 20, step_in_backward=kind == "in backward", **given | options)
    if kind == "cyclical":
        return Run(
            model, sampler, ql.CyclicalLR(sampler, STEPS, 2, 2, exploration_temperature=0, exploration=0.5), loader
        )
    return Run(model, sampler, ql.LinearDecayLR(sampler, STEPS, samples, burn_in=0.5), loader)


KINDS = [
    *["plain", "packed", "in backward", "accumulator", "bf16 accumulator", "lowered", "dropout", "batchnorm"],
    *["augmented", "torch", "float64", "fp32", "cyclical"],
]
