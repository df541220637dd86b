"""Run an experiment with any method of the paper: train, store, average, score. A run is a folder and can be resumed.

config.json              the configuration (`presets`)
manifest.json, samples/  the samples (`SampleStore`)
checkpoint.safetensors   the state of the chain, to resume from
chain-0/, chain-1/, ...  the same three for each of several chains
result.json              the result, written when the run is finished
begin/                   on ImageNet: the run whose last weights this one starts from
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._validate import describe_differences
from .._version import __version__
from ..distributed.ranks import ALONE, Ranks, agree, gather
from ..storage import files
from ..storage.leftovers import is_temporary
from ..storage.sample import chain_folder, chain_folders
from ..storage.store import SampleStore
from .chain import Chain, build_network, prepare_chain, train_chain
from .config import CHANGE_NO_NUMBER
from .convergence import describe_non_convergence
from .data import Data, make_loader
from .diagnose import diagnose_chain, shorten
from .environment import cores, environment, limit_threads
from .presets import CONFIG, Experiment, read_config
from .processes import Progress, ignore_progress, run_in_processes
from .results import RESULT, read_result
from .score import TEST_BATCH, open_posterior, score

__all__ = ["RESULT", "is_finished", "read_result", "run_experiment"]

WARM_START = "begin"


@dataclass(frozen=True)
class RunSpec:
    """A run: its configuration, its folder, and the folder of its data."""

    config: Experiment
    folder: Path
    data_dir: Path | None


class ChainSummary(NamedTuple):
    """Figures of one finished chain."""

    steps: int
    seconds: float
    nbytes: int
    """Bytes of the weights and the sampler's state, without gradients."""


class WorkShares(NamedTuple):
    """Shares of the progress of a run, which add up to one."""

    warm_start: float
    training: float
    scoring: float


def run_experiment(
    config: Experiment,
    folder: Path,
    data_dir: Path | None = None,
    progress: Progress = ignore_progress,
    ranks: Ranks = ALONE,
    jobs: int = 1,
) -> dict[str, Any]:
    """Do the run, or the rest of it, and return its result. ``progress`` receives a label and the share just done.

    Several ``ranks`` share the chains: some chains each, or some ranks for each chain. Alone, this process runs ``jobs`` chains
    at a time. Raises KeyboardInterrupt after a checkpoint if Ctrl-C was pressed; the same call resumes the run.
    """
    begun, done = _is_begun(config, folder), (folder / RESULT).exists()
    _check_ranks(config, ranks)
    if ranks.size > 1:
        agree({"settings": config.to_json(), "a run in the folder": begun, "a result in it": done}, ranks.group)
    if done:
        return read_result(folder)
    data = _load_data(config, data_dir, ranks)
    weights = sum(p.numel() for p in build_network(config, data).parameters())
    with limit_threads(weights, config.batch):
        return _run_on(data, RunSpec(config, folder, data_dir), progress, ranks, jobs, begun)


def _run_on(data: Data, spec: RunSpec, progress: Progress, ranks: Ranks, jobs: int, begun: bool) -> dict[str, Any]:
    """Do the run, or the rest of it, on loaded data."""
    config, folder, data_dir = spec.config, spec.folder, spec.data_dir
    shares = _divide_work(config, data)
    if not begun:  # only now, since the settings fit together: a mistake must not occupy the folder
        _create_folder(config, folder, ranks)
    if config.warm_start is not None:
        run_experiment(config.warm_start, folder / WARM_START, data_dir, _scale(progress, shares.warm_start), ranks)
    chains = _run_chains(spec, data, _scale(progress, shares.training), ranks, jobs)
    if ranks.size > 1:
        ranks.wait(patient=True)  # some ranks have more to do than others
        parts = gather(chains, ranks.group)
        chains = {int(i): ChainSummary(*summary) for part in parts for i, summary in part.items()}
    if ranks.first:
        result = _score_run(spec, data, chains, ranks, _scale(progress, shares.scoring))
        files.write(folder / RESULT, [json.dumps(result, indent=1, allow_nan=False).encode()])
    ranks.wait(patient=True)  # for the first rank, which scores
    return read_result(folder)


