"""The result of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..gaussian import GaussianResult
from .bands import Band
from .scores import Scored

__all__ = ["DemoResult"]


@dataclass(frozen=True, eq=False)
class DemoResult:
    """Results of all parts, and the page."""

    gaussian: GaussianResult
    features: tuple[Band, ...]
    network: tuple[Band, ...]
    digits: tuple[Scored, ...]
    page: Path
