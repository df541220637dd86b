"""Identity of an estimate, so that draws of other data, masks or weights are not taken for its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ..quantization.qtensor import QTensor
from ..storage import files
from ..storage.tensor_file import view_memory
from .losses import Observable
from .selection import Part
from .settings import Settings

__all__ = ["SAME_LOSS", "describe_estimate"]

SAME_LOSS = 1e-3  # relative: the mean loss at w* may differ by that much between machines, and not between data


def describe_estimate(
    settings: Settings, parts: Sequence[Part], named: Mapping[str, Tensor], loader: DataLoader[Any],
    observables: Mapping[str, Observable], *, keep_weights: bool, init_batches: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Return settings, and checksums of weights, masks and observed data, in JSON's types."""
    masks = {part.name: checksum(m for m in part.masks.values() if m is not None) for part in parts}
    return {
        "settings": settings.to_json(),
        "parts": {part.name: [*part.masks] for part in parts},
        "masks": masks,
        "weights": checksum(named.values()),
        "batch_size": loader.batch_size,
        "init_batches": init_batches,
        "observables": {name: checksum(_tensors(o.batches)) for name, o in observables.items()},
        "keep_weights": keep_weights,
    }


def checksum(tensors: Any) -> str:
    """Return a checksum of tensors, packed ones by their codes."""
    plain = [t.detach() for t in tensors]
    codes = [t for p in plain for t in ((p.codes, p.exponents) if isinstance(p, QTensor) else (p,)) if t is not None]
    return files.sha256(*(view_memory(t.cpu().contiguous()) for t in codes))


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of batches, however deep."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for each in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(each)
