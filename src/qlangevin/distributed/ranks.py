"""Ranks: the processes of a job, how they meet, form groups and compare their settings.

A rank is a process that `torchrun`, or another launcher that sets the same variables, has started. The messages sent here are
small and go over the CPU. A rank that does not come or that ends is an error on all others within seconds, one that is frozen
within a timeout (`heartbeat`); none outlives its torchrun (`orphans`).
"""

from __future__ import annotations

import hashlib
import itertools
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
from .heartbeat import Heartbeat, State, current_heartbeat
from .orphans import end_with_torchrun

__all__ = [
    "ALONE",
    "MissingRankError",
    "Ranks",
    "agree",
    "equal_on_all",
    "gather",
    "join",
    "launched",
    "report_missing_rank",
]

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Parts of the messages with which gloo reports a lost connection.
LOST_CONNECTION = ("Connection closed", "Connection reset", "Broken pipe", "imed out", "imeout", "remote worker")
PATIENCE = 30.0  # seconds for all ranks to come: they have to import PyTorch
# Seconds that a rank may be late for a step's collectives, or give no sign of life: enough for the first rank to write a
# checkpoint to a slow disk, or for one to compile a model. `Ranks.wait(patient=True)` is for what takes longer.
TIMEOUT = 300.0
LEAST_TIMEOUT = 0.5
_times = itertools.count()
# Address -> (store, times this process has joined there). Each time has keys of its own, so that no rank reads those of the last.
_stores: dict[tuple[str, ...], tuple[Any, int]] = {}


class MissingRankError(ConnectionError):
    """A rank did not come, or has ended."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that work together: ``rank`` of ``size``, in the process group ``group``; alone, it is None.

    ``part`` is the index of the group among those that `split` made, ``timeout`` the seconds a rank may be late.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    part: int = 0
    timeout: float = TIMEOUT

    @property
    def first(self) -> bool:
        """True on the rank that writes files and reports for all."""
        return self.rank == 0

    def split(self, parts: int) -> Ranks:
        """Return this rank's group after a division into equal parts of neighbouring ranks. All ranks must call this."""
        if self.size % check_integer("parts", parts, 1):
            raise ValueError(f"{self.size} ranks cannot be split into {parts} groups of equal size")
        if parts == 1 or self.group is None:
            return self
        size = self.size // parts
        members = dist.get_process_group_ranks(self.group)
        part = self.rank // size
        mine = members[part * size : (part + 1) * size]
        limit = timedelta(seconds=self.timeout)
        group = dist.new_group(mine, limit, use_local_synchronization=True)  # without the ranks of other parts
        return Ranks(self.rank % size, size, group, part, self.timeout)

    def wait(self, *, patient: bool = False) -> None:
        """Block until all ranks have called this; raise MissingRankError at once if one has ended.

        A rank may be late by the timeout; with ``patient``, by as long as it gives signs of life.
        """
        if self.group is None:
            return
        when, heartbeat = "while the ranks waited for one another", current_heartbeat() if patient else None
        if heartbeat is not None and (missing := heartbeat.meet(dist.get_process_group_ranks(self.group))):
            raise MissingRankError(f"{missing}, {when}; what was stored before is safe")
        with report_missing_rank(when):
            dist.barrier(self.group)


ALONE = Ranks()


def launched() -> bool:
    """Return True if `torchrun`, or a launcher like it, has started this process."""
    return all(os.environ.get(name) for name in VARIABLES[:2])


