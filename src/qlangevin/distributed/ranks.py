"""Which of how many processes this is, and whether all of them were told the same.

A rank is a process of a job that `torchrun`, or whatever sets the same variables, has started. What is said here between
ranks is small and goes over the CPU. A rank that is missing is an error within seconds, on all the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .._validate import check_integer, check_number, describe_differences

__all__ = ["ALONE", "MissingRankError", "Ranks", "agree", "gather", "join", "launched", "lost", "same"]

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GONE = ("Connection closed", "Connection reset", "Broken pipe", "imed out", "imeout", "remote worker")  # gloo's words
PATIENCE = 30.0  # seconds for all ranks to come: they have to import PyTorch
# Where this process met the others, and how often: who joins again must not read what was left there the last time.
_stores: dict[tuple[str, ...], tuple[Any, int]] = {}


class MissingRankError(ConnectionError):
    """A rank did not come, or is gone."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that work together: ``rank`` of ``size``, in a group of theirs.

    Alone, there is no group. ``part`` is which of several such groups it is, ``timeout`` how many seconds one may be late.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    part: int = 0
    timeout: float = 1800.0

    def patient(self, timeout: float = 7 * 86400.0) -> Ranks:
        """The same ranks, which wait long for those with more to do. All of them must call this, and about at the same time."""
        if self.group is None:
            return self
        members, late = dist.get_process_group_ranks(self.group), timedelta(seconds=timeout)
        group = dist.new_group(members, late, backend="gloo", use_local_synchronization=True)
        return Ranks(self.rank, self.size, group, self.part, timeout)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and speaks for all."""
        return self.rank == 0

    def split(self, parts: int) -> Ranks:
        """Groups of equal size, as many as there are parts, of neighbouring ranks. All of these ranks must call this."""
        if self.size % check_integer("parts", parts, 1):
            raise ValueError(f"{self.size} ranks cannot be split into {parts} groups of equal size")
        if parts == 1 or self.group is None:
            return self
        size = self.size // parts
        members = dist.get_process_group_ranks(self.group)
        part = self.rank // size
        mine = members[part * size : (part + 1) * size]
        late = timedelta(seconds=self.timeout)
        group = dist.new_group(mine, late, use_local_synchronization=True)  # ranks outside of it know nothing of it
        return Ranks(self.rank % size, size, group, part, self.timeout)

    def wait(self) -> None:
        """Until all of them are here; if one is gone, that is an error at once."""
        if self.group is not None:
            with lost("while the ranks waited for one another"):
                dist.barrier(self.group)


ALONE = Ranks()


def launched() -> bool:
    """Whether `torchrun`, or something like it, has started this process."""
    return all(os.environ.get(name) for name in VARIABLES[:2])


@contextmanager
def join(backend: str | None = None, *, patience: float = PATIENCE, timeout: float = 1800.0) -> Iterator[Ranks]:
    """Work with the other ranks of this job; alone if there is none. At the end the process group is left.

    A process group that is there already is taken as it is, and stays.

    Args:
        backend: as for `torch.distributed.init_process_group`; by default gloo for CPU and, where there are GPUs, NCCL too.
        patience: seconds until all ranks must have come.
        timeout: seconds a rank may be late for the others later on, when it writes a sample, say. That a process is gone is
            noticed at once.
    """
    patience = check_number("patience", patience)
    timeout = max(patience, check_number("timeout", timeout))
    own = not dist.is_initialized()
    if own and not launched():
        yield ALONE
        return
    rank, size = _place() if own else (dist.get_rank(), dist.get_world_size())
    if own:
        _meet(backend, rank, size, patience, timeout)
    everybody = Ranks(rank, size, dist.group.WORLD, timeout=timeout)
    try:
        with lost("while the ranks worked together"):
            yield everybody
        everybody.wait()  # who leaves first would take the others' connections away
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()


def _place() -> tuple[int, int]:
    """RANK and WORLD_SIZE, checked with what else a rank is told."""
    if missing := [name for name in VARIABLES if not os.environ.get(name)]:
        raise ValueError(f"{', '.join(missing)} not set; start the ranks with torchrun, which sets it")
    values = {name: os.environ[name] for name in VARIABLES if name != "MASTER_ADDR"}
    for name, value in values.items():
        if not value.isdecimal():
            raise ValueError(f"the variable {name} must be a number, got {value!r}")
    check_integer("the variable MASTER_PORT", int(values["MASTER_PORT"]), 0, 65535)
    rank, size = int(values["RANK"]), int(values["WORLD_SIZE"])
    if rank >= size:
        raise ValueError(f"RANK must be less than WORLD_SIZE, got rank {rank} of {size}")
    return rank, size


def _meet(backend: str | None, rank: int, size: int, patience: float, timeout: float) -> None:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    told = tuple(os.environ[name] for name in VARIABLES)
    try:
        if told not in _stores:
            _stores[told] = _store(rank, size, patience), 0
        store, times = _stores[told]
        here = PrefixStore(f"qlangevin/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{times}", store)
        here.set(f"rank {rank}", "here")
        _await(here, size, patience)
        dist.init_process_group(backend, store=here, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        _stores[told] = store, times + 1
    except MissingRankError:
        raise
    except (RuntimeError, ValueError) as error:  # torch's own, DistStoreError and DistNetworkError, are RuntimeErrors
        first = " ".join(str(error).split("\n")[0].split())
        raise MissingRankError(
            f"rank {rank} of {size} did not meet the others at {where} within {patience:g} s: are all of them started, "
            f"each with its own RANK? ({first})"
        ) from None


def _store(rank: int, size: int, patience: float) -> Any:
    """Where ranks meet. Rank 0 has it, unless torchrun does. Torch's own would not say who is missing."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    has = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    wait = timedelta(seconds=patience)
    return TCPStore(host, port, size, has, wait, wait_for_workers=False, multi_tenant=True)


