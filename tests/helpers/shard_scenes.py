"""Scenes with sharded parameters: functions that two processes run, for `tests.distributed.test_shards`.

Every scene takes the ranks and a folder that they share, and returns what its process found.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin._dtensor import local
from qlangevin.distributed import Ranks, gathered, shard
from qlangevin.quantization.qtensor import QTensor

STEPS, SIZE = 20, 2
SETTINGS: dict[str, Any] = {"lr": 0.3, "num_data": 1000, "weight_decay": 1e-3, "gradients": "bfp8", "seed": 5}

Found = dict[str, Any]


def network(seed: int = 0) -> nn.Sequential:
    """33 rows: two processes have 17 and 16 of them."""
    torch.manual_seed(seed)
    layers = [nn.Linear(20, 33), nn.LayerNorm(33), nn.ReLU(), nn.Linear(33, 24), nn.ReLU(), nn.Linear(24, 1)]
    return nn.Sequential(*layers)


class Tied(nn.Module):
    """A model with a weight that two layers share, and with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.middle = nn.Embedding(31, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 31, bias=False)
        self.last.weight = self.embedding.weight
        self.position = nn.Parameter(torch.randn(7, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.last(self.middle(self.embedding(tokens) + self.position)))


TOKENS = torch.arange(21).view(3, 7)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 20, generator=generator), torch.randn(8, 1, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step)
    return nn.functional.mse_loss(model(x[rank::SIZE]), y[rank::SIZE])


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        q = local(p)
        assert isinstance(q, QTensor), name
        found[name] = q.codes.clone()
        if q.exponents is not None:
            found[f"{name} exponents"] = q.exponents.clone()
    return found


# ---- scenes, which both processes run


def run_chain(model: nn.Module, rank: int, **settings: Any) -> ql.SGLD:
    sampler = ql.SGLD(model.parameters(), **SETTINGS | settings)
    for step in range(STEPS):
        sampler.zero_grad()
        loss_of(model, step, rank).backward()
        sampler.step()
    return sampler


def all_codes(model: nn.Module, sampler: ql.SGLD | None = None) -> dict[str, Tensor] | None:
    sample = gathered(model, sampler)
    return None if sample is None else codes_of(sample)


def packed(ranks: Ranks, folder: str) -> Found:
    """The chain that the other scenes vary, from its first forward to a stored sample."""
    model = ql.pack(network(seed=ranks.rank), "bfp8")  # the second process gets the weights of the first
    shard(model)
    kinds = {name: type(local(p)).__name__ for name, p in model.named_parameters()}
    memory = {name: cast(QTensor, local(p)).codes.untyped_storage().nbytes() for name, p in model.named_parameters()}
    begun, seen = all_codes(model), list[Tensor]()
    model[0].register_forward_hook(lambda module, args, output: seen.append(module.weight), prepend=True)
    output = model(batch(0)[0]).detach()
    with pytest.raises(RuntimeError, match="a sharded layer has them"):
        cast(QTensor, seen[0]).decode()
    sampler = run_chain(model, ranks.rank)
    model(batch(0)[0])  # the model stays gathered after this
    sample = gathered(model)
    if sample is not None:
        with ql.SampleStore.create(Path(folder) / "store", sample, sampler) as store:
            store.append(sample)
    codes, after = all_codes(model), model(batch(0)[0]).detach()
    return {"kinds": kinds, "memory": memory, "begun": begun, "output": output, "codes": codes, "after": after} | {
        "local": local_codes(model)
    }


def local_codes(model: nn.Module) -> dict[str, Tensor]:
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()
    return codes_of(model)


def in_backward(ranks: Ranks, folder: str) -> Found:
    model = shard(ql.pack(network(), "bfp8"))
    sampler = run_chain(model, ranks.rank, step_in_backward=True)
    diagnosed = [part.size for part in sampler.diagnose().parameters]
    held = [local(p).numel() for p in sampler.everyone if local(p).numel()]
    found = {"gradients": sum(p.grad is not None for p in model.parameters()), "diagnosed": diagnosed, "held": held}
    return {"codes": all_codes(model), **found}


def floats_on_grid(ranks: Ranks, folder: str) -> Found:
    """The same chain with floats on the grid, of which each process holds half."""
    model = shard(ql.unpack(ql.pack(network(), "bfp8")), weights="bfp8")
    sampler = run_chain(model, ranks.rank, weights="bfp8")
    return {"codes": all_codes(model, sampler), "shape": tuple(local(next(model.parameters())).shape)}


