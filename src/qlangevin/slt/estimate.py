"""`llc`: estimate the local learning coefficient of a model at its weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .._validate import check_integer
from .._warnings import warn
from ..distributed.ranks import Ranks, agree, join
from ..quantization.formats import Format
from ..sampling.preconditioner import RMS
from .baseline import measure_baseline
from .borrowing import hold_still, own_format
from .chain import Job, defer_interrupt, run_chain
from .data import count_data
from .folder import Record, RunFolder
from .identity import describe_estimate
from .judging import ChainLeftError
from .losses import Loss, Observables, read_loss, read_observables
from .result import LLC
from .selection import Masks, Part, select_parts
from .settings import Settings, default_nbeta, read_sampler, read_weights

__all__ = ["llc"]


def llc(
    model: nn.Module,
    loader: DataLoader[Any],
    loss: Loss | None = None,
    *,
    lr: float,
    localization: float,
    nbeta: float | None = None,
    weights: str | Format | None = "bf16",
    sampler: str | RMS = "sgld",
    chains: int = 4,
    draws: int = 200,
    burn_in: int | None = None,
    steps_between: int = 1,
    observables: Observables | None = None,
    masks: Masks | None = None,
    box: float | None = None,
    friction: float = 0.1,
    store: str | os.PathLike[str] | None = None,
    keep_weights: bool = False,
    num_data: int | None = None,
    init_batches: int | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> LLC:
    """Estimate the local learning coefficient λ̂ = nβ (E[L_n(w)] - L_n(w*)) at the weights w* of a model.

    The expectation is over the posterior at inverse temperature nβ around w*, sampled by chains that begin there:

        p(w) ∝ exp(-nβ L_n(w) - γ/2 |w - w*|²).

    ``lr``, ``nbeta`` and ``localization`` mean what they mean in devinterp: ε, nβ and γ; see `settings`. The model is in
    evaluation mode meanwhile, and is as before afterwards, also after an error or Ctrl-C. Chains run one after another, on the
    ranks of torchrun side by side; each takes the memory of its own weights, and all share w*.

    Args:
        model: at w*. Parameters that do not require gradients do not move.
        loader: a DataLoader over the training data; chains take its data set and batch size, in orders of their own.
        loss: a function of model and batch, see `losses`; by default `token_losses`. `supervised` makes one of a criterion.
        lr: ε, the stepsize.
        localization: γ, the strength of the pull towards w*.
        nbeta: nβ; by default n / log n.
        weights: the format of the chains' weights: ``"bf16"``, ``"bfp8"``, ``"bfp8/16"``, or None for the model's own dtype.
        sampler: ``"sgld"``, ``"rms"`` (or a `qlangevin.RMS`) or ``"sghmc"``.
        chains, draws: their numbers; ``draws`` of each chain.
        burn_in: steps before the first draw, which do not count; by default half as many as steps after it.
        steps_between: steps for each draw. The estimate takes the losses of all of them.
        observables: loaders of data whose losses are recorded at each draw, by name; with a loss of its own as (loader, loss).
        masks: parts of the model, by name, each estimated with all other weights at w*; see `select_parts`.
        box: weights stay this close to w*.
        friction: of ``"sghmc"``.
        store: a folder for what is drawn. The same call resumes an estimate that was interrupted, bit for bit.
        keep_weights: keep the weights of all draws in the store, too.
        num_data: n; by default the examples of the loader.
        init_batches: measure L_n(w*) on this many batches; by default on all data, which reduces the noise of batches.
        seed: of all random bits.
        progress: called with the number of steps just taken.
    """
    loss, settings = read_loss(loss), _read_settings(locals())
    parts, named = select_parts(model, masks), dict(model.named_parameters())
    observed = read_observables(observables, loss)
    with join() as ranks, hold_still(model), torch.inference_mode(False), torch.enable_grad():
        same: dict[str, Any] = {"keep_weights": keep_weights, "init_batches": init_batches}
        folder = _open_folder(store, describe_estimate(settings, parts, named, loader, observed, **same), parts, ranks)
        baseline = measure_baseline(model, loader, loss, init_batches)
        _check_loss(folder, baseline.mean, ranks)
        job = Job(model, loader, loss, settings, baseline, observed, keep_weights)
        with defer_interrupt() as interrupted:
            records = _run_chains(job, parts, folder, ranks, interrupted, progress or (lambda steps: None))
    results = {part.name: _make_result(job, part, records[i], named) for i, part in enumerate(parts)}
    for result in results.values():
        result.parts.update(results)  # type: ignore[attr-defined]
        for remark in result.remarks:
            warn(f"{result.name}: {remark}")
    return results[parts[0].name]


@torch.inference_mode(False)
def _read_settings(given: Mapping[str, Any]) -> Settings:
    n = given["num_data"] if given["num_data"] is not None else count_data(given["loader"])
    check_integer("num_data", n, 1)
    nbeta = default_nbeta(n) if given["nbeta"] is None else given["nbeta"]
    draws = check_integer("draws", given["draws"], 4) * check_integer("steps_between", given["steps_between"], 1)
    burn_in = draws // 2 if given["burn_in"] is None else check_integer("burn_in", given["burn_in"], 0)
    method, preconditioner = read_sampler(given["sampler"], burn_in)
    if given["init_batches"] is not None:
        check_integer("init_batches", given["init_batches"], 1)
    if given["keep_weights"] and given["store"] is None:
        raise ValueError("keep_weights=True needs a store to keep them in")
    weights = own_format(given["model"]) if given["weights"] is None else given["weights"]
    same = {name: given[name] for name in ("lr", "localization", "friction", "box", "chains", "draws", "steps_between")}
    settings = Settings(
        nbeta=float(nbeta), num_data=n, weights=read_weights(weights), sampler=method,
        preconditioner=preconditioner, burn_in=burn_in, seed=given["seed"], **same,
    )  # fmt: skip
    settings.make_sampler([torch.zeros(1, requires_grad=True)])  # refuses what it cannot do before anything runs
    return settings


def _open_folder(
    store: str | os.PathLike[str] | None, about: Mapping[str, Any], parts: Sequence[Part], ranks: Ranks
) -> RunFolder | None:
    if store is None:
        if ranks.size > 1:
            raise ValueError("chains on several ranks need a store, a folder that all of them see; give store=")
        return None
    if ranks.size > 1:
        agree(about, ranks.group)
        if ranks.first:
            RunFolder(Path(store), about, len(parts))
        ranks.wait()
    return RunFolder(Path(store), about, len(parts))


def _check_loss(folder: RunFolder | None, loss: float, ranks: Ranks) -> None:
    """Refuse a folder whose chains had another loss at w*: other data, or another loss function."""
    if folder is None:
        return
    if ranks.size > 1:
        if ranks.first:
            folder.check_loss(loss)
        ranks.wait()
    folder.check_loss(loss)


def _run_chains(
    job: Job, parts: Sequence[Part], folder: RunFolder | None, ranks: Ranks, interrupted: Callable[[], bool],
    progress: Callable[[int], None],
) -> list[list[Record]]:  # fmt: skip
    """Run this rank's chains of all parts; return the records of all chains."""
    todo = [(i, chain) for i in range(len(parts)) for chain in range(job.settings.chains)]
    found: dict[tuple[int, int], Record] = {}
    for number, (i, chain) in enumerate(todo):
        place = None if folder is None else folder.chain(i, chain)
        record = None if place is None else place.read()
        if record is None and number % ranks.size == ranks.rank:
            with _keep_finished(found, parts):
                record = run_chain(job, parts[i], chain, place, interrupted, progress)
        elif record is not None:
            progress(record.done)
            if record.failed is not None:
                raise ChainLeftError(record.failed, record.losses[: record.done].numpy())
        if record is not None:
            found[i, chain] = record
    if folder is not None and ranks.size > 1:
        ranks.wait(patient=True)
        found |= {key: r for key in todo if key not in found and (r := folder.chain(*key).read()) is not None}
    return [[found[i, chain] for chain in range(job.settings.chains)] for i in range(len(parts))]


@contextmanager
def _keep_finished(found: Mapping[tuple[int, int], Record], parts: Sequence[Part]) -> Iterator[None]:
    """Give a `ChainLeftError` the losses of the chains that have ended."""
    try:
        yield
    except ChainLeftError as error:
        error.finished = {(parts[i].name, chain): record.losses.numpy() for (i, chain), record in found.items()}
        raise


def _make_result(job: Job, part: Part, records: Sequence[Record], named: Mapping[str, Tensor]) -> LLC:
    observed = {name: torch.stack([r.observed[name] for r in records]).numpy() for name in job.observables}
    ids = {name: o.ids.cpu().numpy() for name, o in job.observables.items() if o.ids is not None}
    return LLC(
        part.name,
        job.settings,
        part.size(named),
        np.stack([r.losses.numpy() for r in records]),
        np.stack([r.baselines.numpy() for r in records]),
        job.baseline.mean,
        observed,
        ids,
        records[-1].resolution,
    )
