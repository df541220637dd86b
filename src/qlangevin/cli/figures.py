"""The commands that draw a figure about a Gaussian: ``run gaussian`` (Figure 1) and ``bound`` (Theorems 1 to 3).

Their fields are the options and their docstrings the help, as in `commands`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from .._progress import SELDOM, progress_bar
from ..distributed.ranks import TIMEOUT, join
from ..experiments import bound, gaussian
from ..experiments.plotting import check_path, save_figure
from . import display

__all__ = ["Bound", "Gaussian"]


@dataclass(frozen=True)
class Gaussian(gaussian.GaussianSettings):
    __doc__ = gaussian.GaussianSettings.__doc__

    out: Path = Path("results/gaussian.png")
    """File of the picture; its suffix decides the kind (png, pdf, svg)."""
    json: bool = False
    """Print one JSON object instead of the table, and no progress."""

    timeout: float = TIMEOUT
    """Of several ranks: seconds until one that gives no sign of life is missed."""

    def execute(self) -> int:
        check_path(self.out)
        with join(timeout=self.timeout) as ranks:
            share = self.total_steps / ranks.size  # each rank does about as many
            with progress_bar(share, shown=not self.json and ranks.first, lines=SELDOM) as advance:
                result = gaussian.run_gaussian(self, advance, ranks)
        if not ranks.first:
            return 0
        try:
            save_figure(self.out, lambda path: gaussian.draw(result, path))
        finally:  # print the numbers even if the picture cannot be saved
            rows = (dataclasses.asdict(row) | {"z": row.z} for row in result.rows)
            if self.json:
                display.print_json(display.as_json("gaussian", self, rows))
            else:
                display.print_tables(display.gaussian_table(result))
                display.print_lines(*display.gaussian_remarks(self, result), f"picture: {self.out}")
        return 0


@dataclass(frozen=True)
class Bound(bound.BoundSettings):
    __doc__ = bound.BoundSettings.__doc__

    out: Path = Path("results/bound.png")
    """File of the picture; its suffix decides the kind (png, pdf, svg)."""
    json: bool = False
    """Print one JSON object instead of the tables, and no progress."""

    def execute(self) -> int:
        check_path(self.out)
        with progress_bar(self.total_steps, shown=not self.json, lines=SELDOM) as advance:
            result = bound.run_bound(self, advance)
        try:
            save_figure(self.out, lambda path: bound.draw(result, path))
        finally:
            if self.json:
                display.print_json(display.as_json("bound", self, map(dataclasses.asdict, result.rows)))
            else:
                display.print_tables(display.bound_table(result), display.terms_table(self))
                display.print_lines(*display.bound_remarks(self, result), f"picture: {self.out}")
        return 0
