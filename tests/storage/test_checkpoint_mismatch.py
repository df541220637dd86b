"""Checkpoints of another model, sampler, schedule, loader or store are refused, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import qlangevin as ql
from benchmarks.kills import content
from tests.helpers.checkpoint_runs import STEPS, Run, make


def _other_model(**change: Any) -> Run:
    run = make()
    run.model[0] = nn.Linear(4, 5, **change)  # type: ignore[operator]
    run.sampler = ql.SGLD(run.model.parameters(), 0.1, 20, weights="bfp8")
    run.schedule = ql.LinearDecayLR(run.sampler, STEPS, 4, burn_in=0.5)
    return run


def _frozen() -> Run:
    run = make()
    run.model.get_parameter("0.bias").requires_grad_(False)
    return run


def _with_sampler(sampler: Callable[[nn.Module], Optimizer]) -> Run:
    run = make()
    run.sampler = sampler(run.model)
    run.schedule = ql.LinearDecayLR(run.sampler, STEPS, 4, burn_in=0.5)
    return run


def _with_schedule(schedule: Callable[[Optimizer], Any]) -> Run:
    run = make()
    run.schedule = schedule(run.sampler)
    return run


def _two_groups(model: nn.Module) -> Optimizer:
    return ql.SGLD([{"params": list(m.parameters())} for m in (model[0], model[2])], 0.1, 20)  # type: ignore[index]


def _part(model: nn.Module) -> Optimizer:
    return ql.SGLD(list(model.parameters())[:2], 0.1, 20)


MISFITS: dict[str, tuple[Callable[[], Run], str]] = {
    "parameters": (lambda: _other_model(bias=False), "of another model: '0.bias' is missing in the model"),
    "dtype": (lambda: make("float64"), "'0.weight' is of float32 there and of float64"),
    "buffers": (lambda: make("batchnorm"), "'1.running_mean' is in the model only"),
    "frozen": (_frozen, "'0.bias' is parameter .* there and frozen"),
    "groups": (lambda: _with_sampler(_two_groups), "one for each of 2 groups"),
    "group": (lambda: _with_sampler(_part), "parameter group that doesn't match the size"),
    "optimizer": (lambda: _with_sampler(lambda model: torch.optim.SGD(model.parameters(), 0.1)), "SGLD|SGD|sampler"),
    "schedule's length": (lambda: make(samples=3), "of another schedule: samples is 4 there and 3 here"),
    "schedule": (lambda: make("cyclical"), "LinearDecayLR as schedule"),
    "torch's schedule": (lambda: _with_schedule(lambda s: torch.optim.lr_scheduler.StepLR(s, 2)), "schedule"),
    "loader": (lambda: make(batch_size=4), "another order: batch_size is 6 there and 4 here"),
    "lowering": (lambda: make(lower=True), "of a model lowered otherwise: '0'"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(misfit: str, tmp_path: Path) -> None:
    build, message = MISFITS[misfit]
    run = make()
    run.train(5)
    run.save(tmp_path)
    other = build()
    other.train(3)
    before = other.state()
    with pytest.raises(ValueError, match=message):
        other.load(tmp_path)
    assert other.state() == before
    other.train(STEPS)  # it can still be trained


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    run, other = make("torch"), make()
    run.train(2)
    ql.save_checkpoint(tmp_path, run.model, run.sampler)
    before = other.state()
    with pytest.raises(ValueError, match=r"sampler|SGLD|SGD"):
        ql.load_checkpoint(tmp_path, other.model, other.sampler)
    assert other.state() == before


def test_a_model_lowered_in_part_is_refused(tmp_path: Path) -> None:
    make("lowered").save(tmp_path)
    other = make()
    ql.lower(other.model, "bfp8", layers=nn.ReLU)
    with pytest.raises(ValueError, match="lowered otherwise: '0', '2' in one only"):
        other.load(tmp_path)


def test_a_packed_model_of_another_format_is_refused(tmp_path: Path) -> None:
    make("packed").save(tmp_path)
    model = ql.pack(make().model, "fixed8.6")
    with pytest.raises(ValueError, match=r"'0.weight' is parameter bfp8 .* and parameter fixed8\.6"):
        ql.load_checkpoint(tmp_path, model)


def test_a_store_that_has_lost_samples_is_refused(tmp_path: Path) -> None:
    run = make()
    with ql.SampleStore.create(tmp_path / "store", run.model, run.sampler) as store:
        store.append(run.model)
        store.append(run.model, step=1)
        run.save(tmp_path, store=store)
        store.truncate(1)
        run.train(3)
        before = run.state(), content(store.path)
        with pytest.raises(ValueError, match=r"comes after 2 samples, but .*store has 1"):
            run.load(tmp_path, store)
        assert (run.state(), content(store.path)) == before


@pytest.mark.parametrize("how", ["closed", "for reading"])
def test_a_store_that_cannot_be_taken_back_is_refused(how: str, tmp_path: Path) -> None:
    run = make()
    with ql.SampleStore.create(tmp_path / "store", run.model, run.sampler) as store:
        run.save(tmp_path, store=store)
        store.append(run.model)
    run.train(3)
    before = run.state(), content(store.path)
    with pytest.raises(PermissionError):
        run.load(tmp_path, store if how == "closed" else ql.SampleStore.open(tmp_path / "store"))
    assert (run.state(), content(store.path)) == before


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Of one with other settings, and of one with the same settings and other samples."""
    run, other = make(), make()
    other.train(3)
    with ql.SampleStore.create(tmp_path / "a", run.model, run.sampler, run.schedule) as store:
        store.append(run.model)
        run.save(tmp_path, store=store)
    with ql.SampleStore.create(tmp_path / "b", other.model, other.sampler, other.schedule) as store:
        store.append(other.model)
        before = other.state()
        with pytest.raises(ValueError, match=r"is of another run than the store in .*last is"):
            other.load(tmp_path, store)
        assert other.state() == before
        assert len(store) == 1
    with ql.SampleStore.create(tmp_path / "c", run.model, run.sampler) as store:
        store.append(run.model)
        with pytest.raises(ValueError, match=r"settings\.schedule"):
            run.load(tmp_path, store)


def test_another_way_of_lowering_is_refused(tmp_path: Path) -> None:
    run, other = make("lowered"), make("lowered")
    run.save(tmp_path)
    ql.unlower(other.model)
    ql.lower(other.model, activations="bfp8", errors="bfp8", seed=99)
    with pytest.raises(ValueError, match=r"lowered otherwise: .*seed=99"):
        other.load(tmp_path)
