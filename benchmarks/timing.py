"""Timing: all contestants take turns, and the least time of each counts.

On a shared machine a lasting disturbance slows all contestants alike, and the minimum leaves out a short one. The work of one
thread is timed by the processor time of that thread, which stands still while another process has the processor. Only the gain
from a second thread needs the wall clock.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from qlangevin import native
from qlangevin.experiments.environment import processor

WALL, PROCESSOR = time.perf_counter, time.thread_time


def nothing() -> None:
    """The default preparation of a contestant."""


@dataclass(frozen=True)
class Contestant:
    """A function to time, its number of threads, and a preparation before each run that is not timed."""

    run: Callable[[], object]
    threads: int = 1
    before: Callable[[], object] = nothing


def measure(
    contestants: dict[str, Contestant], seconds: float, clock: Callable[[], float] = PROCESSOR
) -> dict[str, float]:
    """Return the least seconds of each contestant. All take turns until the given time is used, at least five times each.

    None runs more often than the others: one that ran alone would find its memory in the cache, where others do not.
    """
    best = dict.fromkeys(contestants, float("inf"))
    rounds, used = 0, 0.0
    gc.collect()
    gc.disable()
    try:
        while rounds < 6 or used < seconds:  # the first round warms up
            for name, contestant in contestants.items():
                torch.set_num_threads(contestant.threads)
                contestant.before()
                start = clock()
                contestant.run()
                taken = clock() - start
                used += taken
                if rounds:
                    best[name] = min(best[name], taken)
            rounds += 1
    finally:
        gc.enable()
        torch.set_num_threads(1)
    return best


@dataclass(frozen=True)
class Goal:
    """A bound that a number must keep."""

    relation: Literal["<", "<=", ">="]
    bound: float

    def __str__(self) -> str:
        return f"{self.relation} {self.bound:g}"

    def met_by(self, number: float) -> bool:
        if self.relation == "<":
            return number < self.bound
        return number <= self.bound if self.relation == "<=" else number >= self.bound


@dataclass(frozen=True)
class Row:
    """One comparison. ``judged`` is the number that the goal bounds: our time or memory over the baseline's, the baseline's time
    over ours, or our number itself."""

    group: str
    name: str
    ours: float
    unit: str
    baseline: str = ""
    theirs: float | None = None
    judged_by: Literal["time", "speed", "memory", "value"] = "value"
    goal: Goal | None = None

    @property
    def judged(self) -> float:
        if self.theirs is None or self.judged_by == "value":
            return self.ours
        return self.theirs / self.ours if self.judged_by == "speed" else self.ours / self.theirs

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None else self.goal.met_by(self.judged)

    def as_json(self) -> dict[str, Any]:
        goal = None if self.goal is None else str(self.goal)
        return asdict(self) | {"goal": goal, "judged": self.judged, "reached": self.reached}

    def cells(self) -> tuple[str, ...]:
        """Return the row as text: what, ours, baseline, theirs, ratio, goal, reached."""
        theirs = "" if self.theirs is None else f"{self.theirs:.3g} {self.unit}"
        words = {"time": "x the time", "speed": "x as fast", "memory": "x the memory"}
        ratio = "" if self.judged_by == "value" else f"{self.judged:.2f}{words[self.judged_by]}"
        goal = "" if self.goal is None else str(self.goal)
        reached = {None: "", True: "yes", False: "NO"}[self.reached]
        return self.name, f"{self.ours:.3g} {self.unit}", self.baseline, theirs, ratio, goal, reached


def machine() -> dict[str, Any]:
    """Return the facts about this machine that the numbers depend on."""
    return {
        "processor": processor(),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "native": native.level(),
        "threads": "1, or 2 where it says so",
    }
