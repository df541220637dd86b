"""Learning rates against the formulas they come from, temperatures, and arguments."""

import json
import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from qlangevin.sampling.schedules import ConstantLR, CyclicalLR, LinearDecayLR, Schedule, StepDecayLR
from tests.helpers.schedules import SCHEDULES, STEPS, chain, every_schedule, run, sgd


def factors(schedule: Schedule) -> list[float]:
    return [schedule.factor(e) for e in range(schedule.total_steps)]


def test_constant() -> None:
    schedule = ConstantLR(sgd(), 10, 2)
    assert factors(schedule) == [1.0] * 10
    assert schedule.moments == (7, 10)
    assert schedule.samples == 2


def test_linear_decay_is_that_of_swalp() -> None:
    t = np.arange(245) / 245  # flat up to half of the budget, down to 1% at nine tenths of it, flat again
    assert factors(LinearDecayLR(sgd(), 245, 0)) == pytest.approx(np.interp(t, [0.5, 0.9], [1, 0.01]), abs=1e-15)
    by_hand = [1, 1, 1, 1, 1, 1, 0.7525, 0.505, 0.2575, 0.01]
    assert factors(LinearDecayLR(sgd(), 10, 0)) == pytest.approx(by_hand)
    at_once = LinearDecayLR(sgd(), 9, 0, flat_until=1 / 3, decayed_at=1 / 3, final=0.5)
    assert factors(at_once) == [1.0] * 3 + [0.5] * 6


def test_step_decay_is_that_of_he_et_al() -> None:
    assert factors(StepDecayLR(sgd(), 90, 0)) == pytest.approx([1] * 30 + [0.1] * 30 + [0.01] * 30)
    assert factors(StepDecayLR(sgd(), 7, 0)) == pytest.approx([1] * 3 + [0.1] * 2 + [0.01] * 2)
    assert factors(StepDecayLR(sgd(), 4, 0, milestones=[0, 0.5], gamma=0.5)) == [0.5, 0.5, 0.25, 0.25]
    assert factors(StepDecayLR(sgd(), 3, 0, milestones=())) == [1.0] * 3


@pytest.mark.parametrize("steps", [3, 7, 89, 90, 91, 1_000_003, 10**9, 3 * 10**15])
@pytest.mark.parametrize(("fraction", "exact"), [(1 - 1 / 3, (2, 3)), (0.1 + 0.2, (3, 10)), (0.29, (29, 100))])
def test_drops_come_at_the_fraction_that_is_meant(steps: int, fraction: float, exact: tuple[int, int]) -> None:
    schedule = StepDecayLR(sgd(), steps, 0, milestones=[fraction])
    drop = math.ceil(Fraction(*exact) * steps)
    assert schedule.factor(drop - 1) == 1
    assert schedule.factor(drop) == 0.1


@pytest.mark.parametrize(("steps", "cycles"), [(12, 3), (35, 7), (8, 8), (5, 1), (1, 1)])
def test_cyclical_is_that_of_zhang_et_al(steps: int, cycles: int) -> None:
    length = math.ceil(steps / cycles)
    alpha = [1 / 2 * (math.cos(math.pi * ((k - 1) % length) / length) + 1) for k in range(1, steps + 1)]
    schedule = CyclicalLR(sgd(), steps, cycles, 0)
    assert factors(schedule) == pytest.approx(alpha, abs=1e-15)
    assert schedule.factor(steps) == schedule.factor(steps - 1)  # no new cycle after the last


@given(st.integers(1, 400), st.data())
def test_cycles_are_whole_and_almost_equally_long(steps: int, data: st.DataObject) -> None:
    cycles = data.draw(st.integers(1, steps))
    schedule = CyclicalLR(sgd(), steps, cycles, 0)
    begins = [e for e in range(steps) if schedule.factor(e) == 1]
    lengths = [b - a for a, b in pairwise([*begins, steps])]
    assert len(begins) == cycles
    assert begins[0] == 0
    assert max(lengths) - min(lengths) <= 1
    assert all(schedule.place(e)[0] == schedule.place(e - 1)[0] + 1 for e in range(steps) if e not in begins)


