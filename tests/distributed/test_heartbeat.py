"""Ranks that are frozen, late or dead: who is named by the others, and when."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from time import sleep
from typing import Any

import pytest

import qlangevin as ql
from qlangevin.distributed import MissingRankError, Ranks, gather, join, replicate
from qlangevin.distributed.heartbeat import current_heartbeat
from tests.helpers import chains
from tests.helpers.process_groups import run_on_ranks, try_on_ranks


def do_steps(ranks: Ranks, wire: str | None, victim: int) -> None:
    """Train replicas; one stops in the middle."""
    model = chains.network()
    sampler = ql.SGLD(model.named_parameters(), 0.05, 50, weights="bfp8")
    replicas = replicate(model, sampler, wire=wire, every=2)
    batches = chains.loader(ranks.rank, ranks.size)
    chains.train(replicas, sampler, batches, 5)
    if ranks.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    chains.train(replicas, sampler, batches, 50)


def wait_for_all(ranks: Ranks, patient: bool, victim: int) -> None:
    if ranks.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    ranks.wait(patient=patient)


def freeze(what: str, victim: int, argument: Any, timeout: float) -> str:
    """Return the error of a rank when another is stopped, and then end that one."""
    processes: list[int] = []
    try:
        with join(patience=20, timeout=timeout) as ranks:
            processes += gather(os.getpid(), ranks.group)
            if what == "step":
                do_steps(ranks, argument, victim)
            else:
                wait_for_all(ranks, argument, victim)
    except MissingRankError as error:
        with suppress(ProcessLookupError):
            os.kill(processes[victim], signal.SIGKILL)
        return str(error)
    return "no error"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("what", "argument", "when"),
    [
        ("step", None, "while the ranks worked together"),
        ("step", "bfp8/64", "while gradients were added up"),
        ("wait", False, "while the ranks waited for one another"),
        ("wait", True, "while the ranks waited for one another"),
    ],
)
def test_a_frozen_rank_is_named_and_ends_all_others_within_the_timeout(what: str, argument: Any, when: str) -> None:
    found = try_on_ranks(freeze, 3, what, 1, argument, 2.0, join=False, deadline=30)
    assert found[1].message == "ended with -9"  # it was still there when the others ended
    frozen = f"rank 1 of 3 gives no sign of life, {when}; what was stored before is safe"
    for rank, other in ((0, 2), (2, 0)):
        # The first of the two that notices kills the frozen rank and ends: the second may see either of them gone instead.
        gone = [f"rank {r} of 3 ended before the others, {when}; what was stored before is safe" for r in (1, other)]
        assert found[rank].value in (frozen, *gone), found[rank]
    assert frozen in (found[0].value, found[2].value)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("what", ["step", "wait"])
def test_the_rank_that_serves_the_store_is_frozen(what: str) -> None:
    found = try_on_ranks(freeze, 2, what, 0, None if what == "step" else True, 2.0, join=False, deadline=30)
    assert found[1].value.startswith(
        "the process that serves the store, rank 0 of 2 or its torchrun, gives no sign of life"
    )


def tardy() -> list[Any]:
    """Rank 0 is later than ``timeout`` allows, but gives signs of life."""
    with join(patience=20, timeout=1) as ranks:
        for _ in range(2):
            if ranks.first:
                sleep(1.5)
            ranks.wait(patient=True)
        pair = ranks.split(2)
        pair.wait(patient=True)
        return gather([ranks.rank, pair.rank], ranks.group)


@pytest.mark.distributed
@pytest.mark.slow
def test_patient_ranks_wait_for_one_that_has_more_to_do() -> None:
    assert run_on_ranks(tardy, 4, join=False) == [[[0, 0], [1, 1], [2, 0], [3, 1]]] * 4
    Ranks().wait(patient=True)


def die_while_others_wait(ranks: Ranks, how: str) -> None:
    if ranks.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the disk is full")
    ranks.wait(patient=True)


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_patient_ranks_miss_a_dead_one_long_before_the_timeout(how: str) -> None:
    found = try_on_ranks(die_while_others_wait, 3, how, deadline=20)  # the timeout is 300 s
    for rank in (0, 2):
        assert found[rank].error == "MissingRankError", found[rank]
        # 0 and 2 may find each other gone, if one is as quick as that.
        assert found[rank].message.endswith("ended before the others, while the ranks waited for one another; what was "
                                            "stored before is safe")  # fmt: skip


def beats(ranks: Ranks) -> list[bool]:
    heartbeat = current_heartbeat()
    return [heartbeat is not None, heartbeat is not None and heartbeat._thread.is_alive()]


def join_and_leave() -> list[Any]:
    with join(patience=20) as ranks:
        inside = beats(ranks)
    return [inside, current_heartbeat() is None]


@pytest.mark.distributed
def test_a_heart_beats_inside_of_join_only() -> None:
    assert run_on_ranks(join_and_leave, 2, join=False) == [[[True, True], True]] * 2
    assert run_on_ranks(join_and_leave, 1, join=False) == [[[False, False], True]]
