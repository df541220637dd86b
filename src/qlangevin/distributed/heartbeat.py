"""Signs of life of the ranks, so that one that is frozen, and not dead, is noticed and named.

A process that has been stopped, or whose machine hangs, keeps its connections open: a collective that waits for it fails only
after its timeout, and cannot tell which rank it waited for. So a thread of each rank counts in the store where the ranks met,
over a connection of its own, whatever the rank itself is busy with. A rank whose count stands still is frozen or dead. One that
runs on the same machine is asked of the system, too, and missed at once if its process has ended.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from time import monotonic, sleep
from typing import Any, Literal, TypeAlias

__all__ = ["Heartbeat", "State", "current_heartbeat"]

INTERVAL = 0.5  # seconds between two beats, of up to MANY ranks
MANY = 64
BEATS = 4  # so many intervals without a beat, after a collective has failed, and a rank is named

State: TypeAlias = Literal["here", "misses others", "ended"]

_running: list[Heartbeat] = []


def current_heartbeat() -> Heartbeat | None:
    """Return the heartbeat of the process group joined last; None outside of one."""
    return _running[-1] if _running else None


@dataclass
class Beat:
    """A rank's entry in the store."""

    count: int = 0
    state: State = "here"
    machine: str = ""
    process: int = 0
    arrived: dict[str, int] = field(default_factory=dict)
    """Times that the rank has arrived at `Heartbeat.meet`, by the ranks that meet."""


