"""Stores of random samples for the tests of predictions, and the averages they must give."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import lowering
from tests.helpers.networks import build

X = torch.randn(23, 4, generator=torch.Generator().manual_seed(9))
LABELS = torch.randint(3, (23,), generator=torch.Generator().manual_seed(9))

Fill = Callable[..., ql.SampleStore]


def small_model(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def store_draws(path: Path, count: int = 6, seed: int = 0, model: nn.Module | None = None) -> ql.SampleStore:
    """Create a store of standard normal weights of a model."""
    model = small_model() if model is None else model
    with ql.SampleStore.create(path, model) as store:
        append_draws(store, model, count, seed)
    return store


def append_draws(store: ql.SampleStore, model: nn.Module, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in model.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator))
        store.append(model)


def store_walk(path: Path, model: nn.Module, count: int = 3, seed: int = 0) -> ql.SampleStore:
    """Create a store of a random walk from the weights and buffers of a model."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with ql.SampleStore.create(path, model) as store, torch.no_grad():
        for _ in range(count):
            for t in (*model.parameters(), *model.buffers()):
                if t.is_floating_point():
                    step = 0.05 * torch.randn(t.shape, generator=generator)
                    t.copy_((t.decode() if isinstance(t, ql.QTensor) else t) + step.to(t.dtype))
            for name, t in model.named_buffers():
                if name.endswith("running_var"):
                    t.abs_()
            store.append(model)
    return store


def predict_alike(a: ql.Posterior, b: ql.Posterior) -> bool:
    """Return True if two posteriors predict the same with each of their samples."""
    return len(a) == len(b) and torch.equal(a.samples(X), b.samples(X))


def build_case(name: str, kind: str) -> tuple[nn.Module, Tensor]:
    """Build one of the networks, "plain", "packed", or lowered to a format, and inputs for it."""
    model, x, _ = build(name)
    if "packed" in kind:
        ql.pack(model, "bfp8")
    if kind not in ("plain", "packed"):
        ql.lower(model, kind.removeprefix("packed "), "bfp8")
    return model, x


@torch.no_grad()
def evaluate_by_hand(model: nn.Module, store: Any, x: Tensor) -> Tensor:
    """Load each sample into a copy of the model, and call it."""
    model = copy.deepcopy(model).eval()
    outputs = []
    for sample in store:
        sample.load_into(model)
        outputs.append(model(x))
    return torch.stack(outputs)


def open_posterior(store: Any, model: nn.Module, vectorize: bool | None = None, **options: Any) -> ql.Posterior:
    return ql.Posterior.open(store, model, **{"link": "identity", **options}, vectorize=vectorize)


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return all that an evaluation could change: identity, numbers and versions of tensors, modes, attributes, generators."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    plain = {n: t.decode().detach() if isinstance(t, ql.QTensor) else t.detach() for n, t in named}
    return {
        "tensors": [(n, id(t), t.requires_grad, t._version, t.grad is None) for n, t in named],
        "numbers": {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in plain.items()},
        "modes": [(n, m.training) for n, m in model.named_modules()],
        "momenta": [m.momentum for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)],
        "attributes": [(n, sorted(m.__dict__)) for n, m in model.named_modules()],
        "counts": lowering.state_dict(model),
        "generator": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "grad": torch.is_grad_enabled(),
    }  # fmt: skip
