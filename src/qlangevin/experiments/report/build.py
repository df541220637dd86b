"""The report of saved results: one page that explains itself, the same as Markdown, the figures, and the results.

out/index.html    everything in one file: opens anywhere, on a telephone and on paper too
out/report.md     the same as text, with links to
out/figures/      each figure as SVG and PNG
out/runs.json     the results, a collection that can be reported again
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...storage import files
from .claims import claims
from .document import Block, Document, Given, Picture, Text
from .markdown import markdown
from .page import KINDS, page
from .results import Result, checked, load, unique
from .sections import document

__all__ = ["Lead", "claims", "load", "write"]


@dataclass(frozen=True)
class Lead:
    """A picture that comes first, and explains what all this is about."""

    path: Path
    caption: str
    text: str

    def blocks(self) -> tuple[Block, ...]:
        suffix = self.path.suffix[1:].lower()
        if suffix not in KINDS:
            raise ValueError(f"the lead picture must be one of {', '.join(KINDS)}, got {self.path}")
        if not self.path.is_file():
            raise ValueError(f"there is no lead picture {self.path}")
        return Text(self.text), Given(self.path.read_bytes(), suffix, self.caption, self.caption)


def write(
    results: Sequence[Result], out: Path, title: str = "Low-precision SGLD: results", lead: Lead | None = None
) -> Path:
    """Write the report into a folder and return the page. Nothing is written before everything is made."""
    if not results:
        raise ValueError("there is nothing to report; give at least one result")
    results = unique([checked(result, f"result {i}") for i, result in enumerate(results)])
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"a report is a folder, {out} is a file; choose another place")
    contents = _contents(document(results, title, lead.blocks() if lead else ()), results)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        files.write(out / name, [content])
    return out / "index.html"


def _contents(made: Document, results: Sequence[Result]) -> dict[str, bytes]:
    """The files of a report; the page last, so that what it speaks of is there."""
    contents: dict[str, bytes] = {}
    for block in made.blocks:
        if isinstance(block, Picture):
            contents[f"figures/{block.name}.svg"] = block.image.svg.encode()
            contents[f"figures/{block.name}.png"] = block.image.png
        elif isinstance(block, Given):
            contents[f"figures/lead.{block.suffix}"] = block.content
    lines = (json.dumps(result, separators=(",", ":"), allow_nan=False) for result in results)
    contents["runs.json"] = ('{"runs": [\n' + ",\n".join(lines) + "\n]}\n").encode()  # a line a run, for diffs
    contents["report.md"] = markdown(made).encode()
    contents["index.html"] = page(made).encode()
    return contents
