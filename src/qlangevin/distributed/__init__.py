"""Beyond one process, on `torch.distributed`: replicas that stay the same to the byte, chains that differ.

`ranks` says who is there, `replicas` steps one chain on several ranks, `wire` adds up their gradients in 8 bits, `sharding`
spreads packed weights over ranks, `costs` says on paper what all this takes. Chains differ by the ``stream`` of their sampler,
and need nothing else.
"""

from __future__ import annotations

from .gathering import gathered
from .ranks import MissingRankError, Ranks, agree, gather, join, launched
from .replicas import ReplicasDifferError, Watch, checksum, replicate
from .shards import shard
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
