"""One chain on several ranks: equal to the byte on all of them, equal to the chain of one process, and resumed exactly."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import qlangevin as ql
from qlangevin.distributed import Ranks, Wire, replicate
from qlangevin.storage import model_tensors
from tests.helpers.chains import digest, loader, make_sampler, network, sha256, train
from tests.helpers.process_groups import run_on_ranks

WIRES = (None, "fp32", "bfp8/64")
SIZES = (1, 2, 4)


# ---- equal on all ranks


def lowered_chains(ranks: Ranks, steps: int) -> dict[str, str]:
    found = {}
    for accumulator in (None, "fp32"):
        for wire in WIRES:
            model = ql.lower(network(), activations="bfp8", errors="bfp8", seed=9)
            sampler = make_sampler(model, weights="bfp8", accumulator=accumulator)
            found[f"begin {accumulator}"] = digest(model, sampler)
            replicas = replicate(model, sampler, wire=wire, every=10)
            train(replicas, sampler, loader(ranks.rank, ranks.size), steps)
            found[f"{accumulator} {wire}"] = digest(model, sampler)
    return found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_weights_stay_the_same_to_the_byte(size: int) -> None:
    first, *others = run_on_ranks(lowered_chains, size, 50)
    assert all(other == first for other in others)
    chains = {name: found for name, found in first.items() if not name.endswith(" fp32") or "begin" in name}
    assert len(set(chains.values())) == len(chains) == 6  # each has moved, and each wire gives another chain


def chain_of_group(ranks: Ranks, parts: int, stream: int) -> str:
    """The digest of a chain that one of several groups of ranks runs."""
    group = ranks.split(parts)
    model = ql.lower(network(), activations="bfp8", errors="bfp8", stream=group.part + stream)
    sampler = make_sampler(model, weights="bfp8", accumulator="fp32", stream=group.part + stream)
    replicas = replicate(model, sampler, wire="bfp8/64", every=1, group=group.group)
    train(replicas, sampler, loader(group.rank, group.size), 6)
    return digest(model, sampler)


@pytest.mark.distributed
def test_groups_of_ranks_are_chains_of_their_own() -> None:
    """Each is equal to the chain that its group runs without the others."""
    together = run_on_ranks(chain_of_group, 4, 2, 0)
    apart = [run_on_ranks(chain_of_group, 2, 1, stream) for stream in (0, 1)]
    assert together == [*apart[0], *apart[1]]
    assert len(set(together)) == 2


def outputs(ranks: Ranks) -> list[str]:
    model = ql.lower(network(), activations="bfp8", seed=9)
    replicas = replicate(model, make_sampler(model))
    x = next(iter(loader()))[0]
    return [sha256(replicas.train(mode)(x).detach()) for mode in (True, True, False)]


@pytest.mark.distributed
def test_activations_are_rounded_with_other_bits_on_each_rank() -> None:
    found = run_on_ranks(outputs, 2)
    assert len({output for each in found for output in each[:2]}) == 4
    assert found[0][2] == found[1][2]  # in evaluation nothing is random
    model, x = ql.lower(network(), activations="bfp8", seed=9), next(iter(loader()))[0]
    make_sampler(model)
    alone = [sha256(model.train(mode)(x).detach()) for mode in (True, True, False)]
    assert alone == found[0]  # rank 0 draws what it would draw alone


# ---- equal to the chain of one process


def plain_chain(ranks: Ranks, dtype: str, wire: str | None) -> list[float]:
    """The weights of a chain in full precision."""
    model = network().to(getattr(torch, dtype))
    sampler = make_sampler(model)
    called = replicate(model, sampler, wire=wire) if ranks.group else model
    train(called, sampler, loader(ranks.rank, ranks.size), 12)
    return [x for p in model.parameters() for x in p.flatten().tolist()]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dtype", "wire", "tolerance"), [("float64", None, 1e-12), ("float32", None, 1e-5), ("float32", "fp32", 1e-5)]
)
def test_any_number_of_ranks_is_the_same_chain_up_to_sums(dtype: str, wire: str | None, tolerance: float) -> None:
    alone = torch.tensor(plain_chain(Ranks(), dtype, wire), dtype=torch.float64)
    for size in SIZES:
        for found in run_on_ranks(plain_chain, size, dtype, wire):
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), alone, rtol=tolerance, atol=tolerance)


def exact_chains(ranks: Ranks) -> dict[str, str]:
    """Gradients that are 0, and gradients whose parts, sums and means are on the grid of bfp8/64 and of float32."""
    x = torch.randint(-3, 4, (50, 70), generator=torch.Generator().manual_seed(2)).float()
    found = {}
    for slope in (0.0, 1.0):
        for accumulator in (None, "fp32"):
            for wire in WIRES:
                torch.manual_seed(0)
                model = nn.Linear(70, 4)
                sampler = make_sampler(model, weights="bfp8", accumulator=accumulator)
                called = replicate(model, sampler, wire=wire) if ranks.group else model
                batches = ql.Loader(TensorDataset(x), 16, rank=ranks.rank, ranks=ranks.size)
                for (batch,) in batches.until(8):
                    sampler.zero_grad()
                    (batches.share * slope * called(batch).sum(1).mean()).backward()
                    sampler.step()
                found[f"{slope} {accumulator} {wire}"] = digest(model, sampler)
    return found


@pytest.mark.distributed
@pytest.mark.slow
def test_exact_gradients_give_the_same_bytes_on_any_number_of_ranks() -> None:
    with torch.random.fork_rng():
        alone = exact_chains(Ranks())
    assert len(set(alone.values())) == 4  # four chains by slope and accumulator; the wire changes none of them
    for size in SIZES:
        assert all(found == alone for found in run_on_ranks(exact_chains, size))


# ---- settings of the ranks


def build(**changes: Any) -> tuple[nn.Module, ql.SGLD, dict[str, Any]]:
    """A model, a sampler and options for `replicate`, with the given settings changed."""
    model = network() if "shape" not in changes else nn.Sequential(nn.Linear(12, 4))
    if "activations" in changes:
        ql.lower(model, activations=changes["activations"])
    settings = {
        k: v for k, v in changes.items() if k in ("seed", "stream", "lr", "weights", "rounding", "num_data", "mask")
    }
    sampler = make_sampler(model, **({"weights": "bfp8"} | settings))
    if "steps" in changes:
        train(model, sampler, loader(), changes["steps"])
    if "rate" in changes:  # set by a schedule that began where the other did
        sampler.param_groups[0].update(initial_lr=0.05, lr=changes["rate"])
    if "frozen" in changes:
        next(model.parameters()).requires_grad_(False)
    return model, sampler, {k: v for k, v in changes.items() if k in ("wire", "every", "bucket_cap_mb")}


# (a setting that one rank changes, the beginning of what the error says of it)
DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"seed": 6}, "seed is 5 on rank 0 and 6 on rank"),
    ({"stream": 1}, "stream"),
    ({"lr": 0.1}, "lr is 0.05 on rank 0 and 0.1 on rank"),
    ({"rate": 0.01}, "rates[0] is 0.05 on rank 0 and 0.01 on rank"),
    ({"num_data": 60}, "num_data"),
    ({"weights": "fixed8.3"}, "weights is 'bfp8' on rank 0 and 'fixed8.3' on rank"),
    ({"rounding": "nearest"}, "rounding"),
    ({"activations": "bfp8"}, "layers.0"),
    ({"mask": {"0.bias": torch.zeros(20, dtype=torch.bool)}}, "states"),
    ({"shape": 1}, "tensors.0.weight"),
    ({"frozen": 1}, "tensors.0.weight"),
    ({"wire": "bfp8/64"}, "wire is None on rank 0 and 'bfp8/64' on rank"),
    ({"steps": 2}, "steps is 0 on rank 0 and 2 on rank"),
    ({"every": 7}, "every is 100 on rank 0 and 7 on rank"),
    ({"bucket_cap_mb": 3}, "options.bucket_cap_mb"),
    ({"wire": "bfp8"}, "refused"),  # an argument that replicate refuses
    ({"every": -1}, "refused"),
]


def disagreements(ranks: Ranks) -> list[str]:
    found = []
    for odd in range(ranks.size):
        for changes, _ in DIFFERENT:
            model, sampler, options = build(**(changes if ranks.rank == odd else {}))
            try:
                replicate(model, sampler, **options)
            except ValueError as error:
                found.append(str(error))
            else:
                found.append("no error")
    return found


@pytest.mark.distributed
def test_a_setting_that_differs_on_one_rank_is_an_error_on_all() -> None:
    found = run_on_ranks(disagreements, 3)
    assert found[0] == found[1] == found[2]
    for i, message in enumerate(found[0]):
        odd, (_, name) = i // len(DIFFERENT), DIFFERENT[i % len(DIFFERENT)]
        assert message.startswith("ranks disagree: ")
        assert f"on rank {odd or 1}" in message
        assert (name if odd else name.split(" is ")[0]) in message


def begun(ranks: Ranks) -> list[list[str]]:
    """Digests before `replicate`, after it and after three steps; the ranks begin with different weights."""
    found = []
    for accumulator in (None, "fp32"):
        model = network(seed=ranks.rank)
        sampler = make_sampler(model, weights="bfp8", accumulator=accumulator)
        mine = digest(model, sampler)
        replicas = replicate(model, sampler, every=1)
        sent = digest(model, sampler)
        train(replicas, sampler, loader(ranks.rank, ranks.size), 3)
        found.append([mine, sent, digest(model, sampler)])
    return found


@pytest.mark.distributed
def test_weights_and_accumulators_are_those_of_the_first_rank() -> None:
    found = run_on_ranks(begun, 3)
    for i in range(2):
        mine, sent, after = zip(*(each[i] for each in found), strict=True)
        assert len(set(mine)) == 3
        assert set(sent) == {mine[0]}
        assert len(set(after)) == 1


def refusals(ranks: Ranks) -> dict[str, str]:
    def partial_sampler(model: nn.Module) -> ql.SGLD:
        return make_sampler(model[1:])  # type: ignore[index]

    cases: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], ql.SGLD], dict[str, Any]]] = {
        "packed": (lambda m: ql.pack(m, "bfp8"), make_sampler, {}),
        "in backward": (lambda m: m, lambda m: make_sampler(m, step_in_backward=True), {}),
        "not stepped": (lambda m: m, partial_sampler, {}),
        "rounded twice": (lambda m: m, lambda m: make_sampler(m, gradients="bfp8"), {"wire": "bfp8/64"}),
        "rows": (lambda m: m, make_sampler, {"wire": "bfp8"}),
        "all of it": (lambda m: m, make_sampler, {"wire": "bfp8/tensor"}),
        "fixed": (lambda m: m, make_sampler, {"wire": "fixed8.3"}),
        "no format": (lambda m: m, make_sampler, {"wire": "int8"}),
        "every": (lambda m: m, make_sampler, {"every": -1}),
    }
    found = {}
    for name, (prepare, make, options) in cases.items():
        model = prepare(network())
        try:
            replicate(model, make(model), **options)
        except ValueError as error:
            found[name] = str(error)
    model = network()
    replicate(model, make_sampler(model, gradients="bfp8"), wire="fp32")  # rounded once, by the sampler
    return found


@pytest.mark.distributed
def test_what_cannot_be_replicated_is_refused() -> None:
    for found in run_on_ranks(refusals, 2):
        assert "'0.weight' is packed" in found["packed"]
        assert "step_in_backward" in found["in backward"]
        assert "'0.weight' is not one of the sampler's parameters" in found["not stepped"]
        assert "gradients=None" in found["rounded twice"]
        for name, format in (("rows", "bfp8"), ("all of it", "bfp8/tensor"), ("fixed", "fixed8.3")):
            assert "such as bfp8/64" in found[name]
            assert found[name].endswith(f"not in {format}")
        assert "int8" in found["no format"]
        assert "every" in found["every"]


def test_without_ranks_there_are_no_replicas() -> None:
    model = network()
    with pytest.raises(ValueError, match="no ranks for replicas; call this inside of join"):
        replicate(model, make_sampler(model))


# ---- checkpoints


def checkpointed(ranks: Ranks, folder: str, until: int, save: bool, seed: int, early: bool) -> Any:
    """Train until a step, from the checkpoint if there is one; rank 0 may save one."""
    path = Path(folder) / "checkpoint"
    model = ql.lower(network(seed=7), activations="bfp8", errors="bfp8", seed=9)
    sampler = make_sampler(model, weights="bfp8", accumulator="fp32", seed=seed)
    schedule = ql.CyclicalLR(sampler, total_steps=12, cycles=2, samples_per_cycle=1)
    batches = loader(ranks.rank, ranks.size)
    wire, resume = Wire(sampler, "bfp8/64"), path.exists()
    ranks.wait()
    if resume and early:
        ql.load_checkpoint(path, model, sampler, schedule, batches)
    replicas = replicate(model, sampler, wire=wire, every=1)
    if resume and not early:
        ql.load_checkpoint(path, replicas, sampler, schedule, batches)
    while batches.steps < until:
        train(replicas, sampler, batches, batches.steps + 1)
        schedule.step()
    if save and ranks.first:
        ql.save_checkpoint(path, replicas, sampler, schedule, batches)
        with ql.SampleStore.create(Path(folder) / "store", replicas, sampler, resume=True) as store:
            store.append(replicas)
            kept = dict(store[-1])
        assert list(kept) == [name for name, _ in model.named_parameters()]
        for name, p in model.named_parameters():
            assert torch.equal(model_tensors.to_plain(kept[name]), p.detach())
    ranks.wait()
    return [
        digest(model, sampler),
        ql.lowering.state_dict(model),
        batches.state_dict(),
        sampler.param_groups[0]["lr"],
    ]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, early: bool) -> None:
    os.mkdir(tmp_path / "uninterrupted")
    uninterrupted = run_on_ranks(checkpointed, 2, str(tmp_path / "uninterrupted"), 12, False, 5, early)
    begun = run_on_ranks(checkpointed, 2, str(tmp_path), 7, True, 5, early)
    # The checkpoint restores the sampler's seed over the 6 that the new one was made with.
    resumed = run_on_ranks(checkpointed, 2, str(tmp_path), 12, False, 6, early)
    assert uninterrupted[0] == uninterrupted[1] == resumed[0] == resumed[1]
    assert begun[0] == begun[1]
    assert begun[0][0] != uninterrupted[0][0]
