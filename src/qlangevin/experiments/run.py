"""Classification with any method of the paper: train, store, average, score; a run is a folder, and can be interrupted.

config.json              the configuration (`presets`)
manifest.json, samples/  the samples (`SampleStore`)
checkpoint.safetensors   where the run is
chain-0/, chain-1/, ...  the same three for each of several chains
result.json              what came out, when it is done
begin/                   the run whose last weights this one begins with, on ImageNet
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .._validate import describe_differences
from .._version import __version__
from ..distributed.ranks import ALONE, Ranks, agree, gather
from ..lowering.layers import lower
from ..prediction.posterior import Posterior
from ..storage import files
from ..storage.sample import chain_folder, chain_folders
from ..storage.store import SampleStore
from .chain import Run, network, prepare, train
from .data import datasets as datasets
from .data.datasets import Data
from .environment import cores, environment
from .presets import Experiment, from_json
from .processes import Progress, side_by_side
from .score import score

__all__ = ["CONFIG", "RESULT", "configuration", "finished", "load", "posterior", "read_result", "run_experiment"]

CONFIG, RESULT, BEGIN = "config.json", "result.json", "begin"
TEST_BATCH = 500


def run_experiment(
    config: Experiment,
    folder: Path,
    data_dir: Path | None = None,
    progress: Progress = lambda label, share: None,
    ranks: Ranks = ALONE,
    jobs: int = 1,
) -> dict[str, Any]:
    """Do the run, or what is left of it, and return its result; ``progress`` is told what runs and what share more is done.

    Several ``ranks`` share the chains: some chains each, or some ranks for each chain. Alone, this process does them ``jobs`` at
    a time. Raises KeyboardInterrupt after a checkpoint if Ctrl-C was pressed. The same call goes on from there.
    """
    begun, done = _begun(config, folder), (folder / RESULT).exists()
    _check_ranks(config, ranks)
    if ranks.size > 1:
        agree({"settings": config.to_json(), "a run in the folder": begun, "a result in it": done}, ranks.group)
    if done:
        return read_result(folder)
    patient = ranks.patient()  # for those with more to do
    data = _loaded(config, data_dir, ranks)
    samples, rest = prepare(config, data).schedule.samples, 1.0
    if not begun:  # not before all is known to fit together: else a mistake would occupy the folder
        _begin(config, folder, ranks)
    if config.beginning is not None:
        rest = config.length_in_epochs / (config.length_in_epochs + config.epochs)
        first: Progress = lambda label, share: progress(label, share * (1 - rest))  # noqa: E731
        run_experiment(config.beginning, folder / BEGIN, data_dir, first, ranks)
    # Backward takes twice as long as forward; samples are only run forward.
    work = 3 * config.chains * config.length_in_epochs * len(data.train), config.chains * samples * len(data.test)
    steps, examples = (rest * part / sum(work) for part in work)
    became = _chains(config, folder, data_dir, data, lambda label, share: progress(label, share * steps), ranks, jobs)
    if ranks.size > 1:
        became = {int(i): about for found in gather(became, patient.group) for i, about in found.items()}
    if ranks.first:
        advance: Progress = lambda label, n: progress(label, n * examples / len(data.test))  # noqa: E731
        result = _result(config, data, folder, became, ranks, advance)
        files.write(folder / RESULT, [json.dumps(result, indent=1, allow_nan=False).encode()])
    patient.wait()  # while the first averages
    return read_result(folder)


def _begin(config: Experiment, folder: Path, ranks: Ranks) -> None:
    """Make the folder of the run, which all ranks must see."""
    if ranks.first:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / CONFIG, [json.dumps(config.to_json(), indent=1).encode()])
    ranks.wait()
    if ranks.size > 1:
        agree({"a run in the folder, which all ranks must see,": (folder / CONFIG).exists()}, ranks.group)


def _check_ranks(config: Experiment, ranks: Ranks) -> None:
    if config.chains % ranks.size and ranks.size % config.chains:
        raise ValueError(
            f"--chains {config.chains} cannot be shared evenly by {ranks.size} ranks; take a multiple or a divisor of that"
        )
    if config.wire and ranks.size <= config.chains:
        raise ValueError("--wire is for chains that several ranks step together; start more ranks, with torchrun")


def _chains(
    config: Experiment, folder: Path, data_dir: Path | None, data: Data, progress: Progress, ranks: Ranks, jobs: int
) -> dict[int, dict[str, Any]]:
    """Do the chains of a run that are this rank's, or what is left of them, and say of each what `_chain` says."""
    if ranks.size == 1 and min(config.chains, jobs) > 1:
        return _side_by_side(config, folder, data_dir, progress, jobs)
    team, mine = ALONE, range(ranks.rank, config.chains, ranks.size)
    if ranks.size > config.chains:
        team = ranks.split(config.chains)
        mine = range(team.part, team.part + 1)
    share: Progress = lambda label, done: progress(label, done / len(mine))  # noqa: E731
    return {chain: _chain(config, folder, data_dir, chain, data, team, share) for chain in mine}


