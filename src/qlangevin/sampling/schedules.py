"""Learning-rate schedules that also say when to collect a sample.

Each is a torch scheduler, which the caller steps once after every step of the sampler::

    sampler.step()
    schedule.step()
    if schedule.collect:
        store.append(model)

After e = ``last_epoch`` steps the groups hold the learning rate of step e + 1: the initial one times ``factor(e)``. It follows
from e alone, so a run can be resumed at any step. A fraction of K steps is reached at the first e with e / K >= fraction; steps
are counted in integers, so that nothing drifts.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from .._validate import check_fraction, check_integer, check_number, describe_differences

__all__ = ["ConstantLR", "CyclicalLR", "LinearDecayLR", "Schedule", "StepDecayLR"]

Json: TypeAlias = "int | float | str | list[Json] | None"


class Schedule(LRScheduler, ABC):
    """A learning rate as a function of the step, and the moments to collect samples.

    Args:
        optimizer: whose groups' learning rates to set.
        moments: numbers of steps after which to collect a sample, in rising order.
        total_steps: the number of steps.
        arguments: the schedule's other arguments as JSON, for `settings`.
    """

    _bases: tuple[str, ...] = ("base_lrs",)  # attributes with a number for each group, saved with the state

    def __init__(self, optimizer: Optimizer, moments: Iterable[int], *, total_steps: int, **arguments: Json) -> None:
        self.total_steps = total_steps
        self.moments = tuple(moments)
        self._moments = frozenset(self.moments)
        self._arguments = arguments
        super().__init__(optimizer)

    @abstractmethod
    def factor(self, step: int) -> float:
        """Return the factor of the initial learning rates when ``step`` steps are done."""

    @property
    def samples(self) -> int:
        """Number of samples that are collected in all."""
        return len(self.moments)

    @property
    def collect(self) -> bool:
        """True if the present weights are to be kept as a sample."""
        return self.last_epoch in self._moments

    def settings(self) -> dict[str, Json]:
        """Return the name and the arguments of the schedule, for a manifest."""
        arguments = copy.deepcopy(self._arguments)
        return {"schedule": type(self).__name__, "total_steps": self.total_steps, **arguments}

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group for the next step."""
        factor = self.factor(self.last_epoch)
        return [float(lr) * factor for lr in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Advance by one step. Beyond ``total_steps`` it raises ValueError, and nothing has changed."""
        after = self.last_epoch + 1 if epoch is None else epoch
        if not 0 <= after <= self.total_steps:
            raise ValueError(f"total_steps={self.total_steps}, so there is no step {after}; make a longer schedule")
        super().step(epoch)
        self._set_temperatures()

    def _set_temperatures(self) -> None:
        """Set the groups' temperatures; schedules that have none to set leave them alone."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule and its settings, in JSON's types."""
        bases = {name: [float(value) for value in getattr(self, name)] for name in self._bases}
        return {"last_epoch": self.last_epoch, **bases, "settings": self.settings()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a saved schedule and set the optimizer's groups. Raises ValueError for the state of another schedule."""
        self._check_state(state_dict)
        for name in self._bases:
            setattr(self, name, [float(value) for value in state_dict[name]])
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = self.last_epoch + 1  # torch counts the step it takes at construction
        groups = self.optimizer.param_groups
        for group, base, lr in zip(groups, self.base_lrs, self.get_lr(), strict=True):
            for name, value in (("initial_lr", base), ("lr", lr)):
                if isinstance(group.get(name), Tensor):  # a compiled graph may refer to this tensor
                    group[name].fill_(value)
                else:
                    group[name] = value
        self._last_lr = [g["lr"].clone() if isinstance(g["lr"], Tensor) else g["lr"] for g in groups]
        self._set_temperatures()

    def _check_state(self, state: dict[str, Any]) -> None:
        here, saved = self.settings(), state.get("settings")
        if not isinstance(saved, dict):
            raise ValueError(f"this is not the state of a schedule of qlangevin: its settings are {saved!r}")
        if wrong := describe_differences(saved, here):
            raise ValueError(f"the state is of another schedule: {', '.join(wrong)}")
        check_integer("last_epoch", state.get("last_epoch"), 0, self.total_steps)
        for name in self._bases:
            groups, values = len(self.optimizer.param_groups), state.get(name)
            if not isinstance(values, list) or len(values) != groups:
                raise ValueError(f"{name} must be a list of numbers, one for each of {groups} groups, got {values!r}")
            for value in values:
                check_number(name, value)


class ConstantLR(Schedule):
    """A constant learning rate.

    Args:
        optimizer: whose groups' learning rates to set.
        total_steps: K, the number of steps.
        samples: the number to collect, evenly spaced over the steps after the burn-in, the last at the end; 0 for none.
        burn_in: the fraction of the steps before the first sample can be collected.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, samples: int, *, burn_in: float = 0.5) -> None:
        super().__init__(optimizer, **_plan_after_burn_in(total_steps, samples, burn_in))

    def factor(self, step: int) -> float:
        return 1.0


class LinearDecayLR(Schedule):
    """Flat, then linear, then flat: SWALP's schedule (Yang et al., 2019), which the paper uses for CIFAR and IMDB.

    With t = e / K, a = ``flat_until`` and b = ``decayed_at`` the factor is 1 until a, ``final`` from b on, and between them
    1 - (1 - final) (t - a) / (b - a). The paper's 245 epochs with 50 samples, one an epoch, are ``burn_in=195 / 245``.
    SWALP changes the rate once an epoch; here it changes with every step.

    Args:
        optimizer, total_steps, samples, burn_in: as of `ConstantLR`.
        flat_until: the fraction of the steps with the full learning rate.
        decayed_at: the fraction after which it is final.
        final: the final learning rate as a fraction of the initial one.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        samples: int,
        *,
        burn_in: float = 0.8,
        flat_until: float = 0.5,
        decayed_at: float = 0.9,
        final: float = 0.01,
    ) -> None:
        self.flat_until, self.decayed_at = (
            check_fraction("flat_until", flat_until),
            check_fraction("decayed_at", decayed_at),
        )
        self.final = check_fraction("final", final)
        if self.flat_until > self.decayed_at:
            raise ValueError(f"flat_until must not come after decayed_at, got {flat_until} and {decayed_at}")
        shape: dict[str, Any] = {"flat_until": self.flat_until, "decayed_at": self.decayed_at, "final": self.final}
        super().__init__(optimizer, **_plan_after_burn_in(total_steps, samples, burn_in), **shape)

    def factor(self, step: int) -> float:
        t = step / self.total_steps
        if t >= self.decayed_at:
            return self.final
        if t <= self.flat_until:
            return 1.0
        return 1 - (1 - self.final) * (t - self.flat_until) / (self.decayed_at - self.flat_until)


