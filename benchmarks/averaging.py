"""Bayesian model averaging: the time of `Posterior.predict` against what it replaces.

For a large network the baseline is the forward passes alone, of one model; `predict` also decodes and sets the weights of each
sample. For a small network the baseline is a loop over decoded state dicts in memory: ``load_state_dict``, forward, softmax, add.
`predict` keeps the stacked weights of the first call, which is timed separately; a baseline that keeps as much, a model for each
sample, is shown too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.experiments.models import MLP, LogisticRegression, ResNet18

from .storage import folder
from .timing import Contestant, Goal, Row, measure

FORMAT, SAMPLES = "bfp8", 50


def store_samples(path: Path, model: nn.Module, samples: int) -> list[dict[str, Tensor]]:
    """Create a store of samples around a model's weights; return them as state dicts."""
    sampler = ql.SGLD(model.parameters(), lr=0.1, num_data=1000, weights=FORMAT)
    states = []
    with ql.SampleStore.create(path, model, sampler) as store:
        for _ in range(samples):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            sampler.step()
            store.append(model)
            states.append({name: t.clone() for name, t in model.state_dict().items()})
    return states


@torch.no_grad()
def by_hand(model: nn.Module, states: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    total = torch.zeros(())
    for state in states:
        model.load_state_dict(state)
        total = total + model(x).softmax(1)
    return total / len(states)


@torch.no_grad()
def by_copies(models: list[nn.Module], x: Tensor) -> Tensor:
    total = torch.zeros(())
    for model in models:
        total = total + model(x).softmax(1)
    return total / len(models)


@torch.no_grad()
def forwards(model: nn.Module, count: int, x: Tensor) -> None:
    for _ in range(count):
        model(x)


def measure_large(seconds: float, path: Path, samples: int, batch: int) -> list[Row]:
    torch.manual_seed(0)
    model, x = ResNet18(), torch.randn(batch, 3, 32, 32)
    store_samples(path, model, samples)
    posterior = ql.Posterior.open(path, model)
    model.eval()
    contestants = {
        "ours": Contestant(lambda: posterior.predict(x)),
        "theirs": Contestant(lambda: forwards(model, samples, x)),
    }
    best = measure(contestants, seconds)
    baseline = f"{samples} forward passes"
    name = f"ResNet-18, {samples} samples, batch {batch}"
    group = "averaging, one decoded sample at a time, one thread"
    return [Row(group, name, best["ours"], "s", baseline, best["theirs"], "time", Goal("<=", 1.1))]


def measure_small(
    seconds: float, path: Path, make: Callable[[], nn.Module], batches: dict[int, Goal | None]
) -> list[Row]:
    torch.manual_seed(0)
    model = make().eval()
    states = store_samples(path, model, SAMPLES)
    posterior = ql.Posterior.open(path, model)
    group, rows, share = f"averaging {SAMPLES} samples at once, one thread", [], seconds / (len(batches) + 1)
    for batch, goal in batches.items():
        x = torch.randn(batch, 1, 28, 28)
        difference = (posterior.predict(x) - by_hand(model, states, x)).abs().max()
        if difference > 1e-5:
            raise RuntimeError(f"the two averages differ by {difference}")
        pair = {
            "ours": Contestant(partial(posterior.predict, x)),
            "theirs": Contestant(partial(by_hand, model, states, x)),
        }
        best = {name: time * 1e3 for name, time in measure(pair, share).items()}  # not more of them: caches are small
        baseline, name = "loop over load_state_dict and forward", f"{make.__name__}, batch {batch}"
        rows.append(Row(group, name, best["ours"], "ms", baseline, best["theirs"], "speed", goal))
    return rows + measure_kept(share, path, posterior, states)


def measure_kept(seconds: float, path: Path, posterior: ql.Posterior, states: list[dict[str, Tensor]]) -> list[Row]:
    """Measure against a baseline that keeps as much in memory, and the first call of all."""
    model, x = posterior.model, torch.randn(1, 1, 28, 28)
    copies = [copy.deepcopy(model) for _ in states]
    for other, state in zip(copies, states, strict=True):
        other.load_state_dict(state)
    first = measure({"": Contestant(lambda: ql.Posterior.open(path, model).predict(x))}, seconds / 2)[""] * 1e3
    pair = {"ours": Contestant(lambda: posterior.predict(x)), "theirs": Contestant(lambda: by_copies(copies, x))}
    best = {name: time * 1e3 for name, time in measure(pair, seconds / 2).items()}
    group, name = f"averaging {SAMPLES} samples at once, one thread", f"{type(model).__name__}, batch 1"
    baseline = f"{SAMPLES} copies of the model"
    return [
        Row(group, name, best["ours"], "ms", baseline, best["theirs"], "speed"),
        Row(group, f"{name}, opened and for the first time", first, "ms"),
    ]


def run(seconds: float, quick: bool) -> list[Row]:
    fast, batches = Goal(">=", 5.0), (1, 8, 64, 512)
    goals = {batch: fast if batch == 1 else None for batch in batches}
    with folder() as path:
        rows = measure_large(seconds * 0.6, path / "large", *((5, 8) if quick else (SAMPLES, 32)))
        for make in (MLP, LogisticRegression):
            rows += measure_small(seconds * 0.2, path / make.__name__, make, goals)
    return rows
