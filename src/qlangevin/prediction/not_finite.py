"""Predictions that are not finite, and who is to blame: samples that have diverged, or the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from .._warnings import warn_once
from ..storage.sample import Sample

__all__ = ["report_not_finite"]


def report_not_finite(
    predictions: Iterable[Tensor], members: Sequence[Sample], inputs: list[Tensor], given: set[str]
) -> None:
    """Raise FloatingPointError if samples are to blame for predictions that are not finite, warn once if the inputs are.

    Args:
        predictions: those of some samples at a time, (sample, example, ...).
        members: the samples.
        inputs: the tensors that the model was given.
        given: the warnings given so far.
    """
    counts, everywhere = list[int](), None
    for some in predictions:
        for bad in ~some.isfinite():
            counts.append(int(bad.sum()))
            everywhere = bad if everywhere is None else everywhere & bad
    common = 0 if everywhere is None else int(everywhere.sum())
    if odd := [s for s, count in enumerate(counts) if count > common]:
        names = ", ".join(f"sample {members[s].index} of {members[s].store.path}" for s in odd[:3])
        raise FloatingPointError(
            f"{len(odd)} of {len(members)} samples predict NaN or infinite numbers where others do not: {names}"
            f"{', ...' if len(odd) > 3 else ''}. If their weights have diverged, leave them out: "
            "Posterior.open(store[:3] + store[4:], model)"
        )
    if all(bool(t.isfinite().all()) for t in inputs if t.is_floating_point()) or everywhere is None:
        raise FloatingPointError(
            "all samples predict NaN or infinite numbers, and the inputs are finite: has the chain diverged, or does the model "
            "overflow?"
        )
    rows = int(everywhere.flatten(1).any(1).sum()) if everywhere.dim() > 1 else common
    warn_once(
        given,
        "inputs",
        f"the inputs hold NaN or infinite numbers, and the predictions for {rows} of {len(everywhere)} examples are not finite",
        stacklevel=5,
    )
