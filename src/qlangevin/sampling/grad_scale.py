"""Gradients multiplied by the scale of a `torch.amp.GradScaler`, which keeps small ones from vanishing in float16.

The scaler divides float32 gradients in place before ``step()``, and skips the step if one of them is not finite. It refuses to
divide float16 ones in place, where they would vanish after all; these it leaves to the sampler, as attributes ``grad_scale`` and
``found_inf`` for the time of the step, and they are divided in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

__all__ = ["divide_gradients", "takes_scaled_gradients"]


def takes_scaled_gradients(params: Iterable[Tensor], step_in_backward: bool) -> bool:
    """Return True if a scaler is to leave the gradients as they are; raise RuntimeError if they were stepped on already."""
    if step_in_backward:
        raise RuntimeError(
            "a sampler with step_in_backward=True cannot be stepped by a GradScaler: its parameters have stepped in backward, on "
            "gradients that were still multiplied by the scale. Make the sampler without step_in_backward, or use bfloat16, "
            "which needs no GradScaler"
        )
    return any(p.grad is not None and p.grad.dtype is torch.float16 for p in params)


def divide_gradients(
    gradients: Mapping[Tensor, Tensor], scale: Tensor | None, found_inf: Tensor | None
) -> dict[Tensor, Tensor] | None:
    """Return gradients divided by a scale, in float32; None if the step is to be skipped because one is not finite."""
    if found_inf is not None and bool(found_inf):
        return None
    if scale is None:
        return dict(gradients)
    factor = float(scale.double().reciprocal())
    return {p: g.to(torch.float32) * factor if g.itemsize < 4 else g * factor for p, g in gradients.items()}
