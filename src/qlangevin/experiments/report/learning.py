"""A page about learning coefficients: a table of the parts, their traces, and what is doubtful."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...storage import files
from .document import Block, Document, Note, Picture, Section, Table, Text
from .looks import render, styled
from .page import write_page

if TYPE_CHECKING:
    from ...slt import LLC

__all__ = ["write_llc_page"]

HEAD = ("part", "weights", "LLC", "R-hat", "ESS", "loss at w*")


def write_llc_page(result: LLC, folder: Path, title: str, remarks: Sequence[str]) -> Path:
    """Write ``index.html`` with all parts of an estimate, and return its path."""
    parts = list(result.parts.values())
    made = Document(title, _opening(parts, remarks), tuple(_section(part, i) for i, part in enumerate(parts)))
    page = folder / "index.html"
    files.write(page, [write_page(made).encode()])
    return page


def _opening(parts: Sequence[LLC], remarks: Sequence[str]) -> tuple[Block, ...]:
    s = parts[0].settings
    text = (
        f"nβ (E[L(w)] - L(w*)) with lr = {s.lr:g}, nβ = {s.nbeta:.6g}, localization {s.localization:g}, {s.sampler} in "
        f"{s.format_name}; {s.chains} chains of {s.draws * s.steps_between} steps after a burn-in of "
        f"{s.burn_in}, seed {s.seed}. Errors are Monte Carlo standard errors."
    )
    rows = tuple(
        (
            p.name, str(p.size), f"{p.mean:.4g} ± {p.stderr:.2g}", f"{p.r_hat:.3f}", f"{p.ess:.0f}", f"{p.init_loss:.4g}"
        )
        for p in parts
    )  # fmt: skip
    return Text(text), Table("Learning coefficients", HEAD, rows), *(Note(remark) for remark in remarks)


@styled
def _section(part: LLC, index: int) -> Section:
    chains = tuple((str(i), f"{value:.4g}") for i, value in enumerate(part.per_chain))
    alone = part if len(part.parts) < 2 else _without_parts(part)
    picture = Picture(
        f"part-{index}", render(alone.plot()), f"traces of the chains of {part.name}", "Traces, and LLC by chain."
    )
    return Section(part.name, (picture, Table("LLC by chain", ("chain", "LLC"), chains, folded=True)))


def _without_parts(part: LLC) -> LLC:
    from dataclasses import replace

    return replace(part, parts={})
