"""Sharded parameters: two real processes, and what one process makes of the same chain."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import qlangevin as ql
from qlangevin._dtensor import local
from qlangevin.distributed import gathered, shards
from qlangevin.distributed.shards import QShard
from qlangevin.quantization.qtensor import QTensor
from qlangevin.sampling.step import Update, parameter_key, update_codes_

STEPS, RANKS = 20, 2
SETTINGS: dict[str, Any] = {"lr": 0.3, "num_data": 1000, "weight_decay": 1e-3, "gradients": "bfp8", "seed": 5}

Found = dict[str, Any]


def network(seed: int = 0) -> nn.Sequential:
    """33 rows: two processes have 17 and 16 of them."""
    torch.manual_seed(seed)
    layers = [nn.Linear(20, 33), nn.LayerNorm(33), nn.ReLU(), nn.Linear(33, 24), nn.ReLU(), nn.Linear(24, 1)]
    return nn.Sequential(*layers)


class Tied(nn.Module):
    """An embedding that is also the last layer, and a parameter of the model itself."""

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
    return nn.functional.mse_loss(model(x[rank::RANKS]), y[rank::RANKS])


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        q = local(p)
        assert isinstance(q, QTensor), name
        found[name] = q.codes.clone()
        if q.exponents is not None:
            found[f"{name} exponents"] = q.exponents.clone()
    return found


# ---- what each of the processes does


def run_chain(model: nn.Module, rank: int, **settings: Any) -> ql.SGLD:
    sampler = ql.SGLD(model.parameters(), **SETTINGS | settings)
    for step in range(STEPS):
        sampler.zero_grad()
        loss_of(model, step, rank).backward()
        sampler.step()
    return sampler


def all_codes(model: nn.Module, sampler: ql.SGLD | None = None) -> dict[str, Tensor] | None:
    whole = gathered(model, sampler)
    return None if whole is None else codes_of(whole)


def packed(rank: int, folder: Path) -> Found:
    """The chain of this module, from its first forward to a stored sample."""
    model = ql.pack(network(seed=rank), "bfp8")  # the first process's is what counts
    shards.shard(model)
    kinds = {name: type(local(p)).__name__ for name, p in model.named_parameters()}
    memory = {name: cast(QTensor, local(p)).codes.untyped_storage().nbytes() for name, p in model.named_parameters()}
    begun, seen = all_codes(model), list[Tensor]()
    model[0].register_forward_hook(lambda module, args, output: seen.append(module.weight), prepend=True)
    output = model(batch(0)[0]).detach()
    with pytest.raises(RuntimeError, match="were freed"):
        cast(QTensor, seen[0]).decode()
    sampler = run_chain(model, rank)
    model(batch(0)[0])  # the model stays gathered after this
    sample = gathered(model)
    if sample is not None:
        with ql.SampleStore.create(folder / "store", sample, sampler) as store:
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


def in_backward(rank: int, folder: Path) -> Found:
    model = shards.shard(ql.pack(network(), "bfp8"))
    run_chain(model, rank, step_in_backward=True)
    return {"codes": all_codes(model), "gradients": sum(p.grad is not None for p in model.parameters())}


def floats(rank: int, folder: Path) -> Found:
    """The same chain with floats on the grid, half of which each process has."""
    model = shards.shard(ql.unpack(ql.pack(network(), "bfp8")), weights="bfp8")
    sampler = run_chain(model, rank, weights="bfp8")
    return {"codes": all_codes(model, sampler), "shape": tuple(local(next(model.parameters())).shape)}


def fixed(rank: int, folder: Path) -> Found:
    """Vectors are cut too; the second process has nothing of the last layer."""
    model = shards.shard(ql.pack(network(), "fixed8.5"))
    sampler = run_chain(model, rank, rounding="nearest", temperature=0, gradients=None, accumulator="fp32")
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    shapes = {name: tuple(local(p).shape) for name, p in model.named_parameters()}
    return {"codes": all_codes(model), "shapes": shapes}


def replicas(rank: int, folder: Path) -> Found:
    """Two processes that have the same one shard."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicas", "shards"))
    model = shards.shard(ql.pack(network(), "bfp8"), mesh)
    run_chain(model, rank)
    return {"codes": all_codes(model), "local": local_codes(model)}


