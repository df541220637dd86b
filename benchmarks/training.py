"""Time of a training step in 8 bits against the same step in plain FP32: forward, cross entropy, backward, update.

Every activation, error, gradient and weight is rounded, on processors that compute in float32 all the same. The baseline is
`torch.optim.SGD` in FP32, which draws no noise. "Lowered" rounds plain parameters; "lowered and packed" has parameters of one
byte and steps inside backward, and so decodes weights whenever they are used. Inputs are random numbers, the same in every step.
A quick run leaves out batch 128, where a step takes seconds.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import qlangevin as ql
from qlangevin.experiments.models import LSTMClassifier, ResNet18

from .timing import PROCESSOR, WALL, Contestant, Goal, Row, measure

LR, NUM_DATA, TEMPERATURE = 0.01, 50_000, 1.0
FP32, LOWERED, PACKED = "FP32, torch.optim.SGD", "lowered", "lowered and packed"
THREADS = {1: "one thread", 2: "two threads"}
WORDS, LENGTH = 25_000, 200

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A network, its batch, format and goal, and its share of the time available."""

    name: str
    model: Callable[[], nn.Module]
    batch: Batch
    format: str
    goal: Goal
    share: float


class Training:
    """A model that is trained on one batch: ``run`` makes one step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, batch: Batch) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.start = [p.detach().clone() for p in model.parameters()]
        self.loss = math.nan

    def run(self) -> None:
        x, y = self.batch
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()

    def check(self, name: str) -> None:
        """Raise RuntimeError if the chain stands still or has diverged: its time would mean nothing."""
        pairs = list(zip(self.model.parameters(), self.start, strict=True))
        moved = sum(int((p != start).sum()) for p, start in pairs) / sum(start.numel() for _, start in pairs)
        if not math.isfinite(self.loss) or moved < 0.001:
            raise RuntimeError(f"{name}: the chain is not alive, loss {self.loss}, {moved:.2%} of its weights moved")


def images(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 32, 32, generator=generator), torch.randint(10, (count,), generator=generator)


def texts(count: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (count, LENGTH), generator=generator)  # 0 would be padding
    return words, torch.randint(2, (count,), generator=generator)


def cases(quick: bool) -> list[Case]:
    small, large = (
        Case(f"ResNet-18, batch {size}", ResNet18, images(size), "bfp8", Goal("<=", 1.10), share)
        for size, share in ((32, 0.25), (128, 0.5))
    )
    text = Case(
        f"two-layer LSTM, batch 80, length {LENGTH}",
        partial(LSTMClassifier, words=WORDS),
        texts(80),
        "bfp8/tensor",  # the paper's big block
        Goal("<=", 1.25),
        share=0.25,
    )
    return [small, text] if quick else [small, large, text]


def lower_and_pack(model: nn.Module, format: str, packed: bool) -> None:
    """Prepare a model for Algorithm 3. The sampler has to be made afterwards, since `pack` replaces the parameters."""
    ql.lower(model, activations=format, errors=format, functions=False)  # its sums are modules
    if packed:
        ql.pack(model, format)


def make_sampler(model: nn.Module, format: str | None, in_backward: bool) -> ql.SGLD:
    """Return VC SGLDLP-L; without a format, SGLD in full precision."""
    return ql.SGLD(
        model.parameters(),
        LR,
        NUM_DATA,
        temperature=TEMPERATURE,
        weights=format,
        gradients=format,
        step_in_backward=in_backward,
    )


def make_trainings(case: Case) -> dict[str, Training]:
    """Return the contestants, which all start from the same weights."""
    torch.manual_seed(0)
    plain = case.model()
    found = {}
    for name in (LOWERED, PACKED):
        model, packed = copy.deepcopy(plain), name == PACKED
        lower_and_pack(model, case.format, packed)
        found[name] = Training(model, make_sampler(model, case.format, packed), case.batch)
    return found | {FP32: Training(plain, SGD(plain.parameters(), LR), case.batch)}


def time_case(case: Case, threads: int, seconds: float) -> list[Row]:
    contestants = make_trainings(case)
    clock = PROCESSOR if threads == 1 else WALL
    times = measure({name: Contestant(t.run, threads) for name, t in contestants.items()}, seconds, clock)
    for name, training in contestants.items():
        training.check(f"{case.name}, {name}")
    group = f"training step in {case.format}, {case.name}, {THREADS[threads]}"
    return [Row(group, name, times[name], "s", FP32, times[FP32], "time", case.goal) for name in (LOWERED, PACKED)]


def run(seconds: float, quick: bool) -> list[Row]:
    """Time all cases with one thread, and with two if there are two processors."""
    counts = [count for count in THREADS if count <= (os.cpu_count() or 1)]
    return [
        row
        for case in cases(quick)
        for threads in counts
        for row in time_case(case, threads, seconds * case.share / len(counts))
    ]
