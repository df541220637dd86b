"""The state and settings of schedules: resuming, JSON, and states that are refused."""

import json
from typing import Any

import numpy as np
import pytest
from torch.optim.lr_scheduler import StepLR

from qlangevin.sampling.schedules import ConstantLR, StepDecayLR
from tests.helpers.schedules import SCHEDULES, STEPS, chain, every_schedule, run, sgd


@every_schedule
@pytest.mark.parametrize("order", ["optimizer first", "schedule first"])
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, order: str) -> None:
    model, sampler = chain()
    whole = run(model, sampler, SCHEDULES[name](sampler), STEPS)
    for stop in range(STEPS + 1):
        model, sampler = chain()
        schedule = SCHEDULES[name](sampler)
        run(model, sampler, schedule, stop)
        again, other = chain(lr=7.0, temperature=3.0)
        again.load_state_dict(model.state_dict())
        if order == "optimizer first":
            other.load_state_dict(sampler.state_dict())
        resumed = SCHEDULES[name](other)
        resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
        if order == "schedule first":
            other.load_state_dict(sampler.state_dict())
        assert (resumed.last_epoch, resumed.collect) == (stop, schedule.collect)
        assert resumed.get_last_lr() == schedule.get_last_lr()
        assert run(again, other, resumed, STEPS - stop) == whole[stop:]
        assert resumed.state_dict()["last_epoch"] == STEPS


@every_schedule
def test_loading_a_schedule_sets_the_groups(name: str) -> None:
    for stop in range(STEPS + 1):
        model, sampler = chain()
        schedule = SCHEDULES[name](sampler)
        run(model, sampler, schedule, stop)
        _, other = chain(lr=7.0)
        resumed = SCHEDULES[name](other)
        for group in other.param_groups:
            del group["initial_lr"]  # as after loading the state of a sampler that had no schedule
        resumed.load_state_dict(schedule.state_dict())
        for key in ("lr", "initial_lr", "temperature", "initial_temperature"):
            assert [g.get(key) for g in other.param_groups] == [g.get(key) for g in sampler.param_groups]


@every_schedule
def test_state_and_settings_are_json(name: str) -> None:
    schedule = SCHEDULES[name](chain()[1])
    for content in (schedule.state_dict(), schedule.settings()):
        assert json.loads(json.dumps(content, allow_nan=False)) == content
    settings = schedule.settings()
    make: Any = type(schedule)
    assert settings.pop("schedule") == make.__name__
    assert make(chain()[1], **settings).settings() == schedule.settings()


def test_settings_by_name() -> None:
    schedule = StepDecayLR(sgd(), np.int64(90), 5, milestones=np.array([0.25, 0.5]))
    settings = schedule.settings()
    expected = {"total_steps": 90, "samples": 5, "burn_in": 0.8, "milestones": [0.25, 0.5], "gamma": 0.1}
    assert settings == {"schedule": "StepDecayLR", **expected}
    settings["milestones"].clear()  # type: ignore[union-attr]
    assert schedule.settings()["milestones"] == [0.25, 0.5]


def test_a_state_of_another_schedule_is_refused() -> None:
    optimizer = sgd()
    schedule = StepDecayLR(optimizer, 90, 5)
    before, group = schedule.state_dict(), dict(optimizer.param_groups[0])
    other = StepDecayLR(sgd(0.5), 80, 5, milestones=[0.5])
    other.optimizer.step()
    other.step()
    with pytest.raises(ValueError, match=r"total_steps is 80 there and 90 here, milestones is \[0.5\] .* and \[0.3"):
        schedule.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match=r"schedule is 'ConstantLR' there .*gamma is 'absent' there and 0.1 here"):
        schedule.load_state_dict(ConstantLR(sgd(), 90, 5).state_dict())
    assert schedule.state_dict() == before
    assert optimizer.param_groups[0] == group


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": None}, "not the state of a schedule of qlangevin: its settings are None"),
        ({"last_epoch": 91}, "last_epoch must be at most 90, got 91"),
        ({"last_epoch": -1}, "last_epoch must be an integer, at least 0, got -1"),
        ({"last_epoch": None}, "last_epoch must be an integer, at least 0, got None"),
        ({"base_lrs": [0.1, 0.2]}, r"base_lrs must be a list of numbers, one for each of 1 groups, got \[0.1, 0.2\]"),
        ({"base_lrs": None}, "base_lrs must be a list of numbers, one for each of 1 groups, got None"),
        ({"base_lrs": ["fast"]}, "base_lrs must be a finite number that is not negative, got 'fast'"),
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any], message: str) -> None:
    schedule = StepDecayLR(sgd(), 90, 5)
    before = schedule.state_dict()
    with pytest.raises(ValueError, match=message):
        schedule.load_state_dict({**before, "last_epoch": 3, "base_lrs": [5.0], **change})
    assert schedule.state_dict() == before


def test_a_state_of_torchs_own_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="not the state of a schedule of qlangevin"):
        StepDecayLR(sgd(), 90, 5).load_state_dict(StepLR(sgd(), 30).state_dict())
