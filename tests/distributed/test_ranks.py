"""Ranks that meet, that miss one another, that disagree, and that die."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

import qlangevin as ql
from qlangevin.distributed import MissingRankError, Ranks, agree, gather, join, launched, replicate
from qlangevin.distributed.ranks import equal_on_all
from tests.helpers import chains
from tests.helpers.process_groups import run_on_ranks, try_on_ranks

ADDRESS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


# ---- meeting


def met(times: int) -> list[Any]:
    """Join several times: a rank must not read what the time before left in the store."""
    found: list[Any] = []
    for i in range(times):
        with join(patience=10) as ranks:
            found.append([ranks.rank, ranks.size, ranks.first, gather([i, ranks.rank], ranks.group)])
        assert not dist.is_initialized()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_meet_as_often_as_they_like(size: int) -> None:
    for rank, found in enumerate(run_on_ranks(met, size, 8, join=False)):
        assert found == [[rank, size, rank == 0, [[i, r] for r in range(size)]] for i in range(8)]


def met_before(folder: str) -> list[Any]:
    """Join inside of a process group that the caller made, without the variables of torchrun."""
    rank = int(os.environ.pop("RANK"))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    with join() as ranks:
        found = [ranks.rank, ranks.size, gather(ranks.rank, ranks.group)]
    assert dist.is_initialized()  # join leaves only groups of its own
    dist.destroy_process_group()
    return found


@pytest.mark.distributed
def test_join_uses_a_process_group_that_exists(tmp_path: Path) -> None:
    assert run_on_ranks(met_before, 2, str(tmp_path), join=False) == [[0, 2, [0, 1]], [1, 2, [0, 1]]]


def split(ranks: Ranks) -> list[Any]:
    halves = ranks.split(2)
    quarters = halves.split(halves.size)
    refused = []
    for parts in (3, 0, ranks.size * 2):
        try:
            ranks.split(parts)
        except ValueError as error:
            refused.append(str(error))
    assert ranks.split(1) is ranks
    halves.wait()
    members = [gather(ranks.rank, each.group) for each in (ranks, halves, quarters)]
    return [halves.rank, halves.size, halves.part, quarters.rank, quarters.part, members, refused]


@pytest.mark.distributed
@pytest.mark.parametrize("size", [4, 6])
def test_groups_of_groups(size: int) -> None:
    half = size // 2
    for rank, found in enumerate(run_on_ranks(split, size)):
        part, rank_in_part = divmod(rank, half)
        mates = list(range(part * half, part * half + half))
        assert found[:5] == [rank_in_part, half, part, 0, rank_in_part]
        assert found[5] == [list(range(size)), mates, [rank]]
        refused = found[6]
        assert "parts must be an integer, at least 1" in refused[-2]
        assert f"{size} ranks cannot be split into {size * 2} groups of equal size" == refused[-1]
        assert len(refused) == (3 if size % 3 else 2)


def test_a_process_that_torchrun_has_not_started_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ADDRESS:
        monkeypatch.delenv(name, raising=False)
    assert not launched()
    with join() as ranks:
        assert ranks == Ranks() == ranks.split(1)
        assert ranks.first
        ranks.wait()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "first"}, "RANK must be a number, got 'first'"),
        ({"RANK": "-1"}, "RANK must be a number, got '-1'"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE must be a number, got '2.0'"),
        ({"RANK": "2"}, "RANK must be less than WORLD_SIZE, got rank 2 of 2"),
        ({"WORLD_SIZE": "0"}, "RANK must be less than WORLD_SIZE, got rank 0 of 0"),
        ({"MASTER_PORT": None}, "MASTER_PORT not set; start the ranks with torchrun"),
        ({"MASTER_PORT": ""}, "MASTER_PORT not set"),
        ({"MASTER_PORT": None, "MASTER_ADDR": None}, "MASTER_ADDR, MASTER_PORT not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a number, got 'http'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be at most 65535, got 65536"),
    ],
)
def test_invalid_variables_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], words: str
) -> None:
    for name, value in (ADDRESS | changes).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert launched()
    with pytest.raises(ValueError, match=re.escape(words)), join(patience=1):
        pass


def waiting(patience: float) -> None:
    with join(patience=patience):
        raise AssertionError("no rank is missing")


@pytest.mark.distributed
@pytest.mark.parametrize(("only", "missing"), [([0, 2], "rank 1 of 3"), ([0], "ranks 1, 2 of 3")])
def test_a_rank_that_does_not_come_is_named(only: list[int], missing: str) -> None:
    for found in try_on_ranks(waiting, 3, 1.5, join=False, only=only, deadline=20):
        assert found.error == "MissingRankError"
        assert found.message == f"{missing} did not come within 1.5 s"


@pytest.mark.distributed
@pytest.mark.slow
def test_the_first_rank_does_not_come() -> None:
    for found in try_on_ranks(waiting, 3, 1.5, join=False, only=[1, 2], deadline=20):
        assert found.error == "MissingRankError"
        assert re.match(r"rank [12] of 3 did not meet the others at 127.0.0.1:\d+ within 1.5 s", found.message)


def late(patience: float) -> list[Any]:
    """Join again after a MissingRankError, until rank 1, which comes late, is there."""
    if os.environ["RANK"] == "1":
        sleep(patience + 0.5)
    for _ in range(10):
        try:
            with join(patience=patience) as ranks:
                return gather(ranks.rank, ranks.group)
        except MissingRankError:
            continue
    return []


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_may_try_again() -> None:
    assert run_on_ranks(late, 2, 1.0, join=False, deadline=20) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("seconds", [-1, "long", float("nan")])
def test_patience_and_timeout_are_numbers(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> None:
    for name, value in ADDRESS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="patience must be"), join(patience=seconds):
        pass
    with pytest.raises(ValueError, match="timeout must be"), join(timeout=seconds):
        pass
    with pytest.raises(ValueError, match=r"timeout must be at least 0.5 seconds, got 0"), join(timeout=0):
        pass


# ---- agreement


def compared(ranks: Ranks) -> list[Any]:
    """Compare numbers of every size and texts of every length."""
    ends = [-(2**63), 2**63 - 1, 0, -1]
    alike = equal_on_all(torch.tensor([*ends, ranks.rank, -(2**63) + ranks.rank, 7]), ranks.group).tolist()
    texts = gather({"name": "é" * (1 + 1000 * ranks.rank), "none": None}, ranks.group)
    agree({"a": 1, "b": [1, 2]}, ranks.group)
    agree({"b": [1, 2], "a": 1} if ranks.rank else {"a": 1, "b": [1, 2]}, ranks.group)  # their order is no difference
    messages = []
    for facts in ({"a": 1, "b": {"c": ranks.rank // 2}}, {str(i): ranks.rank for i in range(9)}):
        try:
            agree(facts, ranks.group)
        except ValueError as error:
            messages.append(str(error))
    return [alike, [len(each["name"]) for each in texts], messages]


@pytest.mark.distributed
def test_ranks_that_disagree_name_the_setting_the_values_and_the_ranks() -> None:
    found = run_on_ranks(compared, 3)
    assert found[0] == found[1] == found[2]
    alike, lengths, messages = found[0]
    assert alike == [True, True, True, True, False, False, True]
    assert lengths == [1, 1001, 2001]
    assert messages[0] == "ranks disagree: b.c is 0 on rank 0 and 1 on rank 2"
    assert messages[1].startswith(
        "ranks disagree: 0 is 0 on rank 0 and 1 on rank 1; 1 is 0 on rank 0 and 1 on rank 1; "
    )
    assert messages[1].endswith("; and 4 more")


# ---- dying


def dying(ranks: Ranks, wire: str | None, how: str) -> None:
    model = chains.network()
    sampler = ql.SGLD(model.named_parameters(), 0.05, 50, weights="bfp8")
    replicas = replicate(model, sampler, wire=wire, every=2)
    batches = chains.loader(ranks.rank, ranks.size)
    chains.train(replicas, sampler, batches, 5)
    if ranks.rank == 1:
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the disk is full")
    chains.train(replicas, sampler, batches, 50)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("wire", "how", "end"),
    [
        (None, "exit", "ended with 7"),
        (None, "kill", "ended with -9"),
        (None, "raise", "the disk is full"),
        ("fp32", "kill", "ended with -9"),
        ("bfp8/64", "exit", "ended with 7"),
        ("bfp8/64", "raise", "the disk is full"),
    ],
)
def test_a_rank_that_dies_is_missed_by_all_others(wire: str | None, how: str, end: str) -> None:
    found = try_on_ranks(dying, 4, wire, how, deadline=20)
    assert end in found[1].message
    for rank in (0, 2, 3):
        assert found[rank].error == "MissingRankError", found[rank]
        assert re.match("rank 1 of 4 ended before the others, (while|when|during)", found[rank].message), found[rank]


def too_late(parts: int, folder: str) -> None:
    """Ranks 0 and 2 come after the others have given up."""
    with join(patience=1, timeout=1) as ranks:
        group, gone = ranks.split(parts), Path(folder) / str(ranks.rank | 1)
        while ranks.rank in (0, 2) and not gone.exists():
            sleep(0.01)
        try:
            group.wait()
        finally:
            gone.touch()


@pytest.mark.distributed
@pytest.mark.parametrize("parts", [1, 2])
def test_a_rank_that_is_too_late_is_missed(tmp_path: Path, parts: int) -> None:
    """Also in a group made by `split`, which has the timeout of all ranks."""
    for found in try_on_ranks(too_late, 4, parts, str(tmp_path), join=False, deadline=20):
        assert found.error == "MissingRankError", found
        late = "a rank is more than 1 s late, though all of them are alive"
        left = r"ranks? [0-3](, [0-3])* of 4 ended before the others"  # found by one that came when all had given up
        assert re.match(f"({late}|{left}), while the ranks waited for one another", found.message), found


def failing(ranks: Ranks, message: str) -> None:
    raise RuntimeError(message)


@pytest.mark.distributed
def test_errors_that_are_not_of_lost_connections_are_not_translated() -> None:
    message = "DataLoader timed out after 5 seconds"
    for found in try_on_ranks(failing, 2, message):
        assert (found.error, found.message) == ("RuntimeError", message)


def forever(ranks: Ranks) -> None:
    if ranks.rank == 0:
        signal.pause()
    ranks.wait()


@pytest.mark.distributed
def test_ranks_have_a_deadline() -> None:
    found = try_on_ranks(forever, 2, deadline=1)
    assert [outcome.message for outcome in found] == ["was not done in time and killed"] * 2
    assert run_on_ranks(met, 1, 1, join=False)  # the server still answers
