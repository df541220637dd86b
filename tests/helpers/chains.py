"""A small network with its data, and the steps and digest of a chain: the work of ranks in the tests."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qlangevin as ql


def network(seed: int = 0) -> nn.Sequential:
    """Matrices larger than a group of 64 and vectors smaller than one; the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))


def make_sampler(model: nn.Module, **changes: Any) -> ql.SGLD:
    """A sampler of the network's parameters; ``changes`` replace its settings."""
    settings = {"lr": 0.05, "num_data": 50, "weight_decay": 1e-3, "seed": 5} | changes
    return ql.SGLD(model.named_parameters(), **settings)


def loader(rank: int = 0, ranks: int = 1) -> ql.Loader:
    """50 examples in batches of 16: the last batch leaves two of 4 ranks without an example."""
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(50, 12, generator=generator), torch.randint(3, (50,), generator=generator)
    return ql.Loader(TensorDataset(x, labels), 16, seed=3, rank=rank, ranks=ranks)


def train(model: nn.Module, sampler: ql.SGLD, batches: ql.Loader, until: int) -> None:
    """Step until the loader has served so many batches in all."""
    for x, labels in batches.until(until):
        sampler.zero_grad()
        y = model(x.to(next(model.parameters()).dtype))
        (batches.share * nn.functional.cross_entropy(y, labels)).backward()
        sampler.step()


def digest(model: nn.Module, sampler: ql.SGLD) -> str:
    """SHA-256 of the bytes of all parameters and accumulators."""
    tensors = [p.detach() for p in model.parameters()]
    tensors += [s["accumulator"] for s in sampler.state.values() if "accumulator" in s]
    return sha256(*tensors)


def sha256(*tensors: Tensor) -> str:
    """SHA-256 of the bytes of tensors, one after the other."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
