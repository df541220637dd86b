"""Write a document as Markdown, with its figures as files beside it."""

from __future__ import annotations

import re

from .document import Block, Code, Document, Given, Heading, Note, Picture, Table, Text, printable

__all__ = ["write_markdown"]


def write_markdown(document: Document, folder: str = "figures") -> str:
    """Return the document as Markdown; pictures are links into the folder."""
    parts = [f"# {escape(document.title)}", *(_block(block, folder) for block in document.opening)]
    for section in document.sections:
        parts += [f"## {escape(section.title)}", *(_block(block, folder) for block in section.blocks)]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Return a text as one line, with all markup escaped."""
    return re.sub(r"([\\`*_\[\]<>|#~&$!])", r"\\\1", " ".join(printable(text).split()))


def _block(block: Block, folder: str) -> str:
    if isinstance(block, Text):
        return escape(block.text)
    if isinstance(block, Note):
        return f"> {escape(block.text)}"
    if isinstance(block, Code):
        return "\n".join(f"    {' '.join(printable(line).split())}" for line in block.lines)
    if isinstance(block, Picture):
        return f"![{escape(block.alt)}]({folder}/{block.name}.svg)\n\n{escape(block.caption)}"
    if isinstance(block, Given):
        return f"![{escape(block.alt)}]({folder}/lead.{block.suffix})\n\n{escape(block.caption)}"
    return _table(block)


def _table(table: Table) -> str:
    rows = [(f"**{escape(row.text)}**",) if isinstance(row, Heading) else tuple(map(escape, row)) for row in table.rows]
    width = len(table.head)
    lines = [tuple(map(escape, table.head)), ("---",) * width, *((*row, *("",) * (width - len(row))) for row in rows)]
    return "\n".join([f"**{escape(table.title)}**", "", *(f"| {' | '.join(line)} |" for line in lines)])
