"""Score the samples of runs: their average, the last one alone, and each of them along the chain.

`score` computes the figures of any posterior average; `evaluate` scores stored runs again, alone or as chains of one average,
also against a data set of another kind. torchmetrics and ArviZ are imported on first use: they take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._validate import describe_differences
from ..lowering.layers import lower
from ..prediction.posterior import Posterior
from ..storage.sample import chain_folders
from ..storage.store import SampleStore
from .chain import build_network
from .convergence import convergence, describe_non_convergence
from .data import Data, DatasetName, Examples, load_dataset, make_loader
from .presets import CONFIG, Experiment, read_config
from .processes import Progress, ignore_progress
from .results import RESULT, find_runs

if TYPE_CHECKING:
    from ..prediction.metrics import Reliability, Scores

__all__ = ["TEST_BATCH", "evaluate", "find_samples", "open_posterior", "score"]

TEST_BATCH = 500

Batch = tuple[Tensor, Tensor]


def open_posterior(config: Experiment, data: Data, *folders: Path) -> Posterior:
    """Open the average over the samples of all chains of one run, or of several."""
    model = build_network(config, data)
    format = config.activation_format or "fp32"
    lower(model, format, format, functions=False)
    return Posterior.open(folders, model)


def score(posterior: Posterior, batches: Iterable[Batch], progress: Callable[[str, int], None]) -> dict[str, Any]:
    """Return the scores of the average and of the last sample, the bins of the calibration error, and a trace of the samples.

    The average of J samples is p(y | x) = 1/J Σ_j p(y | x, θ_j). ``progress`` receives the number of examples just scored.
    """
    from ..prediction import metrics

    average, single = (metrics.Scores(sync_on_compute=False) for _ in range(2))  # other ranks do not score
    trace = torch.zeros(2, len(posterior), dtype=torch.float64)
    missed = torch.zeros(2, dtype=torch.float64)
    for inputs, labels in batches:
        each = posterior.samples(inputs)
        mean = each.double().mean(0)  # of probabilities, so that they add up to one
        average.update(mean, labels)
        single.update(each[-1], labels)
        trace[0] += torch.stack([metrics.log_likelihood(p, labels).sum() for p in each])
        trace[1] += (each.argmax(2) != labels).sum(1)
        missed += torch.stack([_count_missed(p, labels) for p in (mean, each[-1])])
        progress("evaluating", len(labels))
    log_likelihood, error = (trace / average.compute()["count"]).tolist()
    lengths = [len(chain) for chain in posterior.chains]
    return {
        "scores": _with_top5(average, missed[0]),
        "single": _with_top5(single, missed[1]),
        "reliability": _bins_as_json(average.reliability()),
        "trace": {
            "steps": [sample.step for sample in posterior.members],
            "log_likelihood": log_likelihood,
            "error": error,
            "chains": lengths,
        },
        **convergence(_align_chains(log_likelihood, lengths)),
    }


def _count_missed(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Count the labels that are not among the five likeliest classes."""
    best = probabilities.topk(min(5, probabilities.shape[1])).indices
    return (best != labels[:, None]).all(1).sum()


def _with_top5(scores: Scores, missed: Tensor) -> dict[str, float]:
    """Return error, NLL, Brier score and ECE, and with them the top-5 error."""
    figures = scores.compute()
    count = figures.pop("count")
    return {**figures, "top5": float(missed) / count}


def _bins_as_json(bins: Reliability) -> dict[str, list[float | None]]:
    """Return the bins of the calibration error as lists; an empty bin has None for its means."""
    empty = (bins.count == 0).tolist()
    named = {"confidence": bins.confidence, "accuracy": bins.accuracy}
    means = {name: [None if e else x for e, x in zip(empty, t.tolist(), strict=True)] for name, t in named.items()}
    return {"edges": bins.edges.tolist(), "counts": bins.count.tolist(), **means}


def _align_chains(values: list[float], lengths: list[int]) -> Tensor:
    """Arrange one value per sample, chain after chain, as (chain, draw): the last draws of each, as many as the shortest has."""
    return torch.stack([chain[-min(lengths) :] for chain in torch.tensor(values).split(lengths)])


