"""Bayesian model averaging: `Posterior.predict` against what it replaces.

A large network: the rival is the forward passes alone, of one model whose weights are there already; `predict` also maps,
decodes and puts in place the weights of each sample. A small network: the rival is the loop one would write, over state
dicts that are in memory, decoded: ``load_state_dict``, forward, softmax, add.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.experiments.models import MLP, LogisticRegression, ResNet18

from .storage import folder
from .timing import Contestant, Goal, Row, measure

FORMAT, SAMPLES = "bfp8", 50


def stored(place: Path, model: nn.Module, samples: int) -> list[dict[str, Tensor]]:
    """A store of samples around a model's weights, and the same as state dicts."""
    sampler = ql.SGLD(model.parameters(), lr=0.1, num_data=1000, weights=FORMAT)
    states = []
    with ql.SampleStore.create(place, model, sampler) as store:
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
def forwards(model: nn.Module, count: int, x: Tensor) -> None:
    for _ in range(count):
        model(x)


def large(seconds: float, place: Path, samples: int, batch: int) -> list[Row]:
    torch.manual_seed(0)
    model, x = ResNet18(), torch.randn(batch, 3, 32, 32)
    stored(place, model, samples)
    posterior = ql.Posterior.open(place, model)
    model.eval()
    contestants = {
        "ours": Contestant(lambda: posterior.predict(x)),
        "theirs": Contestant(lambda: forwards(model, samples, x)),
    }
    best = measure(contestants, seconds)
    rival = f"{samples} forward passes"
    name = f"ResNet-18, {samples} samples, batch {batch}"
    group = "averaging, one decoded sample at a time, one thread"
    return [Row(group, name, best["ours"], "s", rival, best["theirs"], "time", Goal("<=", 1.1))]


def small(seconds: float, place: Path, make: Callable[[], nn.Module], batches: dict[int, Goal | None]) -> list[Row]:
    torch.manual_seed(0)
    model = make().eval()
    states = stored(place, model, SAMPLES)
    posterior = ql.Posterior.open(place, model)
    contestants = {}
    for batch in batches:
        x = torch.randn(batch, 1, 28, 28)
        difference = (posterior.predict(x) - by_hand(model, states, x)).abs().max()
        if difference > 1e-5:
            raise RuntimeError(f"the two averages differ by {difference}")
        contestants[f"ours {batch}"] = Contestant(lambda x=x: posterior.predict(x))  # type: ignore[misc]
        contestants[f"theirs {batch}"] = Contestant(lambda x=x: by_hand(model, states, x))  # type: ignore[misc]
    best = {name: time * 1e3 for name, time in measure(contestants, seconds).items()}
    group, rival = f"averaging {SAMPLES} samples at once, one thread", "loop over load_state_dict and forward"
    return [
        Row(group, f"{make.__name__}, batch {b}", best[f"ours {b}"], "ms", rival, best[f"theirs {b}"], "speed", goal)
        for b, goal in batches.items()
    ]


def run(seconds: float, quick: bool) -> list[Row]:
    fast, batches = Goal(">=", 5.0), (1, 8, 64, 512)
    goals = {batch: fast if batch == 1 else None for batch in batches}
    with folder() as place:
        rows = large(seconds * 0.6, place / "large", *((5, 8) if quick else (SAMPLES, 32)))
        for make in (MLP, LogisticRegression):
            rows += small(seconds * 0.2, place / make.__name__, make, goals)
    return rows