class Heartbeat:
    """Beats of this rank, and those of the others.

    ``timeout`` is the number of seconds until silence is an error; ``serves``, whether this process serves the store.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, serves: bool) -> None:
        self.rank, self.size, self.timeout, self.serves = rank, size, timeout, serves
        self.interval = min(INTERVAL * max(1.0, size / MANY), timeout / BEATS)
        self._store = store.clone()  # an operation of the process group that waits must not hold up a beat
        self._own = Beat(machine=_machine(), process=os.getpid())
        self._others: dict[int, Beat] = {}
        self._changed: dict[int, float] = {}  # when a rank's count was last seen to have changed
        self._answered, self._readers, self._lost = 0.0, 0, False
        self._verdict: str | None = None  # of this rank, or of the first that has found another missing
        self._lock, self._wake, self._end = threading.Lock(), threading.Event(), False
        self._publish()
        self._thread = threading.Thread(target=self._run, name="qlangevin-heartbeat", daemon=True)
        self._thread.start()
        _running.append(self)

    def announce(self, state: State) -> None:
        """Tell the others that this rank leaves."""
        self._own.state = state
        self._wake.set()

    def stop(self) -> None:
        """Beat no more. A process that serves the store and misses a rank lets the others look first which one it is."""
        if self.serves and self._own.state == "misses others":
            others = [r for r in range(self.size) if r != self.rank]
            with self._reading() as began:
                while monotonic() - began < (BEATS + 3) * self.interval and any(map(self._is_here, others)):
                    sleep(0.01)
        self._end = True
        self._wake.set()
        self._thread.join(BEATS * self.interval)  # longer only if the store does not answer
        _running.remove(self)

    def meet(self, ranks: Collection[int]) -> str | None:
        """Wait, as long as it takes, until all these ranks have called this; if one is missing, return which in words."""
        scope = ",".join(map(str, ranks))
        times = self._own.arrived[scope] = self._own.arrived.get(scope, 0) + 1
        others = [r for r in ranks if r != self.rank]
        with self._reading() as began:
            while not all(self._beat(r).arrived.get(scope, 0) >= times for r in others):
                if missing := self._name(others, self.timeout, began, left=("ended", "misses others")):
                    return self._conclude(missing)
                sleep(0.01)
        return None

    def name_missing(self) -> str:
        """Return the ranks that have ended or give no sign of life, in words. Takes a few beats if none is known to be dead."""
        others = [r for r in range(self.size) if r != self.rank]
        with self._reading() as began:
            while monotonic() - began < (BEATS + 2) * self.interval:
                if missing := self._name(others, BEATS * self.interval, began):
                    return self._conclude(missing)
                if all(self._changed[r] > began or self._beat(r).state == "misses others" for r in others):
                    break
                sleep(0.01)
        return self._conclude(f"a rank is more than {self.timeout:g} s late, though all of them are alive")

    def _conclude(self, missing: str) -> str:
        """Tell the others who is missing: the first to find out is right, since it will itself be missed by the next."""
        self._verdict = missing
        self._wake.set()
        return missing

    # ---- what is known of the others

    def _beat(self, rank: int) -> Beat:
        return self._others.get(rank, Beat())

    def _name(
        self, ranks: Collection[int], limit: float, began: float, left: Collection[str] = ("ended",)
    ) -> str | None:
        """Return in words which ranks have ended, or have been silent for ``limit`` seconds; None if all are well."""
        if self._verdict is not None:
            return self._verdict
        if ended := [r for r in ranks if self._beat(r).state in left or self._is_dead(r)]:
            return f"{_names(ended)} of {self.size} ended before the others"
        if self._lost:
            return f"rank 0 of {self.size}, or the torchrun that serves the store, ended before the others"
        now = monotonic()
        if now - max(self._answered, began) > limit:
            return f"the process that serves the store, rank 0 of {self.size} or its torchrun, gives no sign of life"
        here = (r for r in ranks if self._is_here(r))
        if silent := [r for r in here if now - self._changed[r] > limit]:
            gives = "give" if len(silent) > 1 else "gives"
            return f"{_names(silent)} of {self.size} {gives} no sign of life"
        return None

    def _is_here(self, rank: int) -> bool:
        return self._beat(rank).state == "here" and not self._is_dead(rank)

    def _is_dead(self, rank: int) -> bool:
        """Return True if the rank's process, on this machine, has ended without a word."""
        beat = self._beat(rank)
        if beat.machine != self._own.machine or beat.state != "here":
            return False
        try:
            os.kill(beat.process, 0)  # only asks
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False

    @contextmanager
    def _reading(self) -> Iterator[float]:
        """Have the thread read the others' beats, and yield the time at which it began to: what was before is not known."""
        with self._lock:
            began = self._answered = monotonic()
            self._others, self._changed = {}, dict.fromkeys(range(self.size), began)
            self._readers += 1
        self._wake.set()
        try:
            yield began
        finally:
            self._readers -= 1

    # ---- the thread

    def _run(self) -> None:
        """Beat, and read the others' beats while somebody wants to know them."""
        try:
            while not self._end:
                self._wake.wait(self.interval)
                self._wake.clear()
                self._publish()
                if self._readers:
                    self._read()
        except RuntimeError:  # the process that serves the store is gone
            self._lost = True

    def _publish(self) -> None:
        if self._store.check(["verdict"]):
            self._verdict = self._store.get("verdict").decode()
        elif self._verdict is not None:
            self._store.set("verdict", self._verdict)
        self._own.count += 1
        self._store.set(f"beat {self.rank}", json.dumps(asdict(self._own)))

    def _read(self) -> None:
        """Read the beats of all ranks that have begun to beat; to read another's would wait for it."""
        with self._lock:
            began, known = self._answered, set(self._others)
        there = [r for r in range(self.size) if r in known or self._store.check([f"beat {r}"])]
        values = self._store.multi_get([f"beat {r}" for r in there])
        beats = {r: Beat(**json.loads(value)) for r, value in zip(there, values, strict=True)}
        with self._lock:
            now = monotonic()
            if now - began > 2 * BEATS * self.interval:  # this process was stopped itself, and has missed their beats
                self._changed = dict.fromkeys(range(self.size), now)
            for rank, beat in beats.items():
                if rank in self._others and self._others[rank].count != beat.count:
                    self._changed[rank] = now
            self._others |= beats
            self._answered = now


def _machine() -> str:
    """Return a name that two processes share if they can ask the system for one another."""
    space = ""
    with suppress(OSError):  # containers may share a host's name, and not its processes
        space = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {space}"


def _names(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