def _side_by_side(
    config: Experiment, folder: Path, data_dir: Path | None, progress: Progress, jobs: int
) -> dict[int, dict[str, Any]]:
    """Chains in processes of their own, which do not know of one another."""
    count = min(jobs, config.chains)
    arguments = [(config, folder, data_dir, chain, None, ALONE) for chain in range(config.chains)]
    progress("chains", 0.0)
    told = lambda i, label, share, ended: progress(f"{ended}/{config.chains} chains", share / config.chains)  # noqa: E731
    became = side_by_side(_chain, arguments, count, max(1, cores() // count), told)
    lost = "its process died"
    errors = {i: became[i].error if i in became else lost for i in range(config.chains)}
    if wrong := [f"chain {i}: {error}" for i, error in errors.items() if error]:
        raise RuntimeError(f"{'; '.join(wrong)}; what is stored is safe, and the same command goes on")
    return {i: outcome.value for i, outcome in became.items()}


def _chain(
    config: Experiment,
    folder: Path,
    data_dir: Path | None,
    chain: int,
    data: Data | None,
    ranks: Ranks,
    progress: Progress,
) -> dict[str, Any]:
    """One chain, or what is left of it: its steps, the seconds they took, and the bytes it held."""
    data = data or load(config, data_dir)
    parts = prepare(config, data, folder / BEGIN if config.beginning else None, chain, ranks)
    place = chain_folder(folder, chain) if config.chains > 1 else folder
    silent: Progress = lambda label, share: None  # noqa: E731
    told = progress if ranks.first else silent
    seconds = train(parts, place, lambda label, n: told(label, n / parts.schedule.total_steps))
    return {"steps": parts.schedule.total_steps, "seconds": seconds, "bytes": _bytes_held(parts)}


def _loaded(config: Experiment, data_dir: Path | None, ranks: Ranks) -> Data:
    """The data, the same on all ranks; the first finds or fetches them before the others look."""
    if not ranks.first:
        ranks.wait()
    data = load(config, data_dir)
    if ranks.first:
        ranks.wait()
    if ranks.size > 1:
        agree({"training examples": len(data.train), "test examples": len(data.test), "data": data.note}, ranks.group)
    return data


def load(config: Experiment, data_dir: Path | None) -> Data:
    return datasets.load(config.data, data_dir, **config.load_options())


def posterior(config: Experiment, data: Data, *folders: Path) -> Posterior:
    """The average over the samples of all chains of a run, or of several."""
    model = network(config, data)
    lower(model, config.activation_format, config.activation_format)
    return Posterior.open(folders, model)


def _result(
    config: Experiment, data: Data, folder: Path, became: dict[int, dict[str, Any]], ranks: Ranks, progress: Progress
) -> dict[str, Any]:
    began, average = time.monotonic(), posterior(config, data, folder)
    scored = score(average, datasets.loader(data.test, TEST_BATCH, shuffle=False, workers=config.workers), progress)
    stores = [SampleStore.open(place) for place in chain_folders(folder)]
    if len(stores) != config.chains:
        raise ValueError(f"{folder} has {len(stores)} of {config.chains} chains; do all ranks see the same folder?")
    weights = sum(p.numel() for p in average.model.parameters())
    stored = sum(store.nbytes for store in stores) / len(average)
    return {
        "experiment": config.name,
        "version": __version__,
        "command": config.command,
        "settings": config.to_json(),
        "scaled": config.scaled,
        "environment": environment(),
        "data": {"name": data.name, "train": len(data.train), "test": len(data.test), "note": data.note},
        "model": {"name": type(average.model).__name__, "weights": weights},
        **scored,
        "memory": {"training": became[0]["bytes"] / weights, "sample": stored / weights},
        "steps": became[0]["steps"],
        "samples": len(average),
        "ranks": max(1, ranks.size // config.chains),  # a chain
        "seconds": {
            "train": max(about["seconds"] for about in became.values()),  # the chains are independent
            "evaluate": time.monotonic() - began,
        },
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _bytes_held(parts: Run) -> int:
    """What weights and the sampler's state occupy, without gradients."""
    state = [t for held in parts.sampler.state.values() for t in held.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in [*parts.model.parameters(), *state])


def _begun(config: Experiment, folder: Path) -> bool:
    """Whether the folder holds this run already. It must not hold anything else."""
    if (folder / CONFIG).exists():
        there = replace(configuration(folder), workers=config.workers)  # which may change: they change no number
        if wrong := describe_differences(there.to_json(), config.to_json()):
            raise ValueError(f"{folder} holds another run: {', '.join(wrong)}; choose another folder with --out")
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and holds something else; choose another folder with --out")
    return False


def finished(config: Experiment, folder: Path) -> bool:
    """Whether the folder holds the result of this run. It must not hold anything else."""
    return _begun(config, folder) and (folder / RESULT).exists()


def configuration(folder: Path) -> Experiment:
    """What a run was told."""
    file = folder / CONFIG
    if not file.exists():
        raise ValueError(f"there is no run in {folder}: it has no {CONFIG}")
    return from_json(files.parse_json(files.read(file, f"the configuration {file}"), f"the configuration {file}"))


def read_result(folder: Path) -> dict[str, Any]:
    file = folder / RESULT
    result: dict[str, Any] = files.parse_json(files.read(file, f"the result {file}"), f"the result {file}")
    return result
