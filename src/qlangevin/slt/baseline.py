"""Losses of all examples at w*.

The loss of a batch at w is compared with that of the same examples at w*. The difference has none of the noise that comes from
some examples being harder than others, which is most of the noise of an estimate on small batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .data import batch_to, chain_loader, count_data, in_order
from .losses import Loss

__all__ = ["Baseline", "measure_baseline"]


@dataclass(frozen=True)
class Baseline:
    """Losses at w*: of each example, where they are known, and their mean L_n(w*)."""

    mean: float
    each: Tensor | None  # float64

    def of(self, numbers: Tensor) -> float:
        """Return the mean over some examples; where they are not known, over all."""
        return self.mean if self.each is None else float(self.each[numbers].mean())


def measure_baseline(model: nn.Module, loader: DataLoader[Any], loss: Loss, batches: int | None = None) -> Baseline:
    """Measure the losses at w*, of all data or of the first batches of a random order."""
    device = next(model.parameters()).device
    source = in_order(loader) if batches is None else chain_loader(loader, 0, 2**32 - 1).until(batches)
    each = torch.zeros(count_data(loader), dtype=torch.float64)
    total, count, paired = 0.0, 0, batches is None
    with torch.no_grad():
        for numbers, batch in source:
            found = loss(model, batch_to(batch, device)).detach().double().cpu()
            if not bool(found.isfinite().all()):
                raise FloatingPointError(
                    f"the loss at w* is not finite: {int((~found.isfinite()).sum())} of {found.numel()} numbers of a batch"
                )
            total, count = total + float(found.mean()) * len(numbers), count + len(numbers)
            paired = paired and found.dim() > 0 and found.shape[0] == len(numbers)
            if paired:
                each[numbers] = found.flatten(1).mean(1) if found.dim() > 1 else found
    return Baseline(total / count, each if paired else None)
