"""Chains on several processes, on top of `torch.distributed`.

`ranks` lets processes meet and compare settings, `replicas` steps one chain on several ranks with equal bytes on all, `wire`
averages their gradients in 8 bits, `shards` spreads packed weights over ranks. Chains that differ need nothing of this, only
another ``stream`` for each sampler.
"""

from __future__ import annotations

from .ranks import MissingRankError, Ranks, agree, gather, join, launched
from .replicas import ReplicasDifferError, Watch, checksum, replicate
from .shards import gathered, shard
from .wire import Wire

__all__ = [
    "MissingRankError",
    "Ranks",
    "ReplicasDifferError",
    "Watch",
    "Wire",
    "agree",
    "checksum",
    "gather",
    "gathered",
    "join",
    "launched",
    "replicate",
    "shard",
]