class StepDecayLR(Schedule):
    """Divided by ten after a third and after two thirds: the schedule of He et al. (2016), which the paper uses for ImageNet.

    The factor is gamma^m when m milestones have been reached.

    Args:
        optimizer, total_steps, samples, burn_in: as of `ConstantLR`.
        milestones: fractions of the steps.
        gamma: factor of the learning rate at each milestone.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        samples: int,
        *,
        burn_in: float = 0.8,
        milestones: Iterable[float] = (1 / 3, 2 / 3),
        gamma: float = 0.1,
    ) -> None:
        if not isinstance(milestones, Iterable):
            raise ValueError(f"milestones must be several fractions, got {milestones!r}")
        fractions = [check_fraction("milestones", m) for m in milestones]
        if any(a >= b for a, b in pairwise(fractions)):
            raise ValueError(f"milestones must increase, got {fractions}")
        plan = _plan_after_burn_in(total_steps, samples, burn_in)
        self.drops, self.gamma = (
            [_first_step_at(m, plan["total_steps"]) for m in fractions],
            check_fraction("gamma", gamma),
        )
        super().__init__(optimizer, **plan, milestones=[*fractions], gamma=self.gamma)

    def factor(self, step: int) -> float:
        return math.pow(self.gamma, sum(step >= drop for drop in self.drops))


class CyclicalLR(Schedule):
    """The cyclical cosine of cSGLD (Zhang et al., 2020): each cycle explores with large steps, then samples with small ones.

    With K steps and M cycles of length L = K / M step k has

        α_k = α_0 / 2 (cos(π mod(k - 1, L) / L) + 1),

    and explores while mod(k - 1, L) / L < β. Where M does not divide K, Zhang et al. round L up and cut the last cycle short;
    here all cycles are complete, and their lengths differ by at most one.

    Args:
        optimizer: whose groups' learning rates to set.
        total_steps: K, the number of steps.
        cycles: M, their number.
        samples_per_cycle: the number to collect, evenly spaced over the part of a cycle that samples, the last at its end.
        exploration: β, the fraction of a cycle that explores.
        exploration_temperature: the temperature of all groups while exploring; they have their own otherwise. 0 explores by
            SGD, as Zhang et al. do. None leaves temperatures alone.
    """

    base_temperatures: list[float]

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        cycles: int,
        samples_per_cycle: int,
        *,
        exploration: float = 0.8,
        exploration_temperature: float | None = None,
    ) -> None:
        self.total_steps = check_integer("total_steps", total_steps, 1)
        self.cycles = check_integer("cycles", cycles, 1, self.total_steps)
        self.exploration = check_fraction("exploration", exploration)
        moments = self._plan_cycles(check_integer("samples_per_cycle", samples_per_cycle, 0))
        self.exploration_temperature = exploration_temperature
        if exploration_temperature is not None:
            self.exploration_temperature = check_number("exploration_temperature", exploration_temperature)
            self._bases = ("base_lrs", "base_temperatures")
            self.base_temperatures = _initial_temperatures(optimizer)
        super().__init__(
            optimizer, moments, total_steps=self.total_steps, cycles=self.cycles, samples_per_cycle=int(samples_per_cycle),
            exploration=self.exploration, exploration_temperature=self.exploration_temperature,
        )  # fmt: skip

    def _plan_cycles(self, samples: int) -> list[int]:
        """Return the moments to collect that many samples in each cycle."""
        shortest = self.total_steps // self.cycles
        left = shortest - _first_step_at(self.exploration, shortest)
        if samples > left:
            most = f"the steps that exploration={self.exploration} leaves of the shortest cycle, which has {shortest}"
            remedy = _remedy(left, "--cycle-samples", "fewer cycles, more steps (--epochs) or less exploration")
            raise ValueError(f"samples_per_cycle must be at most {left}, {most}, got {samples}; {remedy}")
        ends = [c * self.total_steps // self.cycles for c in range(1, self.cycles + 1)] if samples else []
        begins = [
            begin + _first_step_at(self.exploration, end - begin) for begin, end in zip([0, *ends], ends, strict=False)
        ]
        return [
            moment for begin, end in zip(begins, ends, strict=True) for moment in _space_evenly(begin, end, samples)
        ]

    def place(self, step: int) -> tuple[int, int]:
        """Return the steps that the current cycle has done after ``step`` in all, and its length."""
        step = min(step, self.total_steps - 1)  # after the last cycle the schedule stays at its end
        cycle = ((step + 1) * self.cycles - 1) // self.total_steps
        begin, end = (c * self.total_steps // self.cycles for c in (cycle, cycle + 1))
        return step - begin, end - begin

    def factor(self, step: int) -> float:
        done, length = self.place(step)
        return (math.cos(math.pi * done / length) + 1) / 2

    @property
    def exploring(self) -> bool:
        """True if the next step explores."""
        done, length = self.place(self.last_epoch)
        return done < _first_step_at(self.exploration, length)

    def _set_temperatures(self) -> None:
        if self.exploration_temperature is None:
            return
        exploring = self.exploring
        for group, own in zip(self.optimizer.param_groups, self.base_temperatures, strict=True):
            group["initial_temperature"] = own
            group["temperature"] = self.exploration_temperature if exploring else own


def _initial_temperatures(optimizer: Optimizer) -> list[float]:
    """Return the groups' temperatures before any schedule changed them; a schedule notes them in the group as it does lr."""
    groups = getattr(optimizer, "param_groups", [])  # torch refuses what is no optimizer
    if any("temperature" not in group for group in groups):
        raise TypeError(
            "exploration_temperature needs an optimizer whose groups have a temperature, such as SGLD; "
            f"with {type(optimizer).__name__} it must be None"
        )
    return [float(group.get("initial_temperature", group["temperature"])) for group in groups]


