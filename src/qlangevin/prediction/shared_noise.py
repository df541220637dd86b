"""A warning of chains that drew the same noise: they are not independent, and R-hat cannot see it.

Noise is a function of seed, stream, step and parameter. A chain that goes on in a second store has the steps after those of
the first, and is no second chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from .._warnings import warn
from ..storage.sample import Sample

__all__ = ["warn_of_shared_noise"]


class Noise(NamedTuple):
    """Where the noise of a chain comes from, and the first and the last step that a sample is of."""

    keys: tuple[Any, ...]  # (seed, stream) of each parameter group with noise
    first: int
    last: int
    path: str


def warn_of_shared_noise(chains: Sequence[Sequence[Sample]], stacklevel: int) -> None:
    """Warn of the first two chains whose samples are of the same steps with the same seed and stream."""
    known = [noise for chain in chains if (noise := _read_noise(chain)) is not None]
    for a, b in combinations(known, 2):
        if a.keys == b.keys and a.path != b.path and a.first <= b.last and b.first <= a.last:
            warn(
                f"{a.path} and {b.path} have the same seed and stream, so that their noise is the same and R-hat may be too "
                "good; give each chain its own stream, such as SGLD(..., stream=1)",
                stacklevel + 1,
            )
            return


def _read_noise(chain: Sequence[Sample]) -> Noise | None:
    """Return the noise of a chain; None if it had none, or its manifest does not tell."""
    sampler = chain[0].store.settings.get("sampler")
    steps = [sample.step for sample in chain if sample.step]  # at step 0 there was no noise yet
    groups = sampler.get("groups") if isinstance(sampler, dict) else None
    if not steps or not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return None
    keys = tuple((g["seed"], g.get("stream", 0)) for g in groups if "seed" in g and g.get("temperature"))
    return Noise(keys, min(steps), max(steps), str(chain[0].store.path)) if keys else None
