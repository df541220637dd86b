"""Lines of the plain-text table that `qlangevin.gpu.check` prints, as they come."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from .comparing import Comparison
from .timing import Measurement

__all__ = ["comparison_lines", "head_lines", "measurement_head", "measurement_line"]

WIDTH = 100
SHOWN = 5  # differences of one kind


def head_lines(facts: Sequence[tuple[str, str]], remark: str) -> Iterator[str]:
    """Yield versions and devices, a remark if there is one, and the head of the comparisons."""
    yield from (f"{name:14}{value}" for name, value in facts)
    if remark:
        yield from ("", *textwrap.wrap(remark, WIDTH))
    yield ""
    yield f"{'kernels against the PyTorch path, bit for bit':60}{'cases':>8}{'differ':>8}{'left out':>10}"


def comparison_lines(result: Comparison) -> Iterator[str]:
    """Yield the line of a comparison, and below it the first cases that differ."""
    yield f"{result.what:60}{result.cases:8}{len(result.differ):8}{result.left_out or '':>10}"
    yield from (f"    {problem}" for problem in result.differ[:SHOWN])
    if len(result.differ) > SHOWN:
        yield f"    ... and {len(result.differ) - SHOWN} more"


def measurement_head() -> str:
    return f"\n{'medians':60}{'':>18}{'over':>12}"


def measurement_line(m: Measurement) -> str:
    value = f"{m.what:60}{m.value:13.3f} {m.unit:4}"
    return f"{value}{m.ratio:8.2f}x {m.beside}" if m.beside else value