def fixed_point(ranks: Ranks, folder: str) -> Found:
    """Vectors are sharded too; the second process holds nothing of the last layer."""
    model = shard(ql.pack(network(), "fixed8.5"))
    sampler = run_chain(model, ranks.rank, rounding="nearest", temperature=0, gradients=None, accumulator="fp32")
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    shapes = {name: tuple(local(p).shape) for name, p in model.named_parameters()}
    return {"codes": all_codes(model), "shapes": shapes}


CLIPPED: dict[str, Any] = {
    "rounding": "nearest", "temperature": 0, "gradients": None, "accumulator": "fp32", "step_in_backward": True,
    "max_grad_norm": 0.01,
}  # fmt: skip


def clipped(ranks: Ranks, folder: str) -> Found:
    """Gradients clipped to a norm that is that of all shards."""
    model = shard(ql.pack(network(), "fixed8.5"))
    sampler = run_chain(model, ranks.rank, **CLIPPED)
    return {"accumulators": {name: sampler.state[p]["accumulator"] for name, p in model.named_parameters()}}


def replicas(ranks: Ranks, folder: str) -> Found:
    """Two processes that both hold the only shard."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("replicas", "shards"))
    model = shard(ql.pack(network(), "bfp8"), mesh)
    run_chain(model, ranks.rank)
    return {"codes": all_codes(model), "local": local_codes(model)}


def noise(ranks: Ranks, folder: str) -> Found:
    """One step of a weight whose two halves are equal, without a gradient."""
    model = nn.Linear(64, 8, bias=False)
    nn.init.ones_(model.weight)
    shard(ql.pack(model, "fixed8.5"))
    sampler = ql.SGLD(model.parameters(), lr=0.1, num_data=10)
    (model(torch.ones(1, 64)) * 0.0).sum().backward()
    sampler.step()
    return {"local": codes_of(model)["weight"]}


def shared_weights(ranks: Ranks, folder: str) -> Found:
    """An embedding that is also the last layer."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # of writes in place: there are none
    model = shard(ql.pack(Tied(), "bfp8"))
    output, groups = model(TOKENS).detach(), [name for name, m in model.named_modules() if hasattr(m, "reshard")]
    sampler = ql.SGLD(model.parameters(), **SETTINGS)
    model(TOKENS).logsumexp(-1).mean().backward()
    sampler.step()
    return {"output": output, "groups": groups, "codes": all_codes(model)}


def activations(ranks: Ranks, folder: str) -> Found:
    """The same input in both processes."""
    model = ql.lower(nn.Sequential(nn.Linear(8, 8)), "bfp4", seed=1)
    shard(ql.pack(model, "bfp8"))
    return {"output": model(batch(0)[0][:, :8]).detach()}


def not_finite(ranks: Ranks, folder: str) -> Found:
    """An infinity in the rows of the second process."""
    messages = []
    for in_backward in (False, True):
        model = shard(ql.pack(nn.Sequential(nn.Linear(8, 8, bias=False)), "bfp8"))
        sampler = ql.SGLD(model.named_parameters(), **SETTINGS, step_in_backward=in_backward)
        before = all_codes(model)
        factor = torch.ones(8)
        factor[7] = torch.inf
        try:
            (model(torch.ones(2, 8)) * factor).sum().backward()
            sampler.step()
        except FloatingPointError as error:
            messages.append(str(error))
        after = all_codes(model)
        assert before is None or all(torch.equal(before[name], cast(Found, after)[name]) for name in before)
    return {"messages": messages}


def separate_chains(ranks: Ranks, folder: str) -> Found:
    """Each process is a mesh of its own, with a chain of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("chains", "shards"))
    model = shard(ql.pack(network(seed=ranks.rank), "bfp8"), mesh["shards"])
    return {"codes": all_codes(model)}


def refusals(ranks: Ranks, folder: str) -> Found:
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(TypeError, match=r"make floats of packed parameters; qlangevin\.distributed\.shard"):
        fully_shard(ql.pack(network(), "fixed8.5"))
    model = network()
    fully_shard(model)
    with pytest.raises(ValueError, match=r"parameter 1 .*its shards cut through blocks of bfp8"):
        ql.SGLD(model.parameters(), **SETTINGS, weights="bfp8")
    matrix = nn.Linear(8, 8, bias=False)
    fully_shard(matrix)
    with pytest.raises(ValueError, match="its shards cut through blocks of bfp8/tensor"):
        ql.SGLD(matrix.parameters(), **SETTINGS, weights="bfp8/tensor")
    ql.SGLD(matrix.parameters(), **SETTINGS, weights="bfp8/4")
    for model in (ql.pack(network(), "bfp8"), network()):
        early = ql.SGLD(model.named_parameters(), **SETTINGS)
        shard(model)
        replaced = r"parameter '0\.weight': shard\(model\) has put another tensor in its place"
        with pytest.raises(ValueError, match=replaced):
            early.step()
    return {}
