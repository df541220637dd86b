"""One chain on several ranks: the same to the byte, the same as alone, and an error on all of them when it is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qlangevin as ql
from qlangevin.distributed import Ranks, ReplicasDifferError, Watch, Wire, checksum, replicate
from qlangevin.storage import model_tensors
from tests.helpers import teams

WIRES = (None, "fp32", "bfp8/64")
SIZES = (1, 2, 4)


def chain(model: nn.Module, **changes: Any) -> ql.SGLD:
    options = {"lr": 0.05, "num_data": 50, "weight_decay": 1e-3, "seed": 5} | changes
    return ql.SGLD(model.named_parameters(), **options)


# ---- the same on all ranks


def lowered_chains(ranks: Ranks, steps: int) -> dict[str, str]:
    found = {}
    for accumulator in (None, "fp32"):
        for wire in WIRES:
            model = ql.lower(teams.network(), activations="bfp8", errors="bfp8", seed=9)
            sampler = chain(model, weights="bfp8", accumulator=accumulator)
            found[f"begin {accumulator}"] = teams.digest(model, sampler)
            replicas = replicate(model, sampler, wire=wire, every=10)
            teams.train(replicas, sampler, teams.loader(ranks.rank, ranks.size), steps)
            found[f"{accumulator} {wire}"] = teams.digest(model, sampler)
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_weights_stay_the_same_to_the_byte(size: int) -> None:
    first, *others = teams.values(lowered_chains, size, 50)
    assert all(other == first for other in others)
    chains = {name: found for name, found in first.items() if not name.endswith(" fp32") or "begin" in name}
    assert len(set(chains.values())) == len(chains) == 6  # each has moved, and the wire makes it another


def chains(ranks: Ranks, parts: int, stream: int) -> str:
    """Groups of replicas, each with a chain of its own."""
    group = ranks.split(parts)
    model = ql.lower(teams.network(), activations="bfp8", errors="bfp8", stream=group.part + stream)
    sampler = chain(model, weights="bfp8", accumulator="fp32", stream=group.part + stream)
    replicas = replicate(model, sampler, wire="bfp8/64", every=1, group=group.group)
    teams.train(replicas, sampler, teams.loader(group.rank, group.size), 6)
    return teams.digest(model, sampler)


def test_groups_of_ranks_are_chains_of_their_own() -> None:
    """And each is the chain it would be without the others."""
    together = teams.values(chains, 4, 2, 0)
    apart = [teams.values(chains, 2, 1, stream) for stream in (0, 1)]
    assert together == [*apart[0], *apart[1]]
    assert len(set(together)) == 2


def outputs(ranks: Ranks) -> list[str]:
    model = ql.lower(teams.network(), activations="bfp8", seed=9)
    replicas = replicate(model, chain(model))
    x = next(iter(teams.loader()))[0]
    return [teams.sha256(replicas.train(mode)(x).detach()) for mode in (True, True, False)]


def test_activations_are_rounded_with_other_bits_on_each_rank() -> None:
    found = teams.values(outputs, 2)
    assert len({digest for each in found for digest in each[:2]}) == 4
    assert found[0][2] == found[1][2]  # in evaluation nothing is random
    model, x = ql.lower(teams.network(), activations="bfp8", seed=9), next(iter(teams.loader()))[0]
    chain(model)
    alone = [teams.sha256(model.train(mode)(x).detach()) for mode in (True, True, False)]
    assert alone == found[0]  # rank 0 draws what it would draw alone


# ---- the same as alone


def plain_chain(ranks: Ranks, dtype: str, wire: str | None) -> list[float]:
    """Nothing is rounded but floats."""
    model = teams.network().to(getattr(torch, dtype))
    sampler = chain(model)
    called = replicate(model, sampler, wire=wire) if ranks.group else model
    teams.train(called, sampler, teams.loader(ranks.rank, ranks.size), 12)
    return [x for p in model.parameters() for x in p.flatten().tolist()]


@pytest.mark.parametrize(
    ("dtype", "wire", "tolerance"), [("float64", None, 1e-12), ("float32", None, 1e-5), ("float32", "fp32", 1e-5)]
)
def test_any_number_of_ranks_is_the_same_chain_up_to_sums(dtype: str, wire: str | None, tolerance: float) -> None:
    alone = torch.tensor(plain_chain(Ranks(), dtype, wire), dtype=torch.float64)
    for size in SIZES:
        for found in teams.values(plain_chain, size, dtype, wire):
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
                sampler = chain(model, weights="bfp8", accumulator=accumulator)
                called = replicate(model, sampler, wire=wire) if ranks.group else model
                batches = ql.Loader(TensorDataset(x), 16, rank=ranks.rank, ranks=ranks.size)
                for (batch,) in batches.until(8):
                    sampler.zero_grad()
                    (batches.share * slope * called(batch).sum(1).mean()).backward()
                    sampler.step()
                found[f"{slope} {accumulator} {wire}"] = teams.digest(model, sampler)
    return found


def test_exact_gradients_give_the_same_bytes_on_any_number_of_ranks() -> None:
    with torch.random.fork_rng():
        alone = exact_chains(Ranks())
    assert len(set(alone.values())) == 4  # slope and accumulator make a difference, the wire makes none
    for size in SIZES:
        assert all(found == alone for found in teams.values(exact_chains, size))


# ---- what ranks are told


def build(**changes: Any) -> tuple[nn.Module, ql.SGLD, dict[str, Any]]:
    """A model and a sampler made in one of several ways, and options for `replicate`."""
    model = teams.network() if "shape" not in changes else nn.Sequential(nn.Linear(12, 4))
    if "activations" in changes:
        ql.lower(model, activations=changes["activations"])
    settings = {k: v for k, v in changes.items() if k in ("seed", "stream", "lr", "weights", "rounding", "num_data")}
    sampler = chain(model, **({"weights": "bfp8"} | settings))
    if "steps" in changes:
        teams.train(model, sampler, teams.loader(), changes["steps"])
    if "rate" in changes:  # set by a schedule that began where the other did
        sampler.param_groups[0].update(initial_lr=0.05, lr=changes["rate"])
    if "frozen" in changes:
        next(model.parameters()).requires_grad_(False)
    return model, sampler, {k: v for k, v in changes.items() if k in ("wire", "every", "bucket_cap_mb")}


# What one rank is told and the others are not -> what the error must name.
DIFFERENT: list[tuple[dict[str, Any], str]] = [
    ({"seed": 6}, "seed is 5 there and 6 here"),
    ({"stream": 1}, "stream"),
    ({"lr": 0.1}, "lr is 0.05 there and 0.1 here"),
    ({"rate": 0.01}, "rates[0] is 0.05 there and 0.01 here"),
    ({"num_data": 60}, "num_data"),
    ({"weights": "fixed8.3"}, "weights is 'bfp8' there and 'fixed8.3' here"),
    ({"rounding": "nearest"}, "rounding"),
    ({"activations": "bfp8"}, "layers.0"),
    ({"shape": 1}, "tensors.0.weight"),
    ({"frozen": 1}, "tensors.0.weight"),
    ({"wire": "bfp8/64"}, "wire is None there and 'bfp8/64' here"),
    ({"steps": 2}, "steps is 0 there and 2 here"),
    ({"every": 7}, "every is 100 there and 7 here"),
    ({"bucket_cap_mb": 3}, "options.bucket_cap_mb"),
    ({"wire": "bfp8"}, "refused"),  # whatever one rank cannot do
    ({"every": -1}, "refused"),
]


def told_differently(ranks: Ranks) -> list[str]:
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


def test_ranks_that_were_told_different_things_refuse_on_all_of_them() -> None:
    found = teams.values(told_differently, 3)
    assert found[0] == found[1] == found[2]
    for i, message in enumerate(found[0]):
        odd, (_, name) = i // len(DIFFERENT), DIFFERENT[i % len(DIFFERENT)]
        assert "told different things" in message
        assert f"here: rank {odd or 1})" in message
        assert (name if odd else name.split(" is ")[0]) in message


def begun(ranks: Ranks) -> list[list[str]]:
    """Digests before and after; each rank has weights and accumulators of its own before."""
    found = []
    for accumulator in (None, "fp32"):
        model = teams.network(seed=ranks.rank)
        sampler = chain(model, weights="bfp8", accumulator=accumulator)
        mine = teams.digest(model, sampler)
        replicas = replicate(model, sampler, every=1)
        sent = teams.digest(model, sampler)
        teams.train(replicas, sampler, teams.loader(ranks.rank, ranks.size), 3)
        found.append([mine, sent, teams.digest(model, sampler)])
    return found


def test_weights_and_accumulators_are_those_of_the_first_rank() -> None:
    found = teams.values(begun, 3)
    for i in range(2):
        mine, sent, after = zip(*(each[i] for each in found), strict=True)
        assert len(set(mine)) == 3
        assert set(sent) == {mine[0]}
        assert len(set(after)) == 1


def refusals(ranks: Ranks) -> dict[str, str]:
    def partial_sampler(model: nn.Module) -> ql.SGLD:
        return chain(model[1:])  # type: ignore[index]

    cases: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], ql.SGLD], dict[str, Any]]] = {
        "packed": (lambda m: ql.pack(m, "bfp8"), chain, {}),
        "in backward": (lambda m: m, lambda m: chain(m, step_in_backward=True), {}),
        "not stepped": (lambda m: m, partial_sampler, {}),
        "rounded twice": (lambda m: m, lambda m: chain(m, gradients="bfp8"), {"wire": "bfp8/64"}),
        "rows": (lambda m: m, chain, {"wire": "bfp8"}),
        "all of it": (lambda m: m, chain, {"wire": "bfp8/tensor"}),
        "fixed": (lambda m: m, chain, {"wire": "fixed8.3"}),
        "no format": (lambda m: m, chain, {"wire": "int8"}),
        "every": (lambda m: m, chain, {"every": -1}),
    }
    found = {}
    for name, (prepare, make, options) in cases.items():
        model = prepare(teams.network())
        try:
            replicate(model, make(model), **options)
        except ValueError as error:
            found[name] = str(error)
    model = teams.network()
    replicate(model, chain(model, gradients="bfp8"), wire="fp32")  # rounded once, by the sampler
    return found


def test_what_cannot_be_replicated_is_refused() -> None:
    for found in teams.values(refusals, 2):
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
    model = teams.network()
    with pytest.raises(ValueError, match="no ranks for replicas; call this inside of join"):
        replicate(model, chain(model))


# ---- watching


@torch.no_grad()
def flip(t: Tensor, bit: int) -> None:
    words = t.view(-1).view(torch.int32)
    words[-1] ^= 1 << bit


def watched(ranks: Ranks, accumulator: str | None, odd: list[int], wire: str | None) -> list[Any]:
    """Steps without a complaint, then the complaint; one bit is changed on some ranks after the fourth step."""
    model = teams.network()
    sampler = chain(model, lr=1e-3, accumulator=accumulator, weights="bfp8" if accumulator else None)
    replicas = replicate(model, sampler, every=3, wire=wire)
    batches = teams.loader(ranks.rank, ranks.size)
    for step in range(1, 10):
        try:
            teams.train(replicas, sampler, batches, step)
        except ReplicasDifferError as error:
            return [step, str(error)]
        if step == 4 and ranks.rank in odd:
            weight = model.get_parameter("2.weight")
            flip(sampler.state[weight]["accumulator"] if accumulator else weight.data, 3 if accumulator else 20)
    return [step, ""]


@pytest.mark.parametrize(
    ("accumulator", "odd", "who"),
    [(None, [1], "rank 1 and"), ("fp32", [2], "rank 2 and"), (None, [0], "ranks 1, 2 and"), (None, [], "")],
)
def test_a_changed_byte_is_an_error_on_all_ranks_at_the_next_comparison(
    accumulator: str | None, odd: list[int], who: str
) -> None:
    found = teams.values(watched, 3, accumulator, odd, "bfp8/64" if odd == [1] else None)
    assert found[0] == found[1] == found[2]
    step, message = found[0]
    assert step == (6 if odd else 9)
    what = "the accumulator of '2.weight'" if accumulator else "parameter '2.weight'"
    assert not odd or message.startswith(f"after 6 steps {what} is not the same on all ranks: {who} rank 0 differ")


def watched_by_hand(ranks: Ranks) -> list[str]:
    """A packed model, and one that nobody has replicated."""
    found = []
    for packed in (False, True):
        model = ql.pack(teams.network(), "bfp8") if packed else teams.network()
        watch = Watch(model, chain(model), every=0)
        watch.check()
        if ranks.rank == 1:
            p = model.get_parameter("0.bias")
            raw = p.codes if isinstance(p, ql.QTensor) else p.data.view(torch.int32)
            raw[-1] ^= 1
        watch()  # every=0 never looks
        try:
            watch.check()
        except ReplicasDifferError as error:
            found.append(str(error))
    return found


def test_a_watch_needs_no_replicas() -> None:
    for found in teams.values(watched_by_hand, 2):
        assert len(found) == 2
        assert all("parameter '0.bias'" in message and "rank 1 and rank 0" in message for message in found)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64)


def random_bytes(count: int, seed: int) -> Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 3000), st.sampled_from(DTYPES), st.integers(0, 2**32), st.data())
def test_one_flipped_bit_changes_the_checksum(size: int, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    raw = random_bytes(size * dtype.itemsize, seed)
    before = checksum(raw.view(dtype))
    assert before == checksum(raw.clone().view(dtype))
    if size:
        at, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
        raw[at] ^= 1 << bit
        assert checksum(raw.view(dtype)) != before


@given(st.integers(1, 3000), st.sampled_from(["bfp8", "bfp8/32", "bfp4/tensor", "fixed8.3", "bfp16"]), st.data())
def test_one_flipped_bit_of_codes_or_exponents_changes_the_checksum(
    size: int, format: str, data: st.DataObject
) -> None:
    q = ql.encode(torch.randn(size, generator=torch.Generator().manual_seed(size)), format)
    before = checksum(q)
    parts = [q.codes] if q.exponents is None else [q.codes, q.exponents]
    raw = data.draw(st.sampled_from(parts)).view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(q) != before


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=50), st.data())
@example([0, -1], None)
def test_words_that_trade_places_change_the_checksum(words: list[int], data: st.DataObject | None) -> None:
    i = data.draw(st.integers(0, len(words) - 1)) if data else 0
    j = data.draw(st.integers(0, len(words) - 1)) if data else 1
    swapped = list(words)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    assert (checksum(torch.tensor(words)) == checksum(torch.tensor(swapped))) == (words == swapped)


@given(st.integers(0, 2**63 - 1))
def test_no_two_words_have_one_checksum(word: int) -> None:
    """Not even a word and the one whose mixed bits are all other bits: shifting a sign in would make these one."""
    multiplier = 0x2545F4914F6CDD1D
    other = (~(word * multiplier) * pow(multiplier, -1, 2**64)) % 2**64
    other -= 2**64 * (other >= 2**63)
    assert word != other
    assert checksum(torch.tensor([word])) != checksum(torch.tensor([other]))


def test_a_checksum_looks_at_places_beyond_a_chunk_and_at_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlangevin.distributed.replicas.WORDS", 16)
    t = torch.arange(200, dtype=torch.float32)
    swapped = t.clone()
    swapped[[0, 150]] = swapped[[150, 0]]
    moved = torch.cat((t[32:64], t[:32], t[64:]))  # two chunks of 16 words
    assert len({checksum(t), checksum(swapped), checksum(moved)}) == 3
    shifted = torch.cat((torch.zeros(1), t))[1:]  # does not begin with a word
    assert checksum(shifted) == checksum(t)
    for offset in (0, 4):  # memory of others, which may begin anywhere
        memory = bytearray(offset) + bytearray(4) + bytearray(t.numpy().tobytes())
        assert checksum(torch.frombuffer(memory, dtype=torch.float32, offset=offset)[1:]) == checksum(t)
    assert checksum(t.view(10, 20).t()) == checksum(t.view(10, 20).t().contiguous()) != checksum(t)
    assert checksum(torch.tensor(3.0)) != checksum(torch.tensor(-3.0))


# ---- files


def checkpointed(ranks: Ranks, folder: str, until: int, save: bool, seed: int, early: bool) -> Any:
    """Train until a step, from the checkpoint that is there, if one is; rank 0 writes."""
    path = Path(folder) / "checkpoint"
    model = ql.lower(teams.network(seed=7), activations="bfp8", errors="bfp8", seed=9)
    sampler = chain(model, weights="bfp8", accumulator="fp32", seed=seed)
    schedule = ql.CyclicalLR(sampler, total_steps=12, cycles=2, samples_per_cycle=1)
    batches = teams.loader(ranks.rank, ranks.size)
    wire, there = Wire(sampler, "bfp8/64"), path.exists()
    ranks.wait()
    if there and early:
        ql.load_checkpoint(path, model, sampler, schedule, batches)
    replicas = replicate(model, sampler, wire=wire, every=1)
    if there and not early:
        ql.load_checkpoint(path, replicas, sampler, schedule, batches)
    while batches.steps < until:
        teams.train(replicas, sampler, batches, batches.steps + 1)
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
        teams.digest(model, sampler),
        ql.lowering.state_dict(model),
        batches.state_dict(),
        sampler.param_groups[0]["lr"],
    ]


@pytest.mark.parametrize("early", [True, False])
def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(tmp_path: Path, early: bool) -> None:
    os.mkdir(tmp_path / "whole")
    whole = teams.values(checkpointed, 2, str(tmp_path / "whole"), 12, False, 5, early)
    begun = teams.values(checkpointed, 2, str(tmp_path), 7, True, 5, early)
    # The seed of a sampler comes with its state: that the new one was made with another does not count.
    resumed = teams.values(checkpointed, 2, str(tmp_path), 12, False, 6, early)
    assert whole[0] == whole[1] == resumed[0] == resumed[1]
    assert begun[0] == begun[1]
    assert begun[0][0] != whole[0][0]