def _is_begun(config: Experiment, folder: Path) -> bool:
    """Return whether the folder holds this run already. Raises ValueError if it holds anything else."""
    if (folder / CONFIG).exists():
        there = replace(read_config(folder), **{name: getattr(config, name) for name in CHANGE_NO_NUMBER})
        if wrong := describe_differences(there.to_json(), config.to_json()):
            raise ValueError(f"{folder} holds another run: {', '.join(wrong)}; choose another folder with --out")
        return True
    # A run that was killed while it wrote its first file has left that file's temporary one.
    if folder.exists() and not (folder.is_dir() and all(is_temporary(path.name) for path in folder.iterdir())):
        raise ValueError(f"{folder} is there and holds something else; choose another folder with --out")
    return False


def is_finished(config: Experiment, folder: Path) -> bool:
    """Return whether the folder holds the result of this run. Raises ValueError if it holds another run, or a damaged result."""
    if not _is_begun(config, folder) or not (folder / RESULT).exists():
        return False
    read_result(folder)  # a damaged one is an error now, not after all other runs of a sweep
    return True


# ---- preparing


def _check_ranks(config: Experiment, ranks: Ranks) -> None:
    """Raise ValueError if these ranks cannot share the chains of the run."""
    if config.chains % ranks.size and ranks.size % config.chains:
        raise ValueError(
            f"--chains {config.chains} cannot be shared evenly by {ranks.size} ranks; take a multiple or a divisor of that"
        )
    if config.wire and ranks.size <= config.chains:
        raise ValueError("--wire is for chains that several ranks step together; start more ranks, with torchrun")


def _load_data(config: Experiment, data_dir: Path | None, ranks: Ranks) -> Data:
    """Load the data, the same on all ranks; the first finds or downloads them before the others look."""
    if not ranks.first:
        ranks.wait(patient=True)
    data = config.load_data(data_dir)
    if ranks.first:
        ranks.wait(patient=True)
    ranks.wait(patient=True)  # to read them may take long, too
    if ranks.size > 1:
        agree({"training examples": len(data.train), "test examples": len(data.test), "data": data.note}, ranks.group)
    return data


def _divide_work(config: Experiment, data: Data) -> WorkShares:
    """Estimate how the work divides. Raises ValueError if the schedule does not fit the data."""
    samples = prepare_chain(config, data).schedule.samples
    epochs = config.length_in_epochs
    warm_start = 0.0 if config.warm_start is None else config.epochs / (epochs + config.epochs)
    # Backward takes twice as long as forward; scoring runs the samples only forward.
    training, scoring = 3 * epochs * len(data.train), samples * len(data.test)
    rest = (1 - warm_start) / (training + scoring)
    return WorkShares(warm_start, training * rest, scoring * rest)


def _create_folder(config: Experiment, folder: Path, ranks: Ranks) -> None:
    """Create the folder of the run, which all ranks must see."""
    if ranks.first:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / CONFIG, [json.dumps(config.to_json(), indent=1).encode()])
    ranks.wait()
    if ranks.size > 1:
        agree({"a run in the folder, which all ranks must see,": (folder / CONFIG).exists()}, ranks.group)


def _scale(progress: Progress, share: float) -> Progress:
    """Return the progress function of a part that is this share of the whole."""
    return lambda label, done: progress(label, share * done)


# ---- chains


def _run_chains(spec: RunSpec, data: Data, progress: Progress, ranks: Ranks, jobs: int) -> Mapping[int, ChainSummary]:
    """Run this rank's chains, or the rest of them; return their summaries by number."""
    chains = spec.config.chains
    if ranks.size == 1 and min(chains, jobs) > 1:
        return _run_chains_in_processes(spec, progress, min(chains, jobs))
    if ranks.size > chains:
        team = ranks.split(chains)
        return {team.part: _run_chain(spec, team.part, data, team, progress)}
    mine = range(ranks.rank, chains, ranks.size)
    return {chain: _run_chain(spec, chain, data, ALONE, _scale(progress, 1 / len(mine))) for chain in mine}


