"""Sources of the samples of a posterior: stores, their folders, or some of their samples."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

from ..storage.sample import Sample, Samples, chain_folders
from ..storage.store import SampleStore

__all__ = ["Source", "list_chains"]

Source: TypeAlias = str | os.PathLike[str] | Samples | Sample | Sequence[Sample]


def list_chains(stores: Source | Iterable[Source]) -> list[list[Sample]]:
    """Return the samples of each chain; raise ValueError if there are none."""
    chains = [_list_samples(source) for source in _list_sources(stores)]
    if not chains:
        raise ValueError("a posterior needs samples, but no store was given")
    return chains


def _list_sources(stores: Source | Iterable[Source]) -> list[Source]:
    """Return the source of each chain; a folder may hold several."""
    if isinstance(stores, (str, os.PathLike)):
        return [*chain_folders(stores)]
    if isinstance(stores, Samples):
        return [stores]
    if isinstance(stores, Sample):
        return [[stores]]
    if not isinstance(stores, Iterable):
        raise TypeError(f"stores must be stores, their folders or lists of samples, got {stores!r}")
    several = list(stores)
    if several and isinstance(several[0], Sample):
        return [cast(Sequence[Sample], several)]
    return [
        chain for one in several for chain in (chain_folders(one) if isinstance(one, (str, os.PathLike)) else [one])
    ]


def _list_samples(source: Source) -> list[Sample]:
    store = SampleStore.open(source) if isinstance(source, (str, os.PathLike)) else cast(Sequence[Sample], source)
    if not len(store):
        raise ValueError(f"a posterior needs samples, but there are none yet in {getattr(store, 'path', store)}")
    return list(store)
