"""The steps at which schedules collect samples."""

import math
from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from qlangevin.sampling.schedules import ConstantLR, CyclicalLR, LinearDecayLR
from tests.helpers.schedules import SCHEDULES, STEPS, chain, every_schedule, run, sgd


def test_the_papers_samples_are_one_an_epoch() -> None:
    batches = 391  # CIFAR-10 in batches of 128
    schedule = LinearDecayLR(sgd(), 245 * batches, 50, burn_in=195 / 245)
    assert schedule.moments == tuple(epoch * batches for epoch in range(196, 246))


@given(st.integers(1, 10**9), st.floats(0, 1), st.data())
def test_moments_after_a_burn_in(steps: int, burn_in: float, data: st.DataObject) -> None:
    most = steps - math.ceil(Fraction(burn_in).limit_denominator(10**9) * steps)
    count = data.draw(st.integers(0, min(most, 50)))
    schedule = ConstantLR(sgd(), steps, count, burn_in=burn_in)
    gaps = [b - a for a, b in pairwise(schedule.moments)]
    assert schedule.samples == len(schedule.moments) == count
    assert all(gap > 0 for gap in gaps)
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
    if count:
        assert schedule.moments[-1] == steps
        assert schedule.moments[0] > burn_in * steps * (1 - 1e-9)


@given(st.integers(1, 500), st.floats(0, 1), st.data())
def test_moments_of_cycles(steps: int, exploration: float, data: st.DataObject) -> None:
    cycles = data.draw(st.integers(1, steps))
    shortest = steps // cycles
    most = shortest - math.ceil(Fraction(exploration).limit_denominator(10**9) * shortest)
    each = data.draw(st.integers(0, most))
    schedule = CyclicalLR(sgd(), steps, cycles, each, exploration=exploration)
    assert list(schedule.moments) == sorted(set(schedule.moments))
    assert schedule.samples == len(schedule.moments) == cycles * each
    for moment in schedule.moments:  # the step before it was one that samples
        done, length = schedule.place(moment - 1)
        assert done / length >= exploration - 1e-9
    if each:
        assert set(schedule.moments) >= {c * steps // cycles for c in range(1, cycles + 1)}


def test_moments_by_hand() -> None:
    assert CyclicalLR(sgd(), 20, 2, 2).moments == (9, 10, 19, 20)
    assert CyclicalLR(sgd(), 20, 2, 3, exploration=0.5).moments == (6, 8, 10, 16, 18, 20)
    assert CyclicalLR(sgd(), 7, 2, 1, exploration=0.6).moments == (3, 7)
    assert ConstantLR(sgd(), 5, 5, burn_in=0).moments == (1, 2, 3, 4, 5)
    assert ConstantLR(sgd(), 10**9, 4).moments == (625_000_000, 750_000_000, 875_000_000, 10**9)
    assert ConstantLR(sgd(), 3, 0, burn_in=1).moments == ()


@every_schedule
def test_samples_are_collected_at_the_moments(name: str) -> None:
    model, sampler = chain()
    schedule = SCHEDULES[name](sampler)
    assert not schedule.collect
    collected = [seen[2] for seen in run(model, sampler, schedule, STEPS)]
    assert [e for e, collect in enumerate(collected, 1) if collect] == list(schedule.moments)
    assert sum(collected) == schedule.samples > 0
