"""Samples that a trainer's callback collects: when, into which store, with which loss; and the file that resumes them.

A trainer saves and loads the model, the sampler and its schedule by its own means, which round packed weights anew and know
nothing of layers that count their runs. So a collector saves a file of its own beside them: a checkpoint of what is sampled.
"""

from __future__ import annotations

import math
import os
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import lowering
from .._validate import check_integer, describe_differences
from .._warnings import warn
from ..sampling.schedules import Schedule
from ..sampling.stepping import Stepper
from ..storage import model_tensors
from ..storage.checkpoint import load_checkpoint, save_checkpoint
from ..storage.manifest import count_steps
from ..storage.state_json import random_state, set_random_state
from ..storage.store import SampleStore
from .trainer_checks import check_parameters

__all__ = ["Collecting", "Collector", "Report", "find_sampler"]

CONVERGED = 1.1  # R-hat above it is reported as a warning
FEWEST = 8  # samples that ArviZ takes: two halves of four
ENOUGH = 10  # samples without which R-hat says too little to warn of it


@dataclass(frozen=True)
class Report:
    """Summary of the samples of a run: R-hat and effective sample size are those of their losses, NaN of fewer than 8."""

    samples: int
    bytes_per_sample: int
    loss: float
    r_hat: float
    ess: float

    def __str__(self) -> str:
        of = f"{self.samples} samples of {self.bytes_per_sample:,} bytes; training loss {self.loss:.4f}"
        if math.isnan(self.r_hat):
            return f"{of}; no R-hat, for which it takes {FEWEST} samples with a loss"
        return f"{of}, R-hat {self.r_hat:.3f}, {self.ess:.0f} effective samples"