@contextmanager
def join(backend: str | None = None, *, patience: float = PATIENCE, timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Join the process group of this job and leave it at the end; outside of a job, yield a rank that is alone.

    A process group that the caller has initialized is used as it is, with its own timeout, and is not left. A process that
    torchrun has started is killed when torchrun ends, from here on.

    Args:
        backend: as for `torch.distributed.init_process_group`; by default gloo for CPU and, where there are GPUs, NCCL too.
        patience: seconds until all ranks must have come.
        timeout: seconds a rank may be late afterwards, while it writes a sample, for example, and seconds until one that is
            frozen is missed. A process that has ended is noticed at once.
    """
    patience, timeout = check_number("patience", patience), check_number("timeout", timeout)
    if timeout < LEAST_TIMEOUT:
        raise ValueError(f"timeout must be at least {LEAST_TIMEOUT:g} seconds, got {timeout:g}")
    own = not dist.is_initialized()
    if own and not launched():
        yield ALONE
        return
    rank, size = _read_variables() if own else (dist.get_rank(), dist.get_world_size())
    if own:
        end_with_torchrun()
        _meet(backend, rank, size, patience, timeout)
    ranks = Ranks(rank, size, dist.group.WORLD, timeout=timeout)
    heartbeat = _start_heartbeat(ranks, "" if own else next(_times))
    state: State = "ended"
    try:
        with report_missing_rank("while the ranks worked together"):
            yield ranks
        ranks.wait()  # a rank that leaves closes the connections of the others
    except MissingRankError:
        state = "misses others"
        raise
    finally:
        if heartbeat is not None:
            heartbeat.announce(state)
        if own and dist.is_initialized():
            dist.destroy_process_group()
        if heartbeat is not None:
            heartbeat.stop()


def _start_heartbeat(ranks: Ranks, time: int | str) -> Heartbeat | None:
    """Give signs of life, if there are other ranks and a store on the network to give them in.

    ``time`` distinguishes the times that ranks join an existing group, so that none reads the beats of the last.
    """
    store = dist.distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if ranks.size == 1 or not isinstance(inner, TCPStore):
        return None
    keys = PrefixStore(f"qlangevin heartbeat {time}", store)
    return Heartbeat(keys, ranks.rank, ranks.size, ranks.timeout, _serves_store(ranks.rank))


def _read_variables() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE; raise ValueError if a variable of the launcher is missing or invalid."""
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
    """Initialize the process group once all ranks have come."""
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    address = tuple(os.environ[name] for name in VARIABLES)
    try:
        if address not in _stores:
            _stores[address] = _connect_store(rank, size, patience), 0
        store, times = _stores[address]
        keys = PrefixStore(f"qlangevin/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{times}", store)
        keys.set(f"rank {rank}", "here")
        _await_ranks(keys, size, patience)
        dist.init_process_group(backend, store=keys, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        _stores[address] = store, times + 1
    except MissingRankError:
        raise
    except (RuntimeError, ValueError) as error:  # torch's own, DistStoreError and DistNetworkError, are RuntimeErrors
        first = " ".join(str(error).split("\n")[0].split())
        raise MissingRankError(
            f"rank {rank} of {size} did not meet the others at {where} within {patience:g} s: are all of them started, "
            f"each with its own RANK? ({first})"
        ) from None


def _connect_store(rank: int, size: int, patience: float) -> Any:
    """Connect to the store where ranks meet, which rank 0 serves unless torchrun does.

    `init_process_group` would make one by itself, but could not name the ranks that are missing.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=patience)
    return TCPStore(host, port, size, _serves_store(rank), limit, wait_for_workers=False, multi_tenant=True)


def _serves_store(rank: int) -> bool:
    """Return True if this rank serves the store where ranks meet, and not torchrun."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _await_ranks(store: Any, size: int, patience: float) -> None:
    """Wait until all ranks have set their key; raise MissingRankError with the names of those that have not."""
    missing, end = list(range(size)), monotonic() + patience
    while True:
        try:
            missing = [rank for rank in missing if not store.check([f"rank {rank}"])]
        except RuntimeError:  # the rank that serves the store has given up
            end = 0.0
        if not missing:
            return
        if monotonic() >= end:
            break
        sleep(0.02)
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    raise MissingRankError(f"{names} of {size} did not come within {patience:g} s")


@contextmanager
def report_missing_rank(when: str) -> Iterator[None]:
    """Raise MissingRankError in place of torch's errors about lost connections."""
    try:
        yield
    except RuntimeError as error:
        # A message of gloo's names one of gloo's source files.
        gloo = "gloo" in str(error) and any(words in str(error) for words in LOST_CONNECTION)
        if not gloo and not isinstance(error, dist.DistError):
            raise
        heartbeat = current_heartbeat()
        who = "another rank is gone, or too late" if heartbeat is None else heartbeat.name_missing()
        raise MissingRankError(f"{who}, {when}; what was stored before is safe") from error


def _tensor(values: Any, dtype: torch.dtype, group: Any) -> Tensor:
    """Return a tensor on a device that the group can send from: the CPU unless it has GPUs only."""
    device = "cpu" if "cpu:" in str(dist.get_backend_config(group)) else "cuda"
    return torch.as_tensor(values, dtype=dtype).to(device)


def equal_on_all(values: Tensor, group: Any) -> Tensor:
    """Return, for each of these int64 numbers, whether it is equal on all ranks: max v = min v, by one small all-reduce."""
    both = _tensor(torch.stack((values, ~values)), torch.int64, group)  # min v = ~max ~v; -v would overflow for -2^63
    with report_missing_rank("when the ranks were compared"):
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return (both[0] == ~both[1]).cpu()


def gather(value: Any, group: Any) -> list[Any]:
    """Return the values of all ranks, in their order, on all of them; a value is of the types JSON has."""
    mine = json.dumps(value).encode()
    with report_missing_rank("when the ranks exchanged values"):
        longest = _tensor([len(mine)], torch.int64, group)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
        padded = _tensor(list(mine.ljust(int(longest))), torch.uint8, group)
        texts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
        dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(text.tolist())) for text in texts]


def agree(settings: Mapping[str, Any], group: Any) -> None:
    """Raise ValueError on all ranks if these settings are not equal on all of them: name each with its values and ranks."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).digest()
    values = torch.tensor([int.from_bytes(digest[i : i + 7], "little") for i in (0, 7, 14, 21)])
    if bool(equal_on_all(values, group).all()):
        return
    first, *others = gather(settings, group)
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    differences = describe_differences(first, other, sides=("on rank 0", f"on rank {rank}"))
    more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
    raise ValueError(f"ranks disagree: {'; '.join(differences[:5])}{more}")
