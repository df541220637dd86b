"""A document as Markdown, with its figures as files beside it."""

from __future__ import annotations

import re

from .document import Block, Code, Document, Given, Heading, Note, Picture, Table, Text, printable

__all__ = ["markdown"]


def markdown(document: Document, folder: str = "figures") -> str:
    """The whole text; pictures are links into the folder."""
    parts = [f"# {plain(document.title)}", *(_block(block, folder) for block in document.opening)]
    for section in document.sections:
        parts += [f"## {plain(section.title)}", *(_block(block, folder) for block in section.blocks)]
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """A text in one line, of which nothing is markup."""
    return re.sub(r"([\\`*_\[\]<>|#~&$!])", r"\\\1", " ".join(printable(text).split()))


def _block(block: Block, folder: str) -> str:
    if isinstance(block, Text):
        return plain(block.text)
    if isinstance(block, Note):
        return f"> {plain(block.text)}"
    if isinstance(block, Code):
        return "\n".join(f"    {' '.join(printable(line).split())}" for line in block.lines)
    if isinstance(block, Picture):
        return f"![{plain(block.alt)}]({folder}/{block.name}.svg)\n\n{plain(block.caption)}"
    if isinstance(block, Given):
        return f"![{plain(block.alt)}]({folder}/lead.{block.suffix})\n\n{plain(block.caption)}"
    return _table(block)


def _table(table: Table) -> str:
    rows = [(f"**{plain(row.text)}**",) if isinstance(row, Heading) else tuple(map(plain, row)) for row in table.rows]
    width = len(table.head)
    lines = [tuple(map(plain, table.head)), ("---",) * width, *((*row, *("",) * (width - len(row))) for row in rows)]
    return "\n".join([f"**{plain(table.title)}**", "", *(f"| {' | '.join(line)} |" for line in lines)])
