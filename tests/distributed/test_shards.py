"""Sharded parameters: two real processes against the same chain in one process.

The fixture ``found`` runs a scene in a process group of its own when the first test asks for it, and keeps its outcome for the
others: a scene that fails fails the tests of that scene only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.distributed import Ranks, shard
from qlangevin.distributed.qshard import QShard
from qlangevin.quantization.backend import TensorStep
from qlangevin.quantization.qtensor import QTensor
from qlangevin.sampling.settings import StepSettings, parameter_key
from qlangevin.sampling.step import step_tensors
from tests.helpers import shard_scenes as scenes
from tests.helpers.process_groups import Outcome, try_on_ranks, values_of
from tests.helpers.shard_scenes import SETTINGS, SIZE, STEPS, TOKENS, Found, Tied, batch, codes_of, loss_of, network

Scene = Callable[[Ranks, str], Found]
Results = Callable[[Scene], list[Found]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def found(folder: Path) -> Results:
    """Run a scene, the first time a test asks for it, and return the findings of both processes."""

    @cache
    def run(scene: Scene) -> list[Outcome]:
        return try_on_ranks(scene, SIZE, str(folder), deadline=120)

    return lambda scene: values_of(run(scene))


# ---- the chain of one process


def reference(model: nn.Module, shards: int) -> dict[str, Tensor]:
    """The specified chain: gradients are averaged, rows of a matrix are stepped with the random bits of their shard."""
    s = StepSettings(0.3, 1000, weight_decay=1e-3, gradients="bfp8")
    for step in range(STEPS):
        losses = [loss_of(model, step, rank) for rank in range(SIZE)]
        gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        for index, p in enumerate(model.parameters()):
            gradient = torch.stack([g[index] for g in gradients]).sum(0) / SIZE
            q, rows = cast(QTensor, p), -(-p.shape[0] // shards)
            if p.dim() < 2 or shards == 1:
                step_tensors([TensorStep(q, gradient, parameter_key(5, 0, index, step + 1))], s)
                continue
            full = QShard.from_tensor(q)
            for index_of_shard, at in enumerate(range(0, p.shape[0], rows)):
                part = full.slice_rows(at, min(at + rows, p.shape[0]))
                key = parameter_key(5, 0, index, step + 1, (index_of_shard,))
                step_tensors([TensorStep(part, gradient[at : at + rows], key)], s)
    return codes_of(model)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    return reference(ql.pack(network(), "bfp8"), SIZE)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.distributed
def test_each_process_holds_half_of_the_codes(found: Results) -> None:
    full = codes_of(ql.pack(network(), "bfp8"))
    for rank in range(SIZE):
        result, rows = found(scenes.packed)[rank], 17 - rank
        assert result["kinds"]["0.weight"] == result["kinds"]["3.weight"] == "QShard"
        assert result["kinds"]["0.bias"] == result["kinds"]["1.weight"] == "QTensor"  # one block: not sharded
        assert result["local"]["0.weight"].shape == (rows, 20)
        assert result["local"]["0.weight exponents"].shape == (rows,)
        assert result["memory"]["0.weight"] == 17 * 20  # every process has room for as many rows
        assert result["memory"]["3.weight"] == full["3.weight"].nbytes // SIZE


@pytest.mark.distributed
def test_all_processes_begin_with_the_weights_of_the_first(found: Results) -> None:
    assert same(found(scenes.packed)[0]["begun"], codes_of(ql.pack(network(seed=0), "bfp8")))


@pytest.mark.distributed
def test_forward_equals_that_of_the_model_in_one_process(found: Results) -> None:
    model = ql.pack(network(), "bfp8")
    expected = model(batch(0)[0])
    assert all(torch.equal(result["output"], expected) for result in found(scenes.packed))


@pytest.mark.distributed
def test_chain_equals_the_specified_one(found: Results, expected: dict[str, Tensor]) -> None:
    assert same(found(scenes.packed)[0]["codes"], expected)
    begun = found(scenes.packed)[0]["begun"]
    assert all(not torch.equal(begun[name], expected[name]) for name in begun if "exponents" not in name)
    assert found(scenes.packed)[1]["codes"] is None


@pytest.mark.distributed
def test_unsharded_parameters_stay_equal_in_all_processes(found: Results, expected: dict[str, Tensor]) -> None:
    for name in ("0.bias", "1.weight", "1.bias", "3.bias", "5.bias"):
        assert all(torch.equal(result["local"][name], expected[name]) for result in found(scenes.packed))


@pytest.mark.distributed
def test_forward_after_steps_has_the_new_weights(found: Results) -> None:
    model = ql.pack(network(), "bfp8")
    reference(model, SIZE)
    expected = model(batch(0)[0])
    assert all(torch.equal(result["after"], expected) for result in found(scenes.packed))


@pytest.mark.distributed
def test_stored_sample_is_the_codes_of_all_shards(found: Results, folder: Path) -> None:
    results = found(scenes.packed)
    store = ql.SampleStore.open(folder / "store")
    assert [sample.step for sample in store] == [STEPS]
    sample = store[0]
    for name in ("0.weight", "3.weight", "5.weight"):
        rows = torch.cat([result["local"][name] for result in results])
        q = sample.tensors[name]
        assert isinstance(q, QTensor)
        assert torch.equal(q.codes, rows)
    model = ql.pack(network(), "bfp8")
    reference(model, SIZE)
    loaded = network(seed=9)  # neither packed nor sharded
    sample.load_into(loaded)
    assert torch.equal(loaded(batch(0)[0]), model(batch(0)[0]))


@pytest.mark.distributed
def test_stepping_in_backward_gives_the_same_chain(found: Results, expected: dict[str, Tensor]) -> None:
    assert same(found(scenes.in_backward)[0]["codes"], expected)
    assert all(result["gradients"] == 0 for result in found(scenes.in_backward))
    assert all(result["diagnosed"] == result["held"] for result in found(scenes.in_backward))


@pytest.mark.distributed
def test_gradients_are_clipped_by_the_norm_over_all_shards(found: Results) -> None:
    model = ql.pack(network(), "fixed8.5")
    sampler = ql.SGLD(model.parameters(), **SETTINGS | scenes.CLIPPED)
    for step in range(STEPS):
        sampler.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(SIZE)) / SIZE).backward()  # type: ignore[union-attr]
    for name, p in model.named_parameters():
        parts = [result["accumulators"][name] for result in found(scenes.clipped)]
        whole = torch.cat(parts) if parts[0].shape != p.shape else parts[0]
        torch.testing.assert_close(whole, sampler.state[p]["accumulator"], rtol=1e-5, atol=1e-7)


@pytest.mark.distributed
def test_floats_on_the_grid_give_the_same_chain(found: Results, expected: dict[str, Tensor]) -> None:
    assert same(found(scenes.floats_on_grid)[0]["codes"], expected)
    assert [result["shape"] for result in found(scenes.floats_on_grid)] == [(17, 20), (16, 20)]


@pytest.mark.distributed
def test_fixed_point_without_noise_is_the_chain_of_one_process(found: Results) -> None:
    model = ql.pack(network(), "fixed8.5")
    settings = SETTINGS | {"rounding": "nearest", "temperature": 0, "gradients": None, "accumulator": "fp32"}
    sampler = ql.SGLD(model.parameters(), **settings)
    begun = codes_of(model)
    for step in range(STEPS):
        sampler.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(SIZE)) / SIZE).backward()  # type: ignore[union-attr]
        sampler.step()
    assert same(found(scenes.fixed_point)[0]["codes"], codes_of(model))
    assert not same(begun, codes_of(model))
    assert found(scenes.fixed_point)[0]["shapes"]["0.bias"] == (17,)
    assert found(scenes.fixed_point)[1]["shapes"]["5.weight"] == (0, 24)


@pytest.mark.distributed
def test_replicas_of_one_shard_are_the_chain_of_one_process(found: Results) -> None:
    expected = reference(ql.pack(network(), "bfp8"), shards=1)
    assert same(found(scenes.replicas)[0]["codes"], expected)
    assert same(found(scenes.replicas)[1]["local"], expected)


@pytest.mark.distributed
def test_shards_have_noise_of_their_own(found: Results) -> None:
    first, second = (result["local"].float() for result in found(scenes.noise))
    assert first.shape == second.shape == (4, 64)
    both = torch.stack([first.flatten(), second.flatten()])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.25  # 4 standard deviations of independent ones
    deviation = (2 * 0.1 / 10) ** 0.5 * 2**5  # in codes
    assert first.std().item() == pytest.approx(deviation, rel=0.2)
    assert second.std().item() == pytest.approx(deviation, rel=0.2)


@pytest.mark.distributed
def test_shared_weights_are_gathered_with_the_model(found: Results) -> None:
    model = ql.pack(Tied(), "bfp8")
    expected = model(TOKENS)
    for result in found(scenes.shared_weights):
        assert torch.equal(result["output"], expected)
        assert result["groups"] == ["", "middle"]
    assert "embedding.weight" in found(scenes.shared_weights)[0]["codes"]
    assert "last.weight" not in found(scenes.shared_weights)[0]["codes"]
    assert not torch.equal(
        found(scenes.shared_weights)[0]["codes"]["embedding.weight"], codes_of(model)["embedding.weight"]
    )


@pytest.mark.distributed
def test_activations_are_rounded_with_other_bits_in_each_process(found: Results) -> None:
    first, second = (one["output"] for one in found(scenes.activations))
    assert not torch.equal(first, second)
    assert float((first - second).abs().max()) < 1  # a gap or two


@pytest.mark.distributed
def test_a_gradient_that_is_not_finite_is_an_error_in_all_processes(found: Results) -> None:
    for one in found(scenes.not_finite):
        first, in_backward = one["messages"]
        assert (
            first
            == "the gradient of parameter '0.weight' holds an infinity or a NaN; no parameter was changed by this step"
        )
        assert (
            in_backward
            == "the gradient of parameter '0.weight' holds an infinity or a NaN; it was not changed by this step"
        )


@pytest.mark.distributed
def test_the_first_process_of_every_mesh_gets_the_sample(found: Results) -> None:
    first, second = (one["codes"] for one in found(scenes.separate_chains))
    assert first.keys() == second.keys()
    assert not torch.equal(first["0.weight"], second["0.weight"])


@pytest.mark.distributed
def test_shards_that_cut_through_blocks_are_refused(found: Results) -> None:
    assert found(scenes.refusals) == [{}, {}]


# ---- without other processes


def test_matrices_that_cannot_be_cut_between_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' cannot be sharded in bfp8/tensor: all of it is one block"):
        shard(ql.pack(network(), "bfp8/tensor"))
    with pytest.raises(ValueError, match=r"'0\.weight' cannot be sharded in bfp8/tensor"):
        shard(network(), weights="bfp8/tensor")
    with pytest.raises(ValueError, match=r"'3\.weight' cannot be sharded in bfp4: two codes share a byte"):
        shard(ql.pack(network(), "bfp4"))


def test_sharding_needs_a_process_group() -> None:
    model = ql.pack(network(), "bfp8")
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        shard(model)
    assert not any(isinstance(p, QShard) for p in model.parameters())  # nothing was changed
