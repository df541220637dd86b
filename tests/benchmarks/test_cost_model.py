"""The cost model against the bytes that wire and shards send and hold: eight ranks, of which one exists."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import qlangevin as ql
from benchmarks import pair, scaling
from benchmarks.cost_model import BUCKET, Job, Machine, StepCosts, estimate_run, estimate_step, wire_bytes
from qlangevin._dtensor import local
from qlangevin.distributed import Wire, replicate, shard
from tests.test_readme import programs

RANKS = 8
PACKED = 1 + 1 / 512  # rows of 512


@pytest.fixture(scope="module")
def ranks() -> Iterator[int]:
    """The first of eight processes in a fake process group, which drops all messages."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield RANKS
    dist.destroy_process_group()


def network() -> nn.Sequential:
    """Rows that divide evenly, and no vectors, which are not sharded."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, n, bias=False) for n in (512, 512, 64)))


WEIGHTS = sum(p.numel() for p in network().parameters())


def costs(**facts: Any) -> StepCosts:
    return estimate_step(Job(WEIGHTS, 1, **facts), Machine())


# ---- bytes sent


@pytest.mark.parametrize("wire", ["fp32", "bfp8/64", "bfp8/16", "bfp16/64"])
def test_replicas_send_what_the_wire_counts(ranks: int, wire: str) -> None:
    model = network()
    sampler = ql.SGLD(model.parameters(), lr=0.1, num_data=100)
    hook = Wire(sampler, wire)
    replicated = replicate(model, sampler, wire=hook, every=0)
    replicated(torch.randn(2, 512)).sum().backward()
    assert hook.sent == costs(ranks=ranks, layout="replicas", wire=wire, tensors=3, every=0).sent


def test_shards_send_codes_twice_and_gradients_once(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[torch.dtype, float] = {}

    def count(name: str, position: int) -> None:
        original = getattr(dist, name)

        def counted(*args: Any, **options: Any) -> Any:
            full = cast(Tensor, (*args, *options.values())[position])
            sent[full.dtype] = sent.get(full.dtype, 0) + full.nbytes * (ranks - 1) / ranks
            return original(*args, **options)

        monkeypatch.setattr(dist, name, counted)

    count(next(name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)), 0)
    count(next(name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)), 1)
    model = shard(ql.pack(network(), "bfp8"))
    held = sum(cast(ql.QTensor, local(p)).nbytes for p in model.parameters())
    assert held == WEIGHTS * PACKED / ranks
    model(torch.randn(2, 512)).sum().backward()
    found = costs(ranks=ranks, layout="shards", packed=PACKED, layers=3)
    assert sent[torch.float32] == WEIGHTS * 4 * (ranks - 1) / ranks
    assert sum(sent.values()) == pytest.approx(found.sent, rel=1e-3)


def test_the_checksum_is_16_bytes_a_tensor_every_hundred_steps() -> None:
    facts: dict[str, Any] = {"ranks": 4, "layout": "replicas", "tensors": 50}
    more = costs(**facts).sent - costs(**facts, every=0).sent
    assert more == pytest.approx(2 * 3 / 4 * 16 * 50 / 100)
    assert costs(**facts, accumulator=True).sent - costs(**facts, every=0).sent == pytest.approx(2 * more)


def test_bytes_of_an_element() -> None:
    assert [wire_bytes(name) for name in (None, "fp32", "bfp8/64", "bfp4/64")] == [4, 4, 1 + 1 / 64, 1 + 1 / 64]
    for name in ("bfp8", "fixed8.3", "bf16"):
        with pytest.raises(ValueError, match="gradients travel in block floating point with groups"):
            wire_bytes(name)


def test_one_rank_sends_nothing() -> None:
    for layout in ("chains", "replicas", "shards"):
        found = costs(layout=layout)
        assert (found.sent, found.messages, found.network) == (0, 0, 0)


# ---- bytes held


def test_memory() -> None:
    n, facts = 1e9, dict[str, Any](weights=1e9, batch=0, layers=10)
    b = 1 + 1 / 64

    def held(**more: Any) -> float:
        return estimate_step(Job(**facts | more), Machine()).memory / n

    assert held() == pytest.approx(1.02 + 0.4)
    assert held(in_backward=False) == pytest.approx(5.02)
    assert held(packed=None) == held(packed=None, layout="replicas") == 8
    replicas = {"layout": "replicas", "ranks": 4}
    assert held(**replicas) == 12
    assert held(**replicas, view=True, accumulator=True) == 12
    assert held(**replicas, wire="fp32") == pytest.approx(12 + 8 * 1.1)
    assert held(**replicas, wire="bfp8/64") == pytest.approx(12 + 2 * b * 1.1 + 0.4)  # a bucket is a layer, or BUCKET
    assert held(**replicas, wire="bfp8/64", layers=1000) == pytest.approx(12 + 2 * b + (2 * b + 4) * BUCKET / 4 / n)
    assert held(layout="shards", ranks=8) == pytest.approx((1.02 + 0.4) / 8 + 1.404)
    assert held(layout="shards", ranks=8, in_backward=False) == pytest.approx((1.02 + 4) / 8 + 1.404)
    assert held(layout="shards", ranks=8, accumulator=True) - held(layout="shards", ranks=8) == pytest.approx(0.5)
    assert held(batch=64, activations=1e6, layout="shards", ranks=8) - held(layout="shards", ranks=8) == pytest.approx(
        0.008
    )


def test_fits_compares_the_memory_needed_and_available() -> None:
    job = Job(7e9, 1, 8, "replicas", layers=32)
    assert not estimate_step(job, Machine(memory=80e9)).fits
    assert estimate_step(job, Machine(memory=90e9)).fits


# ---- seconds


def test_seconds_of_a_step() -> None:
    machine = Machine(flops=1e12, network=1e9, latency=1e-3, stepping=1e8, coding=1e9)
    job = Job(1e6, 1e6, 4, "replicas", wire="fp32", every=0)
    found = estimate_step(job, machine)
    assert found.compute == pytest.approx(6 / 4)
    assert found.rounding == pytest.approx(1e6 / 1e8 + 1.25e6 / 1e9)
    assert found.network == pytest.approx(2 * 3 / 4 * 4e6 / 1e9 + 2 * 3 * 1e-3)
    assert found.seconds == pytest.approx(found.compute + found.rounding + found.network)
    assert estimate_step(Job(1e6, 1e6, 4, "shards"), machine).rounding == pytest.approx(1e6 / 4 / 1e8)
    assert estimate_step(Job(1e6, 0, 4, "replicas", seconds=2), machine).compute == 0.5


@pytest.mark.parametrize(("wire", "hideable"), [(None, 1.0), ("fp32", 0.5)])
def test_hidden_network_time(wire: str | None, hideable: float) -> None:
    """The second of a wire's two exchanges begins when backward has ended."""
    job = Job(1e6, 0, 2, "replicas", wire=wire, every=0, seconds=1.0)
    found = estimate_step(job, Machine(network=1e8, overlap=0.5))
    assert found.seconds == pytest.approx(0.5 + found.network * (1 - 0.5 * hideable))
    slow = estimate_step(job, Machine(network=1e5, overlap=1.0))
    assert slow.seconds == pytest.approx(slow.network)  # all of compute, and no more, is hidden behind it