class Collector:
    """Collects samples of one run into a store.

    A sample's loss is the mean training loss of the w steps before it, w the least number of steps between two samples: the
    batches of single steps vary too much for R-hat to see anything else.

    Args:
        path: folder of the store.
        every: steps between samples; None takes them when the schedule says so (``schedule.collect``).
        burn_in: steps before the first sample, for ``every``.
    """

    def __init__(self, path: str | os.PathLike[str], every: int | None = None, burn_in: int = 0) -> None:
        self.path = Path(path)
        self.every = None if every is None else check_integer("every", every, 1)
        self.burn_in = check_integer("burn_in", burn_in, 0)
        if every is None and burn_in:
            raise ValueError(
                f"burn_in={burn_in} goes with every=; without it the schedule has a burn_in of its own, as a fraction"
            )
        self.store: SampleStore | None = None
        self._losses: list[float] = []
        self._recent: deque[Tensor] = deque(maxlen=1)
        self._steps = 0

    # ---- a run

    def begin(self, model: nn.Module, sampler: Stepper, schedule: Any, resumed: bool, **options: Any) -> None:
        """Open the store; ``resumed`` continues one that is there. ``options`` are those of `SampleStore.create`."""
        self.close()
        check_parameters(model, sampler)
        if self.every is None and not isinstance(schedule, Schedule):
            raise ValueError(
                f"the callback does not know when to collect: the schedule is a {type(schedule).__name__}; give every=, the "
                "steps between samples, or a schedule of qlangevin's, such as ConstantLR(sampler, total_steps, samples)"
            )
        self.model, self.sampler = model, sampler
        self.schedule = schedule if isinstance(schedule, Schedule) else None
        gaps = [self.every] if self.every else [b - a for a, b in pairwise(schedule.moments)]
        self._recent, self._losses, self._steps = deque(maxlen=min(gaps, default=1)), [], count_steps(sampler)
        try:
            self.store = SampleStore.create(self.path, model, sampler, self.schedule, resume=resumed, **options)
        except FileExistsError as error:
            raise FileExistsError(
                f"{self.path} holds a store already, and this run is a new one: resume from the trainer's checkpoint "
                "(resume_from_checkpoint=True, or ckpt_path=...), give the callback another folder, or remove that one"
            ) from error

    def step(self, loss: Tensor | None, may_be_skipped: bool = False) -> None:
        """Note the loss of a step, and collect a sample if it is time for one.

        ``may_be_skipped``: a scaler of gradients may have left the step out. The sampler knows, but waits for the device.
        """
        steps = count_steps(self.sampler) if may_be_skipped else self._steps + 1
        if steps == self._steps:
            return
        self._steps = steps
        if loss is not None:
            self._recent.append(loss.detach().float())
        if self._is_due():
            assert self.store is not None
            self.store.append(self.model)
            self._losses.append(float(torch.stack([*self._recent]).mean()) if self._recent else math.nan)

    def _is_due(self) -> bool:
        if self.every is None:
            assert self.schedule is not None
            return self.schedule.collect
        return self._steps > self.burn_in and (self._steps - self.burn_in) % self.every == 0

    def end(self) -> None:
        """Close the store, and warn if the losses of the samples say that the chain has not converged."""
        report = self.report()
        self.close()
        if report.samples >= ENOUGH and report.r_hat > CONVERGED:
            warn(
                f"R-hat of the training loss along the chain is {report.r_hat:.2f}, over {report.samples} samples: the chain was "
                "still on its way; take more steps, or a longer burn-in",
                stacklevel=4,
            )

    def close(self) -> None:
        """Release the store for other writers; it can still be read."""
        if self.store is not None:
            self.store.close()

    # ---- what became of it

    @property
    def losses(self) -> Tensor:
        """Training loss of each sample; NaN where the trainer did not tell."""
        return torch.tensor(self._losses, dtype=torch.float64)

    def report(self) -> Report:
        """Return the number of samples, their size, and R-hat and effective size of their losses."""
        losses, r_hat, ess = self.losses, math.nan, math.nan
        samples, size = 0, 0
        if self.store is not None and (samples := len(self.store)):
            size = self.store.manifest.samples[-1].digest.size
        if len(losses) >= FEWEST and bool(losses.isfinite().all()):
            from ..prediction import diagnostics  # imports ArviZ, which is slow

            summary = diagnostics.summarize(losses[None])
            r_hat, ess = float(summary.r_hat), float(summary.ess_bulk)
        return Report(samples, size, float(losses.mean()) if len(losses) else math.nan, r_hat, ess)

    # ---- to be resumed

    def save(self, file: Path) -> None:
        """Save what the trainer's own checkpoint lacks, or rounds, to be resumed bit for bit."""
        counters = {"losses": self._losses, "recent": [float(loss) for loss in self._recent], "steps": self._steps}
        layers = {"layers": lowering.state_dict(self.model), "lowered": lowering.settings(self.model)}
        part = _sampled_part(self.model)
        save_checkpoint(file, part, self.sampler, self.schedule, None, self.store, **counters, **layers)

    def load(self, file: Path) -> None:
        """Resume from a file of `save`; samples that came after it are removed from the store."""
        generators = random_state()  # the trainer restores those by itself, and in its own order
        found = load_checkpoint(file, _sampled_part(self.model), self.sampler, self.schedule, None, self.store)
        set_random_state(generators)
        if odd := describe_differences(found["lowered"], lowering.settings(self.model)):
            raise ValueError(f"the checkpoint {file} is of a model lowered otherwise: {'; '.join(odd[:3])}")
        lowering.load_state_dict(self.model, found["layers"])
        self._losses, self._steps = list(found["losses"]), int(found["steps"])
        self._recent.extend(torch.tensor(loss) for loss in found["recent"])


def _sampled_part(model: nn.Module) -> nn.Module:
    """Return a module of the parameters that are trained and of the buffers: frozen ones do not change, and may be large."""
    part = nn.Module()
    for name, t in model_tensors.named_tensors(model).items():
        if not isinstance(t, nn.Parameter):
            part._buffers[name] = t  # not by register_buffer, which refuses names with dots
        elif t.requires_grad:
            part._parameters[name] = t
    return part


def find_sampler(optimizer: Optimizer | None) -> Stepper:
    """Return the sampler inside the wrappers of accelerate; raise TypeError if it is another optimizer."""
    found: Any = optimizer
    while not isinstance(found, Stepper) and hasattr(found, "optimizer"):
        found = found.optimizer
    if not isinstance(found, Stepper):
        raise TypeError(
            f"only a sampler's weights are samples, but the optimizer is {type(found).__name__}: pass SGLD(...) to the trainer"
        )
    return found


class Collecting:
    """Properties that the callbacks of all trainers share."""

    _collector: Collector

    @property
    def store(self) -> SampleStore | None:
        """The store, once training has begun."""
        return self._collector.store

    @property
    def losses(self) -> Tensor:
        """Training loss of each sample: the mean over the steps since the last one. Stack those of several chains for R-hat."""
        return self._collector.losses

    def report(self) -> Report:
        """Return the number and size of the samples, and R-hat and effective sample size of their losses."""
        return self._collector.report()
