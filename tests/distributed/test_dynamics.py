"""Replicas of samplers that keep more than weights: centres, masks, running means and velocities are equal to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.distributed import Ranks, replicate
from qlangevin.quantization.qtensor import QTensor
from tests.helpers.chains import loader, network, sha256, train
from tests.helpers.process_groups import run_on_ranks

SAMPLERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "localized": (ql.SGLD, {"localization": 10.0, "box": 0.5}),
    "preconditioned": (ql.SGLD, {"preconditioner": ql.RMS(freeze_after=4), "localization": 10.0}),
    "underdamped": (ql.SGHMC, {"friction": 0.3, "localization": 10.0}),
    "splitting": (
        ql.SGHMC,
        {"friction": 0.3, "integrator": "splitting", "preconditioner": "rms", "accumulator": "fp32"},
    ),
}


def make(name: str, model: nn.Module) -> Any:
    kind, settings = SAMPLERS[name]
    mask = torch.arange(20)[:, None].expand(20, 12) >= 4  # whole rows, and so whole blocks
    return kind(
        model.named_parameters(), lr=0.02, num_data=50, weights="bfp8", seed=5, mask={"0.weight": mask}, **settings
    )


def kept(model: nn.Module, sampler: Any) -> str:
    """The digest of all that the sampler keeps, and of the weights."""
    tensors = [p.detach() for p in model.parameters()]
    for p in model.parameters():
        state = sampler.state[p]
        found = [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
        tensors += [
            part
            for t in found
            for part in ((t.codes, t.exponents) if isinstance(t, QTensor) else (t,))
            if part is not None
        ]
    return sha256(*tensors)


def replicas_of(ranks: Ranks, folder: str, until: int, resume: bool, save: bool) -> dict[str, str]:
    """Digests of all samplers after steps on ranks whose weights differ before the replicas are made."""
    found = {}
    for name in SAMPLERS:
        path = Path(folder) / name
        model = network(seed=ranks.rank)
        sampler = make(name, model)
        replicas = replicate(model, sampler, every=1)
        batches = loader(ranks.rank, ranks.size)
        if resume:
            ql.load_checkpoint(path, replicas, sampler, batches)
        train(replicas, sampler, batches, until)
        if save and ranks.first:
            ql.save_checkpoint(path, replicas, sampler, batches)
        ranks.wait()
        found[name] = kept(model, sampler)
    return found


@pytest.mark.distributed
def test_all_that_samplers_keep_is_equal_on_all_ranks_and_resumes(tmp_path: Path) -> None:
    whole = run_on_ranks(replicas_of, 2, str(tmp_path), 9, False, False)
    begun = run_on_ranks(replicas_of, 2, str(tmp_path), 5, False, True)
    resumed = run_on_ranks(replicas_of, 2, str(tmp_path), 9, True, False)
    assert whole[0] == whole[1] == resumed[0] == resumed[1]
    assert begun[0] == begun[1]
    assert all(begun[0][name] != whole[0][name] for name in SAMPLERS)