def test_messages() -> None:
    assert costs(ranks=4, layout="replicas", bucket=WEIGHTS).messages == 2 * 3 * 4
    assert costs(ranks=4, layout="shards", layers=10).messages == 3 * 3 * 10


def test_runs() -> None:
    machine = Machine(flops=6e6, disk=1e6)
    alone = estimate_run(Job(1e6, 1), machine, steps=10, samples=5)
    assert (alone.steps, alone.disk, alone.sent) == (10, 5 * 1.02e6, 0)
    assert alone.seconds == pytest.approx(10 + 5 * 1.02)
    assert alone.hours == alone.seconds / 3600
    side_by_side = estimate_run(Job(1e6, 1, ranks=4), machine, steps=10, samples=20)
    assert (side_by_side.steps, side_by_side.disk) == (10, 4 * alone.disk)
    assert (
        estimate_run(Job(1e6, 1, ranks=2, chains=4), machine, steps=10, samples=20).steps == 20
    )  # one after the other
    groups = Job(1e6, 1, ranks=8, layout="shards", chains=2)
    assert groups.ranks_per_chain == 4
    found = estimate_run(groups, Machine(flops=6e6, network=1e6), steps=10, samples=4)
    gathering = found.seconds - found.steps
    assert gathering == pytest.approx(2 * 1.02)
    assert found.sent == pytest.approx(10 * estimate_step(groups, machine).sent)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"layout": "rings"}, "layout must be one of 'chains', 'replicas', 'shards', got 'rings'"),
        ({"ranks": 0}, "ranks must be an integer, at least 1, got 0"),
        ({"ranks": 4, "layout": "shards", "chains": 3}, "4 ranks cannot be split into 3 groups of equal size"),
        ({"layout": "shards", "wire": "fp32"}, "only replicas have a wire, and the layout is 'shards'"),
        ({"bucket": 0}, "bucket must be a positive number, got 0"),
        ({"weights": -1}, "weights must be a finite number that is not negative, got -1"),
    ],
)
def test_invalid_jobs_are_refused(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Job(**{"weights": 1, "batch": 1} | facts)


def test_invalid_machines_are_refused() -> None:
    with pytest.raises(ValueError, match="network must be a positive number, got 0"):
        Machine(network=0)
    with pytest.raises(ValueError, match="overlap must be a fraction"):
        Machine(overlap=2)


# ---- two real processes


@pytest.mark.slow
@pytest.mark.distributed
def test_a_short_benchmark() -> None:
    """The system counts the bytes that the model estimates, except of shards: gloo's reduce-scatter sends an all-reduce."""
    found = scaling.measure_pair(pair.Options("small", seconds=0.1))
    rows = {row.name: row for row in scaling.comparison("small", found) + scaling.calibration("small", found)}
    assert json.loads(json.dumps([row.as_json() for row in rows.values()]))
    for kind, name in pair.NAMES.items():
        row = rows[f"{name}, sent"]
        if kind == "chains":
            assert (row.ours, row.theirs) == (0, 0)
        elif kind != "shards":
            assert row.ours == pytest.approx(row.theirs, rel=0.02)
        assert 0 < rows[name].ours < math.inf
    for kind, counted in found["counted"].items():
        job = Job(found["weights"], 0, 2, "replicas", wire=kind.partition(" ")[2], tensors=6, every=0)
        assert counted == pytest.approx(estimate_step(job, Machine()).sent, rel=1e-3)
    assert rows["all-to-all of 128 bytes"].ours > 0


def test_the_page_shows_what_its_code_computes() -> None:
    page = Path(__file__).parents[2] / "docs" / "scaling.md"
    [code] = [code for code in programs(page) if "benchmarks.cost_model" in code]
    names: dict[str, Any] = {}
    exec(compile(code, page.name, "exec"), names)
    shown = page.read_text(encoding="utf-8").splitlines()
    computed = [*names["lines"], *names["more"]]
    assert [line for line in shown if re.match(r"\| \d+ \|", line)] == computed
    assert f"**{names['total'].disk / 1e9:.0f} GB**" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "wrong", [{"chains": 0}, {"chains": -3}, {"packed": -1.0}, {"largest": -5.0}, {"seconds": -1.0}]
)
def test_invalid_numbers_are_refused(wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Job(1e6, 10, 4, "chains", **wrong)