def noise(rank: int, folder: Path) -> Found:
    """One step of a weight whose two halves are the same, without a gradient."""
    model = nn.Linear(64, 8, bias=False)
    nn.init.ones_(model.weight)
    shards.shard(ql.pack(model, "fixed8.5"))
    sampler = ql.SGLD(model.parameters(), lr=0.1, num_data=10)
    (model(torch.ones(1, 64)) * 0.0).sum().backward()
    sampler.step()
    return {"local": codes_of(model)["weight"]}


def tied(rank: int, folder: Path) -> Found:
    model = shards.shard(ql.pack(Tied(), "bfp8"))
    output, groups = model(TOKENS).detach(), [name for name, m in model.named_modules() if hasattr(m, "reshard")]
    sampler = ql.SGLD(model.parameters(), **SETTINGS)
    model(TOKENS).logsumexp(-1).mean().backward()
    sampler.step()
    return {"output": output, "groups": groups, "codes": all_codes(model)}


def own_bits(rank: int, folder: Path) -> Found:
    """Activations of the same input."""
    model = ql.lower(nn.Sequential(nn.Linear(8, 8)), "bfp4", seed=1)
    shards.shard(ql.pack(model, "bfp8"))
    return {"output": model(batch(0)[0][:, :8]).detach()}


def not_finite(rank: int, folder: Path) -> Found:
    """An infinity in the rows of the second process."""
    messages = []
    for in_backward in (False, True):
        model = shards.shard(ql.pack(nn.Sequential(nn.Linear(8, 8, bias=False)), "bfp8"))
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


def alone(rank: int, folder: Path) -> Found:
    """Each process is a mesh of its own: a chain that the others know nothing of."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("chains", "shards"))
    model = shards.shard(ql.pack(network(seed=rank), "bfp8"), mesh["shards"])
    return {"codes": all_codes(model)}


def refusals(rank: int, folder: Path) -> Found:
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
    return {}


SCENES: list[Callable[[int, Path], Found]] = [
    *[packed, in_backward, floats, fixed, replicas, noise, tied, own_bits, not_finite, alone, refusals]
]


def process(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
    found: Found = {}
    try:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=limit)
        for scene in SCENES:
            found[scene.__name__] = scene(rank, folder)
        dist.destroy_process_group()
    except BaseException:
        found["error"] = traceback.format_exc()
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What the processes found, one after the other."""
    folder, context = tmp_path_factory.mktemp("shards"), multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [context.Process(target=process, args=(rank, port, folder), daemon=True) for rank in range(RANKS)]
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(120)
    finally:
        for child in children:
            child.kill()
            child.join(10)
    results = [torch.load(folder / f"{r}.pt") if (folder / f"{r}.pt").exists() else {} for r in range(RANKS)]
    errors = [result["error"] for result in results if "error" in result]
    assert not errors, "\n".join(errors)
    assert all(results), "a process ended without a word"
    return [result | {"folder": folder} for result in results]


# ---- the same in one process


