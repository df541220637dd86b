"""The command ``demo``. Fields are options, docstrings the help, as in `commands`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .._progress import OFTEN, progress_bar
from ..experiments import demo
from ..experiments.demo import summary
from . import display

__all__ = ["Demo"]


@dataclass(frozen=True)
class Demo(demo.DemoSettings):
    __doc__ = demo.DemoSettings.__doc__

    json: bool = False
    """Print one JSON object instead of the tables, and no progress."""

    def execute(self) -> int:
        with progress_bar(1.0, "starting", shown=not self.json, lines=OFTEN) as advance:
            made = demo.run_demo(self, advance)
        if self.json:
            display.print_json(_as_json(made))
            return 0
        title = "Digits: bytes a weight in training, samples stored, CPU time"
        rows = summary.band_rows("features", made.features) + summary.band_rows("network", made.network)
        display.print_tables(
            display.text_table(
                title,
                summary.DIGITS_HEAD,
                summary.digits_rows(made.digits),
            ),
            display.text_table("Regression: 95 % bands", summary.BAND_HEAD, rows),
        )
        display.print_lines(*summary.sentences(made.gaussian, made.features, made.digits), f"page: {made.page}")
        return 0


def _as_json(made: demo.DemoResult) -> dict[str, Any]:
    """Return all figures of the tables."""
    figures = ("width", "width_error", "coverage")
    bands = {
        name: {b.method.name: {f: getattr(b, f) for f in figures} for b in found}
        for name, found in (("features", made.features), ("network", made.network))
    }
    digits = {
        s.name: {
            "scores": s.scores, "standard_errors": s.errors, "by_angle": s.by_angle,
            "r_hat": s.run.convergence[0], "ess": s.run.convergence[1],
            "bytes_per_weight": s.run.training_bytes, "stored_bytes": s.run.stored_bytes, "seconds": s.run.seconds,
        }
        for s in made.digits
    }  # fmt: skip
    rows = [dataclasses.asdict(row) for row in made.gaussian.rows]
    return {"gaussian": rows, "regression": bands, "digits": digits, "page": str(made.page)}