def evaluate(
    folders: Sequence[Path],
    data_dir: Path | None = None,
    limit_test: int | None = None,
    ood: DatasetName | None = None,
    progress: Progress = ignore_progress,
) -> dict[str, Any]:
    """Score the average over the samples of all these runs, chains of one law (`Experiment.law`).

    ``ood`` names a data set of another kind, to be distinguished from the test set by the uncertainty of the average.
    ``progress`` receives the share of the work just done.
    """
    config = _common_config([read_config(folder) for folder in folders], folders, limit_test)
    for folder in folders:
        if not all(len(SampleStore.open(chain)) for chain in chain_folders(folder)):
            raise ValueError(f"the run in {folder} has no samples yet")
    data = config.load_data(data_dir)
    average = open_posterior(config, data, *folders)
    batches = make_loader(data.test, TEST_BATCH, shuffle=False, workers=config.workers)
    scored = score(average, batches, lambda label, n: progress(label, n / len(data.test)))
    found = {
        "experiment": config.name,
        "runs": [str(folder) for folder in folders],
        "settings": config.to_json(),
        "samples": len(average),
        **scored,
        "ood": None if ood is None else _score_ood(average, data.test, config, ood, data_dir),
    }
    return {**found, "not_converged": describe_non_convergence(found)}


def find_samples(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of all runs, finished or not: those given, those below a folder that is none, those of result files."""
    found: list[Path] = []
    for path in paths:
        if path.is_file():
            if path.name != RESULT:
                raise ValueError(f"{path} is a file and holds no samples; give the folders of runs")
            path = path.parent
        # Not below a run: there is at most the run that it started from.
        below = [path] if (path / CONFIG).exists() or not path.is_dir() else find_runs(path, CONFIG)
        if not below:
            raise ValueError(f"there is no run in or below {path}: no folder has a {CONFIG}")
        found += [run for run in below if not any(run != other and run.is_relative_to(other) for other in below)]
    each: dict[Path, Path] = {}
    for run in found:
        each.setdefault(run.resolve(), run)
    return list(each.values())


def _common_config(configs: Sequence[Experiment], folders: Sequence[Path], limit_test: int | None) -> Experiment:
    """Return the configuration of the first run; raise ValueError if the samples of another cannot be averaged with its own."""
    first, seeds = configs[0], dict[int, Path]()
    for config, folder in zip(configs, folders, strict=True):
        if wrong := describe_differences(first.law, config.law, sides=(f"in {folders[0]}", f"in {folder}")):
            raise ValueError(f"{folder} and {folders[0]} cannot be averaged: {'; '.join(wrong)}")
        if config.seed in seeds:
            raise ValueError(
                f"{folder} and {seeds[config.seed]} have the same seed, {config.seed}: the same chain twice"
            )
        if limit_test is None and config.limit_test != first.limit_test:
            raise ValueError(
                f"{folder} and {folders[0]} were tested on different examples; choose some with --limit-test"
            )
        seeds[config.seed] = folder
    return first if limit_test is None else replace(first, limit_test=limit_test)


def _score_ood(
    average: Posterior, inside: Examples, config: Experiment, name: DatasetName, data_dir: Path | None
) -> dict[str, Any]:
    """Return the AUROC of telling the test set from another data set by the uncertainty of the average."""
    from ..prediction import metrics

    outside = load_dataset(name, data_dir, limit_test=config.limit_test, augment=False).test
    if outside[0][0].shape != inside[0][0].shape:
        shapes = f"{tuple(outside[0][0].shape)}, not {tuple(inside[0][0].shape)}"
        raise ValueError(f"--ood={name} has inputs of shape {shapes} as the run's own data")
    loaders = (make_loader(examples, TEST_BATCH, shuffle=False) for examples in (inside, outside))
    return {"data": name, **metrics.ood(*(average.uncertainty_loader(batches, progress=False) for batches in loaders))}
