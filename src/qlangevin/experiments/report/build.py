"""Write the report of saved results: one self-contained page, the same as Markdown, the figures, and the results.

out/index.html    everything in one file, for screens of any size and for print
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
from ..results import Result, check_result, drop_repeated
from .document import Block, Document, Given, Picture, Text
from .markdown import write_markdown
from .page import KINDS, write_page
from .sections import build_document

__all__ = ["Lead", "write_report"]


@dataclass(frozen=True)
class Lead:
    """Picture at the top of the report, and the text that introduces it."""

    path: Path
    caption: str
    text: str

    def blocks(self) -> tuple[Block, ...]:
        """Return text and picture as blocks of the report."""
        suffix = self.path.suffix[1:].lower()
        if suffix not in KINDS:
            raise ValueError(f"the lead picture must be one of {', '.join(KINDS)}, got {self.path}")
        if not self.path.is_file():
            raise ValueError(f"there is no lead picture {self.path}")
        return Text(self.text), Given(self.path.read_bytes(), suffix, self.caption, self.caption)


def write_report(
    results: Sequence[Result], out: Path, title: str = "Low-precision SGLD: results", lead: Lead | None = None
) -> Path:
    """Write the report into a folder and return the path of its page. Nothing is written before all of it is made."""
    if not results:
        raise ValueError("there is nothing to report; give at least one result")
    results = drop_repeated([check_result(result, f"result {i}") for i, result in enumerate(results)])
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"a report is a folder, {out} is a file; choose another place")
    contents = _file_contents(build_document(results, title, lead.blocks() if lead else ()), results)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        files.write(out / name, [content])
    return out / "index.html"


def _file_contents(made: Document, results: Sequence[Result]) -> dict[str, bytes]:
    """Return the files of a report by name; the page last, so that the files it refers to exist before it."""
    contents: dict[str, bytes] = {}
    for block in made.blocks:
        if isinstance(block, Picture):
            contents[f"figures/{block.name}.svg"] = block.image.svg.encode()
            if block.image.png is not None:
                contents[f"figures/{block.name}.png"] = block.image.png
        elif isinstance(block, Given):
            contents[f"figures/lead.{block.suffix}"] = block.content
    lines = (json.dumps(result, separators=(",", ":"), allow_nan=False) for result in results)
    contents["runs.json"] = ('{"runs": [\n' + ",\n".join(lines) + "\n]}\n").encode()  # a line for each run, for diffs
    contents["report.md"] = write_markdown(made).encode()
    contents["index.html"] = write_page(made).encode()
    return contents
