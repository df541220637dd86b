"""Diagnose a run: reopen its last checkpoint, compute gradients of a few training batches, and measure whether the bits suffice.

The samples of the run give the posterior's width, which the gap of the grid is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .._validate import check_integer
from ..sampling.diagnose import Measured, diagnose_parameters, join_batches, measure_sampler
from ..sampling.diagnosis import TOLERANCE, Diagnosis
from ..storage.checkpoint import load_checkpoint
from ..storage.sample import MANIFEST, chain_folders
from ..storage.store import SampleStore
from .chain import Chain, prepare_chain
from .data import Data, make_loader
from .presets import Experiment, read_config

__all__ = ["diagnose_chain", "diagnose_run", "posterior_widths", "shorten"]


def diagnose_run(
    folder: Path, data_dir: Path | None = None, batches: int = 4, chain: int = 0, tolerance: float = TOLERANCE
) -> Diagnosis:
    """Return the diagnosis of one chain of a run, finished or not, where its last checkpoint was saved."""
    config, number = read_config(folder), check_integer("chain", chain, 0)
    check_integer("batches", batches, 1)
    folders = chain_folders(folder)
    if number >= len(folders):
        raise ValueError(f"--chain must be below {len(folders)}, the chains of {folder}, got {number}")
    return diagnose_chain(config, config.load_data(data_dir), folders[number], number, batches, tolerance)


def diagnose_chain(
    config: Experiment, data: Data, folder: Path, number: int = 0, batches: int = 1, tolerance: float = TOLERANCE
) -> Diagnosis:
    """Return the diagnosis of the chain in a folder; batches are the first of a shuffled pass, the same in every call."""
    chain = prepare_chain(config, data, chain=number)
    load_checkpoint(folder, chain.model, chain.sampler, chain.schedule)
    loader = make_loader(data.train, config.batch, shuffle=True, seed=config.seed, stream=number)
    widths = posterior_widths(folder, [name for name, _ in chain.model.named_parameters()])
    measured = [_measure_batch(chain, x, y, widths) for x, y in islice(loader.until(batches), batches)]
    return diagnose_parameters(join_batches(measured), tolerance)


def _measure_batch(chain: Chain, x: Tensor, y: Tensor, widths: Mapping[str, Tensor] | None) -> list[Measured]:
    chain.sampler.zero_grad()
    cross_entropy(chain.model(x), y).backward()
    return [*measure_sampler(chain.sampler, chain.model, widths)]


def posterior_widths(folder: Path, names: list[str]) -> dict[str, Tensor] | None:
    """Return the standard deviation of each weight over the samples of a chain; None if there are fewer than two."""
    store = SampleStore.open(folder) if (folder / MANIFEST).exists() else None
    if store is None or len(store) < 2:
        return None
    first = {name: t.double() for name, t in store[0].decode().items() if name in names}
    sums = {name: torch.zeros(2, *t.shape, dtype=torch.float64) for name, t in first.items()}
    for sample in store[1:]:
        for name, value in sample.decode().items():
            if name in sums:
                moved = value.double() - first[name]  # so that nearly equal numbers are not subtracted later
                sums[name] += torch.stack((moved, moved.square()))
    count = len(store)
    return {
        name: ((square - total.square() / count) / (count - 1)).clamp_min(0).sqrt()
        for name, (total, square) in sums.items()
    }


def shorten(found: Diagnosis) -> dict[str, Any]:
    """Return what a result keeps of a diagnosis: all of it but the parameters."""
    kept = found.to_dict()
    del kept["parameters"]
    return {**kept, "summary": found.summary, "advice": [str(remedy) for remedy in found.advice]}
