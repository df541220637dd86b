"""Grids of formats as the kernels take them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ..quantization.formats import Format, KernelGrid
from ..quantization.laws import SLACK

__all__ = ["grid_numbers", "grid_of", "is_aligned", "is_tiny"]


@lru_cache(maxsize=4096)
def grid_of(format: Format, shape: torch.Size) -> KernelGrid:
    """Return the grid of a format for tensors of one shape."""
    return format.kernel_grid(shape)


def grid_numbers(grid: KernelGrid) -> tuple[Any, ...]:
    """Return a grid as the kernels take it."""
    fits = [SLACK / (grid.top - less) if grid.top > less else 0.0 for less in (0.0, 0.5, 1.5)]
    return (grid.shift, grid.min_gap, grid.max_gap, grid.top, grid.low, grid.high, *fits)


def is_tiny(grid: KernelGrid) -> bool:
    """Return True if some gaps, or their inverses, are no normal numbers."""
    return grid.min_gap < -100 or grid.max_gap > 100


def is_aligned(grid: KernelGrid) -> bool:
    """Return True if all blocks begin at multiples of 64 elements."""
    return grid.line % 64 == 0 and (grid.size % 64 == 0 or grid.size == grid.line)