def _run_chains_in_processes(spec: RunSpec, progress: Progress, count: int) -> Mapping[int, ChainSummary]:
    """Run the chains in processes of their own, ``count`` at a time."""
    chains = range(spec.config.chains)

    def report(chain: int, label: str, share: float, ended: int) -> None:
        progress(f"{ended}/{len(chains)} chains", share / len(chains))

    progress("chains", 0.0)
    arguments = [(spec, chain, None, ALONE) for chain in chains]
    outcomes = run_in_processes(_run_chain, arguments, count, max(1, cores() // count), report)
    errors = {i: outcomes[i].error if i in outcomes else "its process died" for i in chains}
    if wrong := [f"chain {i}: {error}" for i, error in errors.items() if error]:
        raise RuntimeError(f"{'; '.join(wrong)}; what is stored is safe, and the same command resumes")
    return {i: outcome.value for i, outcome in outcomes.items()}


def _run_chain(spec: RunSpec, number: int, data: Data | None, ranks: Ranks, progress: Progress) -> ChainSummary:
    """Run one chain, or the rest of it; load the data if they are not given."""
    config = spec.config
    data = data or config.load_data(spec.data_dir)
    chain = prepare_chain(config, data, spec.folder / WARM_START if config.warm_start else None, number, ranks)
    folder = chain_folder(spec.folder, number) if config.chains > 1 else spec.folder
    steps = chain.schedule.total_steps
    seconds = train_chain(chain, folder, _scale(progress if ranks.first else ignore_progress, 1 / steps))
    return ChainSummary(steps, seconds, _count_bytes(chain))


def _count_bytes(chain: Chain) -> int:
    """Return the bytes that weights and the sampler's state occupy, without gradients."""
    state = [t for held in chain.sampler.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in [*chain.model.parameters(), *state])


# ---- scoring


def _score_run(
    spec: RunSpec, data: Data, chains: Mapping[int, ChainSummary], ranks: Ranks, progress: Progress
) -> dict[str, Any]:
    """Score the average over all samples, and return everything that is known of the run."""
    config, began = spec.config, time.monotonic()
    average = open_posterior(config, data, spec.folder)
    batches = make_loader(data.test, TEST_BATCH, shuffle=False, workers=config.workers)
    scored = score(average, batches, _scale(progress, 1 / len(data.test)))
    stores = [SampleStore.open(folder) for folder in chain_folders(spec.folder)]
    if len(stores) != config.chains:
        raise ValueError(
            f"{spec.folder} has {len(stores)} of {config.chains} chains; do all ranks see the same folder?"
        )
    weights = sum(p.numel() for p in average.model.parameters())
    stored = sum(store.nbytes for store in stores) / len(average)
    alone = ranks.size <= config.chains  # replicas are not packed, and their checkpoints fit no packed chain
    diagnosis = shorten(diagnose_chain(config, data, chain_folders(spec.folder)[0])) if alone else None
    result = {
        "experiment": config.name,
        "version": __version__,
        "command": config.command,
        "settings": config.to_json(),
        "scaled": config.scaled,
        "environment": environment(),
        "data": {"name": data.name, "train": len(data.train), "test": len(data.test), "note": data.note},
        "model": {"name": type(average.model).__name__, "weights": weights},
        **scored,
        "memory": {"training": chains[0].nbytes / weights, "sample": stored / weights},
        "diagnosis": diagnosis,  # of the first chain, at its end
        "steps": chains[0].steps,
        "samples": len(average),
        "ranks": max(1, ranks.size // config.chains),  # for each chain
        "seconds": {
            "train": max(chain.seconds for chain in chains.values()),  # as if all chains had run at the same time
            "evaluate": time.monotonic() - began,
        },
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return {**result, "not_converged": describe_non_convergence(result)}