def test_groups_get_their_own_learning_rate() -> None:
    model, sampler = chain(lr=0.4)
    schedule = CyclicalLR(sampler, 4, 2, 1, exploration=0.5)
    seen = run(model, sampler, schedule, 4)
    assert [used for used, *_ in seen] == [[(0.4 * f, 1.0), (0.8 * f, 0.5)] for f in (1.0, 0.5, 1.0, 0.5)]
    assert [collect for _, _, collect, _ in seen] == [False, True, False, True]


def test_a_tensor_learning_rate_stays_one() -> None:
    lr = torch.tensor(0.5)
    optimizer = sgd(lr)
    schedule = StepDecayLR(optimizer, 2, 0, milestones=[0.5])
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.05)
    state = json.loads(json.dumps(schedule.state_dict()))
    other = torch.tensor(0.25)
    resumed = StepDecayLR(sgd(other), 2, 0, milestones=[0.5])
    resumed.load_state_dict(state)
    assert other.item() == lr.item()
    [last] = resumed.get_last_lr()
    assert isinstance(last, Tensor)
    assert last is not other


@every_schedule
def test_no_step_beyond_the_last(name: str) -> None:
    model, sampler = chain()
    schedule = SCHEDULES[name](sampler)
    run(model, sampler, schedule, STEPS)
    before, groups = schedule.state_dict(), [dict(group) for group in sampler.param_groups]
    with pytest.raises(ValueError, match="total_steps=12, so there is no step 13; make a longer schedule"):
        schedule.step()
    assert schedule.state_dict() == before
    assert schedule.collect
    assert sampler.param_groups == groups


def test_torch_still_warns_of_the_wrong_order() -> None:
    schedule = ConstantLR(sgd(), 10, 1)
    assert isinstance(schedule, LRScheduler)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        schedule.step()


# ---- temperatures


def test_exploration_has_its_own_temperature() -> None:
    model, sampler = chain()
    schedule = CyclicalLR(sampler, 10, 2, 1, exploration=0.6, exploration_temperature=0)
    seen = run(model, sampler, schedule, 10)
    temperatures = [[temperature for _, temperature in used] for used, *_ in seen]
    assert temperatures == 2 * (3 * [[0.0, 0.0]] + 2 * [[1.0, 0.5]])  # mod(k - 1, 5) / 5 < 0.6
    assert [group["temperature"] for group in sampler.param_groups] == [1.0, 0.5]


def test_the_next_schedule_knows_the_temperature_before_the_last() -> None:
    _, sampler = chain()
    CyclicalLR(sampler, 10, 2, 1, exploration_temperature=0.25)
    schedule = CyclicalLR(sampler, 10, 2, 1, exploration=0, exploration_temperature=0)
    assert not schedule.exploring
    assert [group["temperature"] for group in sampler.param_groups] == [1.0, 0.5]


def test_without_exploration_temperature_it_is_left_alone() -> None:
    _, sampler = chain()
    schedule = CyclicalLR(sampler, 10, 2, 1)
    assert schedule.exploring
    assert all("initial_temperature" not in group for group in sampler.param_groups)
    assert "base_temperatures" not in schedule.state_dict()


def test_exploration_temperature_needs_temperatures() -> None:
    optimizer = sgd()
    with pytest.raises(TypeError, match=r"groups have a temperature, such as SGLD; with SGD it must be None"):
        CyclicalLR(optimizer, 10, 2, 1, exploration_temperature=0)
    assert "initial_lr" not in optimizer.param_groups[0]
    with pytest.raises(TypeError, match="list is not an Optimizer"):
        CyclicalLR([], 10, 2, 1, exploration_temperature=0)  # type: ignore[arg-type]


