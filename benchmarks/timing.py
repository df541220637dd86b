"""How things are timed: all contestants take turns, and the best time of each counts.

On a shared machine nanoseconds come and go; a disturbance that lasts hits everybody, and one that does not is left out by the
minimum. What one thread does is timed with the processor time of that thread, which stands still while another process has
the processor. Only the gain from a second thread has to be read off the clock on the wall.
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
    """What a contestant has to do before it is timed, unless it says otherwise."""


@dataclass(frozen=True)
class Contestant:
    """What is timed, with how many threads, and what is done before each run without being timed."""

    run: Callable[[], object]
    threads: int = 1
    before: Callable[[], object] = nothing


def measure(
    contestants: dict[str, Contestant], seconds: float, clock: Callable[[], float] = PROCESSOR
) -> dict[str, float]:
    """The least time of each, in seconds. Each has an equal share of the given time and runs at least five times."""
    best = dict.fromkeys(contestants, float("inf"))
    used = dict.fromkeys(contestants, 0.0)
    rounds, share = 0, seconds / max(len(contestants), 1)
    gc.collect()
    gc.disable()
    try:
        while rounds < 6 or min(used.values()) < share:  # the first round warms up
            for name, contestant in contestants.items():
                if rounds >= 6 and used[name] >= share:
                    continue
                torch.set_num_threads(contestant.threads)
                contestant.before()
                start = clock()
                contestant.run()
                taken = clock() - start
                used[name] += taken
                if rounds:
                    best[name] = min(best[name], taken)
            rounds += 1
    finally:
        gc.enable()
        torch.set_num_threads(1)
    return best


@dataclass(frozen=True)
class Goal:
    """What a number must be."""

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
    """One comparison. ``judged`` is what the goal is about: ours over the rival's time or memory, the rival's time over ours, or
    our number itself."""

    group: str
    name: str
    ours: float
    unit: str
    rival: str = ""
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
        """The row as text: what, ours, rival, theirs, ratio, goal, reached."""
        theirs = "" if self.theirs is None else f"{self.theirs:.3g} {self.unit}"
        words = {"time": "x the time", "speed": "x as fast", "memory": "x the memory"}
        ratio = "" if self.judged_by == "value" else f"{self.judged:.2f}{words[self.judged_by]}"
        goal = "" if self.goal is None else str(self.goal)
        reached = {None: "", True: "yes", False: "NO"}[self.reached]
        return self.name, f"{self.ours:.3g} {self.unit}", self.rival, theirs, ratio, goal, reached


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "processor": processor(),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "native": native.level(),
        "threads": "1, or 2 where it says so",
    }