def _await(store: Any, size: int, patience: float) -> None:
    """Know who is missing."""
    missing, end = list(range(size)), monotonic() + patience
    while True:
        try:
            missing = [rank for rank in missing if not store.check([f"rank {rank}"])]
        except RuntimeError:  # whoever has the store gave up
            end = 0.0
        if not missing:
            return
        if monotonic() >= end:
            break
        sleep(0.02)
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    raise MissingRankError(f"{names} of {size} did not come within {patience:g} s")


@contextmanager
def lost(when: str) -> Iterator[None]:
    """What torch says when a rank is gone, in a sentence."""
    try:
        yield
    except RuntimeError as error:
        gloo = "gloo" in str(error) and any(word in str(error) for word in GONE)  # it says in which of its files
        if not gloo and not isinstance(error, dist.DistError):
            raise
        raise MissingRankError(f"another rank is gone, or too late, {when}; what was stored before is safe") from error


def _tensor(values: Any, dtype: torch.dtype, group: Any) -> Tensor:
    """A tensor where the group can take it: on the CPU unless it has GPUs only."""
    device = "cpu" if "cpu:" in str(dist.get_backend_config(group)) else "cuda"
    return torch.as_tensor(values, dtype=dtype).to(device)


def same(values: Tensor, group: Any) -> Tensor:
    """Which of these int64 numbers are the same on all ranks: one small exchange."""
    both = _tensor(torch.stack((values, ~values)), torch.int64, group)  # ~v = -v - 1, which every number has
    with lost("when the ranks were compared"):
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return (both[0] == ~both[1]).cpu()


def gather(found: Any, group: Any) -> list[Any]:
    """What each rank found, anything JSON can hold; on all ranks, in their order."""
    mine = json.dumps(found).encode()
    with lost("when the ranks told one another what they have"):
        longest = _tensor([len(mine)], torch.int64, group)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        padded = _tensor(list(mine.ljust(int(longest))), torch.uint8, group)
        texts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
        dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(text.tolist())) for text in texts]


def agree(facts: Mapping[str, Any], group: Any) -> None:
    """Refuse, on all ranks alike, to go on if they were told different things: which, and on which ranks."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    values = torch.tensor([int.from_bytes(digest[i : i + 7], "little") for i in (0, 7, 14, 21)])
    if bool(same(values, group).all()):
        return
    told = gather(facts, group)
    rank = next(rank for rank, other in enumerate(told) if other != told[0])
    odd = describe_differences(told[0], told[rank])
    more = f"; and {len(odd) - 5} more" if len(odd) > 5 else ""
    raise ValueError(
        f"the ranks were told different things (there: rank 0, here: rank {rank}): {'; '.join(odd[:5])}{more}"
    )
