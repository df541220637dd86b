"""Stores of samples that no chain of the experiment makes: rounded copies of a network, and draws of SWAG."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.quantization.operators import Rounding, quantize

SNAPSHOTS, DRAWS = 20, 20


def write(folder: Path, model: nn.Module, members: Iterable[Mapping[str, Tensor]], format: str | None) -> Path:
    """Store members, in a byte a weight if they have a format; return the folder. A store that is complete is left alone."""
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    model = ql.unpack(model)
    sampler = ql.SGLD(model.parameters(), 0.0, 1, weights=format) if format else None  # says in which format they are
    with ql.SampleStore.create(folder, model, sampler) as store:
        for member in members:
            model.load_state_dict(dict(member))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ql.QLangevinWarning)  # that all are of one step
                store.append(model)
    (folder / "complete").touch()
    return folder


def last(folder: Path) -> dict[str, Tensor]:
    """Return the last sample of a store, decoded."""
    return dict(ql.SampleStore.open(folder)[-1].decode())


def rounded(
    weights: Mapping[str, Tensor], model: nn.Module, format: str, rounding: Rounding, seed: int
) -> dict[str, Tensor]:
    """Return the weights rounded to a format; buffers stay as they are."""
    parameters = dict(model.named_parameters())
    return {
        name: quantize(t, format, rounding, ql.Key(seed, i)) if name in parameters else t
        for i, (name, t) in enumerate(weights.items())
    }


def swag(snapshots: list[dict[str, Tensor]], model: nn.Module, seed: int) -> Iterable[dict[str, Tensor]]:
    """Yield draws of SWAG (Maddox et al., 2019) with the mean, diagonal and deviations of snapshots of SGD.

    θ = mean + diagonal^(1/2) z1 / √2 + D z2 / √(2 (K - 1)),     z1, z2 standard normal, D the deviations as columns

    Buffers of the model are those of the last snapshot.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters())
    stacked = {name: torch.stack([s[name] for s in snapshots]) for name in snapshots[0] if name in parameters}
    mean = {name: t.mean(0) for name, t in stacked.items()}
    for _ in range(DRAWS):
        z = torch.randn(len(snapshots), generator=generator) / (2 * (len(snapshots) - 1)) ** 0.5
        draw = dict(snapshots[-1])
        for name, t in stacked.items():
            deviations = t - mean[name]
            spread = (deviations.square().mean(0) / 2).sqrt() * torch.randn(mean[name].shape, generator=generator)
            draw[name] = mean[name] + spread + torch.tensordot(z, deviations, 1)
        yield draw