# ---- arguments


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "10", None])
@pytest.mark.parametrize("make", [ConstantLR, LinearDecayLR, StepDecayLR, CyclicalLR])
def test_total_steps_must_be_a_positive_integer(make: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"^total_steps must be an integer, at least 1, got {wrong!r}$"):
        make(sgd(), wrong, 1, **{"samples_per_cycle": 1} if make is CyclicalLR else {})


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (ConstantLR, {"samples": -1}, "samples must be an integer, at least 0, got -1"),
        (ConstantLR, {"samples": True}, "samples must be an integer, at least 0, got True"),
        (ConstantLR, {"samples": 6}, "samples must be at most 5, the steps that burn_in=0.5 leaves of 10, got 6"),
        (
            ConstantLR,
            {"samples": 6},
            r"; ask for 5 or fewer \(--samples 5\), or for more steps \(--epochs\) or a smaller burn_in$",
        ),
        (LinearDecayLR, {"samples": 3}, "samples must be at most 2, the steps that burn_in=0.8 leaves of 10, got 3"),
        (StepDecayLR, {"samples": 1, "burn_in": 1}, "leaves of 10, got 1; ask for more steps"),
        (ConstantLR, {"burn_in": 1.5}, "burn_in must be a fraction, between 0 and 1, got 1.5"),
        (ConstantLR, {"burn_in": math.nan}, "burn_in must be a fraction, between 0 and 1, got nan"),
        (ConstantLR, {"burn_in": True}, "burn_in must be a fraction, between 0 and 1, got True"),
        (LinearDecayLR, {"burn_in": "0.5"}, "burn_in must be a fraction, between 0 and 1, got '0.5'"),
        (LinearDecayLR, {"flat_until": -0.1}, "flat_until must be a fraction, between 0 and 1, got -0.1"),
        (LinearDecayLR, {"decayed_at": 90}, "decayed_at must be a fraction, between 0 and 1, got 90"),
        (LinearDecayLR, {"final": 2}, "final must be a fraction, between 0 and 1, got 2"),
        (LinearDecayLR, {"flat_until": 0.95}, "flat_until must not come after decayed_at, got 0.95 and 0.9"),
        (StepDecayLR, {"milestones": (30, 60)}, "milestones must be a fraction, between 0 and 1, got 30"),
        (StepDecayLR, {"milestones": (0.6, 0.3)}, r"milestones must increase, got \[0.6, 0.3\]"),
        (StepDecayLR, {"milestones": (0.3, 0.3)}, r"milestones must increase, got \[0.3, 0.3\]"),
        (StepDecayLR, {"milestones": 0.5}, "milestones must be several fractions, got 0.5"),
        (StepDecayLR, {"gamma": 10}, "gamma must be a fraction, between 0 and 1, got 10"),
        (CyclicalLR, {"cycles": 0}, "cycles must be an integer, at least 1, got 0"),
        (CyclicalLR, {"cycles": 11}, "cycles must be at most 10, got 11"),
        (CyclicalLR, {"samples_per_cycle": -1}, "samples_per_cycle must be an integer, at least 0, got -1"),
        (CyclicalLR, {"exploration": 1.1}, "exploration must be a fraction, between 0 and 1, got 1.1"),
        (
            CyclicalLR,
            {"cycles": 3, "exploration": 0.5, "samples_per_cycle": 2},
            "at most 1, the steps that exploration=0.5 leaves of the shortest cycle, which has 3, got 2; ask for 1 or fewer",
        ),
        (CyclicalLR, {"exploration_temperature": -1}, "exploration_temperature must be a finite number that is not"),
        (CyclicalLR, {"exploration_temperature": math.inf}, "exploration_temperature must be a finite .* got inf"),
    ],
)
def test_wrong_arguments_are_named(make: Any, arguments: dict[str, Any], message: str) -> None:
    usual = {"cycles": 1, "samples_per_cycle": 1} if make is CyclicalLR else {"samples": 1}
    with pytest.raises(ValueError, match=message):
        make(chain()[1], 10, **{**usual, **arguments})