def reference(model: nn.Module, shards: int) -> dict[str, Tensor]:
    """The chain as the design says it is: gradients averaged, rows of a matrix stepped with the bits of their shard."""
    s = Update(0.3, 1e-3, 2 * 0.3 / 1000, None, "bfp8")
    for step in range(STEPS):
        losses = [loss_of(model, step, rank) for rank in range(RANKS)]
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        for index, p in enumerate(model.parameters()):
            gradient = torch.stack([g[index] for g in gradients]).sum(0) / RANKS
            q, rows = cast(QTensor, p), -(-p.shape[0] // shards)
            if p.dim() < 2 or shards == 1:
                update_codes_([q], [], [gradient], s, [parameter_key(5, 0, index, step + 1)])
                continue
            whole = QShard.over(q.codes, q.exponents, q, q.shape[0])
            for shard, at in enumerate(range(0, p.shape[0], rows)):
                part = whole.cut(at, min(at + rows, p.shape[0]))
                key = parameter_key(5, 0, index, step + 1, (shard,))
                update_codes_([part], [], [gradient[at : at + rows]], s, [key])
    return codes_of(model)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return reference(ql.pack(network(), "bfp8"), RANKS)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_each_process_holds_half_of_the_codes(found: list[Found]) -> None:
    full = codes_of(ql.pack(network(), "bfp8"))
    for rank in range(RANKS):
        result, rows = found[rank]["packed"], 17 - rank
        assert result["kinds"]["0.weight"] == result["kinds"]["3.weight"] == "QShard"
        assert result["kinds"]["0.bias"] == result["kinds"]["1.weight"] == "QTensor"  # one block: whole everywhere
        assert result["local"]["0.weight"].shape == (rows, 20)
        assert result["local"]["0.weight exponents"].shape == (rows,)
        assert result["memory"]["0.weight"] == 17 * 20  # every process has room for as many rows
        assert result["memory"]["3.weight"] == full["3.weight"].nbytes // RANKS


def test_all_begin_with_what_the_first_process_has(found: list[Found]) -> None:
    assert same(found[0]["packed"]["begun"], codes_of(ql.pack(network(seed=0), "bfp8")))


def test_forward_is_that_of_the_whole_model_to_the_bit(found: list[Found]) -> None:
    model = ql.pack(network(), "bfp8")
    expected = model(batch(0)[0])
    assert all(torch.equal(result["packed"]["output"], expected) for result in found)


def test_chain_is_the_one_the_shards_bits_give(found: list[Found], expected: dict[str, Tensor]) -> None:
    assert same(found[0]["packed"]["codes"], expected)
    begun = found[0]["packed"]["begun"]
    assert all(not torch.equal(begun[name], expected[name]) for name in begun if "exponents" not in name)
    assert found[1]["packed"]["codes"] is None


def test_whole_parameters_stay_the_same_everywhere(found: list[Found], expected: dict[str, Tensor]) -> None:
    for name in ("0.bias", "1.weight", "1.bias", "3.bias", "5.bias"):
        assert all(torch.equal(result["packed"]["local"][name], expected[name]) for result in found)


def test_forward_after_steps_has_the_new_weights(found: list[Found]) -> None:
    model = ql.pack(network(), "bfp8")
    reference(model, RANKS)
    expected = model(batch(0)[0])
    assert all(torch.equal(result["packed"]["after"], expected) for result in found)


def test_stored_sample_is_the_codes_of_all_shards(found: list[Found]) -> None:
    store = ql.SampleStore.open(found[0]["folder"] / "store")
    assert [sample.step for sample in store] == [STEPS]
    sample = store[0]
    for name in ("0.weight", "3.weight", "5.weight"):
        rows = torch.cat([result["packed"]["local"][name] for result in found])
        q = sample.tensors[name]
        assert isinstance(q, QTensor)
        assert torch.equal(q.codes, rows)
    model = ql.pack(network(), "bfp8")
    reference(model, RANKS)
    loaded = network(seed=9)  # neither packed nor sharded
    sample.load_into(loaded)
    assert torch.equal(loaded(batch(0)[0]), model(batch(0)[0]))


def test_stepping_in_backward_gives_the_same_chain(found: list[Found], expected: dict[str, Tensor]) -> None:
    assert same(found[0]["in_backward"]["codes"], expected)
    assert all(result["in_backward"]["gradients"] == 0 for result in found)


def test_floats_on_the_grid_give_the_same_chain(found: list[Found], expected: dict[str, Tensor]) -> None:
    assert same(found[0]["floats"]["codes"], expected)
    assert [result["floats"]["shape"] for result in found] == [(17, 20), (16, 20)]


def test_fixed_point_without_noise_is_the_chain_of_one_process(found: list[Found]) -> None:
    model = ql.pack(network(), "fixed8.5")
    settings = SETTINGS | {"rounding": "nearest", "temperature": 0, "gradients": None, "accumulator": "fp32"}
    sampler = ql.SGLD(model.parameters(), **settings)
    begun = codes_of(model)
    for step in range(STEPS):
        sampler.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(RANKS)) / RANKS).backward()  # type: ignore[union-attr]
        sampler.step()
    assert same(found[0]["fixed"]["codes"], codes_of(model))
    assert not same(begun, codes_of(model))
    assert found[0]["fixed"]["shapes"]["0.bias"] == (17,)
    assert found[1]["fixed"]["shapes"]["5.weight"] == (0, 24)


def test_replicas_of_one_shard_are_the_chain_of_one_process(found: list[Found]) -> None:
    expected = reference(ql.pack(network(), "bfp8"), shards=1)
    assert same(found[0]["replicas"]["codes"], expected)
    assert same(found[1]["replicas"]["local"], expected)


