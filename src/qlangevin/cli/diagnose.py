"""The command ``diagnose``: do the bits of a run suffice, and if not, what would? Fields are options, docstrings the help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..experiments.diagnose import diagnose_run
from ..sampling.diagnosis import TOLERANCE, Diagnosis
from . import display

__all__ = ["Diagnose"]


@dataclass(frozen=True)
class Diagnose:
    """Tell whether the bits of a run suffice: which weights the grid limits, by how much, and what would repair it."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, finished or not."""
    batches: int = 4
    """Training batches whose gradients are measured."""
    chain: int = 0
    """Chain to diagnose, if the run has several."""
    tolerance: float = TOLERANCE
    """Inflation of the effective temperature that passes for none."""
    data_dir: Path | None = None
    """Folder of the data set, or of several."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def execute(self) -> int:
        found = diagnose_run(self.run, self.data_dir, self.batches, self.chain, self.tolerance)
        if self.json:
            display.print_json({"run": str(self.run), **found.to_dict(), "summary": found.summary})
        else:
            _print(found, str(self.run))
        return 0


def _print(found: Diagnosis, title: str) -> None:
    rows, left_out = found.rows()
    more = [f"{left_out} parameters with less inflation are left out; --json has all"] if left_out else []
    display.print_tables(display.diagnosis_table(title, rows))
    now = f"now {found.bytes_per_weight:.2f} bytes a weight, if packed"
    display.print_lines(*more, found.summary, *(f"- {remedy}" for remedy in found.advice), now)
