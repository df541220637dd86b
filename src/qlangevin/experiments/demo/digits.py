"""Posteriors of a network on digits: four chains of SGHMC in full precision and in 8 bits, and SGD beside them.

Of each method, prior and temperature have the best validation NLL among those whose chains agree, R-hat < 1.1, in the same
search: ``python -m benchmarks.demo_search``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...prediction import diagnostics
from ...quantization.qtensor import encode
from ...sampling.sghmc import SGHMC
from ..processes import Progress
from .methods import CORRECTED, FULL, NAIVE, Method
from .networks import ParallelMLP

__all__ = ["CHOSEN", "FORMAT", "DigitSettings", "DigitsRun", "run_digits"]

FORMAT = "bfp8"
CHAINS, HIDDEN, BATCH, FRICTION = 4, 50, 50, 0.1
DRAWS = 40  # of each chain


@dataclass(frozen=True)
class DigitSettings:
    """A method with its prior and temperature; temperature 0 is SGD with momentum, whose learning rate decays."""

    name: str
    method: Method
    weight_decay: float
    temperature: float
    lr: float = 0.5
    steps: int = 3000

    @property
    def samples(self) -> bool:
        """True if the method samples, False if it is SGD."""
        return self.temperature > 0


CHOSEN = (
    DigitSettings("SGD, FP32", FULL, 3e-4, 0.0),
    DigitSettings("SGHMC, FP32", FULL, 3e-4, 0.3),
    DigitSettings("SGHMC, naive 8-bit", NAIVE, 3e-4, 0.1),
    DigitSettings("SGHMC, corrected 8-bit", CORRECTED, 3e-4, 0.1),
)


@dataclass(frozen=True, eq=False)
class DigitsRun:
    """Predictions [chain, draw, image, class] for each set of images, and what they cost."""

    settings: DigitSettings
    predictions: dict[str, Tensor]
    trace: Tensor | None
    """Log-likelihood of the training data along each chain [chain, draw]; None for SGD."""
    training_bytes: float
    """Bytes of weights and sampler state for each weight, gradients not counted."""
    stored_bytes: int
    """Bytes of all stored weights."""
    seconds: float
    """CPU time of training all chains."""

    @cached_property
    def convergence(self) -> tuple[float | None, float | None]:
        """R-hat and ESS of `trace`, computed by the process that shows them: the others need not import ArviZ."""
        return (None, None) if self.trace is None else diagnostics.summarize(self.trace).worst[:2]


def run_digits(
    settings: DigitSettings, x: Tensor, y: Tensor, sets: dict[str, Tensor], progress: Progress, seed: int = 0
) -> DigitsRun:
    """Train on images ``x`` with labels ``y``, and predict the images of all ``sets``."""
    begin, net = time.process_time(), ParallelMLP(CHAINS, (x.shape[1], HIDDEN, 10), seed)
    sampler, steps, traced, kept = _make_sampler(net, settings, len(x), seed), settings.steps, [], []
    draw, spent, tick = torch.Generator().manual_seed(100 + seed), 0.0, max(1, steps // 50)
    every = max(1, steps // 2 // DRAWS)
    for k in range(1, steps + 1):
        some = torch.randint(len(x), (CHAINS, BATCH), generator=draw)
        sampler.zero_grad()
        (CHAINS * cross_entropy(net(x[some]).flatten(0, 1), y[some].flatten())).backward()
        sampler.step()
        if not settings.samples:
            sampler.param_groups[0]["lr"] = settings.lr * max(0.01, 1 - k / steps)
        if (k > steps // 2 and (steps - k) % every == 0) if settings.samples else k == steps:
            before = time.process_time()
            traced.append(_log_likelihood(net, x, y))
            kept.append(_predict(net, sets))
            spent += time.process_time() - before
        if k % tick == 0:
            progress(f"digits, {settings.name}", tick / steps)
    seconds = time.process_time() - begin - spent
    predictions = {name: torch.stack([p[name] for p in kept], 1) for name in sets}
    trace = torch.stack(traced, 1) if settings.samples else None
    one, state = _count_bytes(net, sampler, FORMAT if settings.method.low_precision else None)
    count = sum(p.numel() for p in net.parameters())
    return DigitsRun(settings, predictions, trace, (one + state) / count, one * len(kept), seconds)


def _make_sampler(net: ParallelMLP, settings: DigitSettings, count: int, seed: int) -> SGHMC:
    return SGHMC(
        net.parameters(),
        lr=settings.lr,
        num_data=count,
        friction=FRICTION,
        integrator="splitting",
        temperature=settings.temperature,
        weight_decay=settings.weight_decay,
        weights=FORMAT if settings.method.low_precision else None,
        rounding=settings.method.rounding,
        seed=seed,
    )


@torch.no_grad()
def _log_likelihood(net: ParallelMLP, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean log-likelihood of the data for each chain."""
    return -cross_entropy(net(x).transpose(1, 2), y.expand(net.chains, -1), reduction="none").mean(1)


@torch.no_grad()
def _predict(net: ParallelMLP, sets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return probabilities (chain, image, class) of each set of images."""
    together = net(torch.cat([*sets.values()])).softmax(2)
    return dict(zip(sets, together.split([len(x) for x in sets.values()], 1), strict=True))


def _count_bytes(net: ParallelMLP, sampler: SGHMC, format: str | None) -> tuple[int, int]:
    """Return the bytes of all weights, encoded in their format, and of the sampler's state."""
    weights = sum(encode(p.detach(), format).nbytes if format else p.nbytes for p in net.parameters())
    state = sum(t.nbytes for held in sampler.state.values() for t in held.values() if isinstance(t, Tensor))
    return weights, state
