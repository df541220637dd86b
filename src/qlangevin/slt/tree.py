"""Draws in the schema that devinterp 2 writes, so that its analyses run on them. xarray comes with ArviZ.

    init_loss             [chain, token_pos]
    sampling_loss         [chain, draw, batch, token_pos]
    sampling_loss_micro   [chain, step, batch_sampling, token_pos]
    loss_NAME             [chain, draw, batch_NAME, token_pos]      of the observable NAME
    input_ids_NAME        [batch_NAME, token]
    attributes            metadata.config: sampler, observables, shared_observable_dims, tokenizer_context_length

Differences: the burn-in is left out, and the attributes say 0 steps of it, so that ``compute_llc`` returns our estimate. Of a
step we keep the mean loss, so ``batch`` and ``batch_sampling`` have length 1 and token positions share it: L_B(w) - L_B(w*) +
L_n(w*), which has less noise than the loss L_B(w) of its batch. There is no ``sampling_input_ids_micro``. Losses of examples
without tokens have one position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .traces import Traces

__all__ = ["to_tree"]

METHODS = {"sgld": "sgmcmc_sgld", "rms": "rmsprop_sgld", "sghmc": "sghmc"}


def to_tree(result: Traces) -> Any:
    """Return the draws of an estimate as an `xarray.DataTree`."""
    import xarray as xr

    length = _token_positions(result)
    observed = {_identifier(name): values for name, values in result.observables.items()}
    if len(observed) < len(result.observables):
        raise ValueError(f"observables must differ in letters and digits, got {', '.join(result.observables)}")
    arrays: dict[str, Any] = _losses(result, length)
    for (name, values), key in zip(observed.items(), result.observables, strict=True):
        batch = f"batch_{name}"
        tokens = values if values.ndim == 4 else values[..., None]
        arrays[f"loss_{name}"] = (("chain", "draw", batch, "token_pos"), tokens.astype(np.float32))
        ids = result.input_ids.get(key, np.zeros((tokens.shape[2], length + 1), np.int64))
        arrays[f"input_ids_{name}"] = ((batch, "token"), ids)
    return xr.DataTree(dataset=xr.Dataset(arrays, attrs=_attributes(result, length, observed)))


def _token_positions(result: Traces) -> int:
    lengths = {name: values.shape[3] if values.ndim == 4 else 1 for name, values in result.observables.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"observables must have equally many tokens to be in one tree, got {lengths}")
    return next(iter(lengths.values()), 1)


def _identifier(name: str) -> str:
    """Return a name as devinterp spells it in the names of variables."""
    found = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return f"_{found}" if found[:1].isdigit() else found or "_"


def _losses(result: Traces, length: int) -> dict[str, Any]:
    s = result.settings
    steps = (result.losses - result.baselines)[:, s.burn_in :] + result.init_loss
    draws = steps[:, s.steps_between - 1 :: s.steps_between]
    baseline = np.full(len(steps), result.init_loss)

    def spread(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        return np.broadcast_to(values[..., None].astype(np.float32), (*values.shape, length))

    return {
        "init_loss": (("chain", "token_pos"), spread(baseline)),
        "sampling_loss": (("chain", "draw", "batch", "token_pos"), spread(draws[..., None])),
        "sampling_loss_micro": (("chain", "step", "batch_sampling", "token_pos"), spread(steps[..., None])),
    }


def _attributes(result: Traces, length: int, observed: dict[str, Any]) -> dict[str, Any]:
    s = result.settings
    sampler: dict[str, Any] = {
        "lr": s.lr, "n_beta": s.nbeta, "localization": s.localization, "bounding_box_size": s.box, "batch_size": 1,
        "num_chains": s.chains, "num_draws": s.draws, "num_burnin_steps": 0, "num_steps_bw_draws": s.steps_between,
        "gradient_accumulation_steps": 1, "init_seed": s.seed, "noise_level": 1.0, "llc_weight_decay": 0.0,
        "sampling_method": METHODS[s.sampler], "sampling_method_kwargs": {}, "init_noise": None, "shuffle": True,
        "save_metrics": False, "epoch_mode": "cycle", "match_sampling_input_ids_across_chains": False,
        "scheduler_type": "constant", "scheduler_kwargs": None, "cores": 1, "online": False,
    }  # fmt: skip
    each = [{"type": "ObserveDifferentDataset", "obs_id": name, "batches_per_draw": 1} for name in observed]
    config = {
        "sampler": sampler,
        "observables": each,
        "shared_observable_dims": ["token", "token_pos"],
        "tokenizer_context_length": length + 1,
    }
    return {"metadata": {"config": config}, "completed": 1}
