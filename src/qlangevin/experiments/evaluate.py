"""Score the samples of runs again: alone or as chains of one average, also against data of another kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..prediction import metrics
from ..prediction.posterior import Posterior
from ..storage.sample import chain_folders
from ..storage.store import SampleStore
from . import run
from .data import datasets as datasets
from .data.datasets import Examples, Name
from .presets import Experiment
from .score import score

__all__ = ["evaluate"]


def evaluate(
    folders: Sequence[Path],
    data_dir: Path | None = None,
    limit_test: int | None = None,
    ood: Name | None = None,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> dict[str, Any]:
    """Scores of the average over the samples of all these runs, which may differ only in their seed."""
    config = _common([run.configuration(folder) for folder in folders], folders)
    if limit_test is not None:
        config = replace(config, limit_test=limit_test)
    for folder in folders:
        if not all(len(SampleStore.open(place)) for place in chain_folders(folder)):
            raise ValueError(f"the run in {folder} has no samples yet")
    data = run.load(config, data_dir)
    average = run.posterior(config, data, *folders)
    batches = datasets.loader(data.test, run.TEST_BATCH, shuffle=False, workers=config.workers)
    share = 1 / len(data.test)
    found = score(average, batches, lambda label, n: progress(label, n * share))
    return {
        "experiment": config.name,
        "runs": [str(folder) for folder in folders],
        "settings": config.to_json(),
        "samples": len(average),
        **found,
        "ood": None if ood is None else _against(average, data.test, config, ood, data_dir),
    }


def _common(configs: Sequence[Experiment], folders: Sequence[Path]) -> Experiment:
    for config, folder in zip(configs, folders, strict=True):
        if replace(config, seed=configs[0].seed) != configs[0]:
            raise ValueError(f"{folder} and {folders[0]} differ in more than the seed, and cannot be averaged")
    return configs[0]


def _against(
    average: Posterior, inside: Examples, config: Experiment, name: Name, data_dir: Path | None
) -> dict[str, Any]:
    """AUROC of telling the test set from another data set by the uncertainty of the average."""
    outside = datasets.load(name, data_dir, limit_test=config.limit_test, augment=False).test
    if outside[0][0].shape != inside[0][0].shape:
        shapes = f"{tuple(outside[0][0].shape)}, not {tuple(inside[0][0].shape)}"
        raise ValueError(f"--ood={name} has inputs of shape {shapes} as the run's own data")
    loaders = (datasets.loader(examples, run.TEST_BATCH, shuffle=False) for examples in (inside, outside))
    return {"data": name, **metrics.ood(*(average.uncertainty_loader(loader, progress=False) for loader in loaders))}