def test_shards_have_noise_of_their_own(found: list[Found]) -> None:
    first, second = (result["noise"]["local"].float() for result in found)
    assert first.shape == second.shape == (4, 64)
    both = torch.stack([first.flatten(), second.flatten()])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.25  # 4 standard deviations of independent ones
    deviation = (2 * 0.1 / 10) ** 0.5 * 2**5  # in codes
    assert first.std().item() == pytest.approx(deviation, rel=0.2)
    assert second.std().item() == pytest.approx(deviation, rel=0.2)


def test_shared_weights_are_gathered_with_the_model(found: list[Found]) -> None:
    model = ql.pack(Tied(), "bfp8")
    expected = model(TOKENS)
    for result in found:
        assert torch.equal(result["tied"]["output"], expected)
        assert result["tied"]["groups"] == ["", "middle"]
    assert "embedding.weight" in found[0]["tied"]["codes"]
    assert "last.weight" not in found[0]["tied"]["codes"]
    assert not torch.equal(found[0]["tied"]["codes"]["embedding.weight"], codes_of(model)["embedding.weight"])


# ---- what can be said without other processes


def test_formats_whose_rows_cannot_be_told_apart_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' cannot be sharded in bfp8/tensor: all of it is one block"):
        shards.shard(ql.pack(network(), "bfp8/tensor"))
    with pytest.raises(ValueError, match=r"'0\.weight' cannot be sharded in bfp8/tensor"):
        shards.shard(network(), weights="bfp8/tensor")
    with pytest.raises(ValueError, match=r"'3\.weight' cannot be sharded in bfp4: two codes share a byte"):
        shards.shard(ql.pack(network(), "bfp4"))


def test_a_model_with_an_optimizer_is_refused() -> None:
    model = ql.pack(network(), "bfp8")
    sampler = ql.SGLD(model.parameters(), **SETTINGS)
    with pytest.raises(ValueError, match="belongs to a SGLD optimizer"):
        shards.shard(model)
    assert len(sampler.param_groups) == 1


def test_without_processes_there_is_nothing_to_share() -> None:
    model = ql.pack(network(), "bfp8")
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        shards.shard(model)
    assert not any(isinstance(p, QShard) for p in model.parameters())  # nothing was changed


@pytest.mark.parametrize("format", ["fixed8.3", "bfp8", "bfp8/4", "bfp4", "fp8_e4m3", "bfp16"])
def test_rows_of_codes_are_the_codes_of_rows(format: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 3, 6) * torch.logspace(-2, 2, 7).view(-1, 1, 1)
    q = ql.encode(x, format)
    whole = QShard.over(q.codes, q.exponents, q, 7)
    parts = [cast(QShard, part) for part in torch.split(whole, 3)]
    assert [tuple(part.shape) for part in parts] == [(3, 3, 6), (3, 3, 6), (1, 3, 6)]
    assert torch.equal(torch.cat([part.decode() for part in parts]), q.decode())
    lines = [torch.cat(each) for each in zip(*(part.padded(3) for part in parts), strict=True)]
    back = shards.joined(whole, lines, torch.float32)
    assert torch.equal(back.decode(), q.decode())
    assert back.nbytes == q.nbytes
    parts[1].copy_(torch.zeros(3, 3, 6))  # which are rows of the same codes
    assert torch.equal(q.decode()[3:6], torch.zeros(3, 3, 6))
    assert torch.equal(q.decode()[:3], parts[0].decode())


def test_activations_are_rounded_with_other_bits_in_each_process(found: list[Found]) -> None:
    first, second = (one["own_bits"]["output"] for one in found)
    assert not torch.equal(first, second)
    assert float((first - second).abs().max()) < 1  # a gap or two


def test_a_gradient_that_is_no_number_is_an_error_in_all_processes(found: list[Found]) -> None:
    for one in found:
        first, in_backward = one["not_finite"]["messages"]
        assert (
            first
            == "the gradient of parameter '0.weight' holds an infinity or a NaN; no parameter was changed by this step"
        )
        assert (
            in_backward
            == "the gradient of parameter '0.weight' holds an infinity or a NaN; it was not changed by this step"
        )


def test_every_mesh_has_a_first_process_that_gets_the_sample(found: list[Found]) -> None:
    first, second = (one["alone"]["codes"] for one in found)
    assert first.keys() == second.keys()
    assert not torch.equal(first["0.weight"], second["0.weight"])