def _plan_after_burn_in(total_steps: int, samples: int, burn_in: float) -> dict[str, Any]:
    """Check the arguments that most schedules share; return them with the moments that they stand for."""
    total_steps, samples = check_integer("total_steps", total_steps, 1), check_integer("samples", samples, 0)
    burn_in = check_fraction("burn_in", burn_in)
    begin = _first_step_at(burn_in, total_steps)
    if samples > (left := total_steps - begin):
        most = f"the steps that burn_in={burn_in} leaves of {total_steps}"
        remedy = _remedy(left, "--samples", "more steps (--epochs) or a smaller burn_in")
        raise ValueError(f"samples must be at most {left}, {most}, got {samples}; {remedy}")
    moments = _space_evenly(begin, total_steps, samples)
    return {"moments": moments, "total_steps": total_steps, "samples": samples, "burn_in": burn_in}


def _remedy(left: int, option: str, other: str) -> str:
    """Return what to do about too many samples, in Python and, in parentheses, on the command line."""
    return f"ask for {left} or fewer ({option} {left}), or for {other}" if left else f"ask for {other}"


def _space_evenly(begin: int, end: int, count: int) -> list[int]:
    """Return that many integers, evenly spaced over those after ``begin``; the last is ``end``."""
    return [begin + i * (end - begin) // count for i in range(1, count + 1)]


@lru_cache(maxsize=64)
def _first_step_at(fraction: float, steps: int) -> int:
    """Return the first step that reaches a fraction of all, read as the simple one it stands for: 1/3, not 1/3 - 2e-17."""
    return math.ceil(Fraction(fraction).limit_denominator(10**9) * steps)
