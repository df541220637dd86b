"""Parts of a report, independent of the language it is written in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from .looks import Image

__all__ = ["Block", "Code", "Document", "Given", "Heading", "Note", "Picture", "Section", "Table", "Text", "printable"]


def printable(text: str) -> str:
    """Replace control characters and lone surrogates."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", "\ufffd", text)


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Note:
    """A paragraph that is set off, such as a warning."""

    text: str


@dataclass(frozen=True)
class Heading:
    """A row of a table that names the rows below it."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of texts, the first of each its name. ``wordy`` cells are sentences; a ``folded`` table opens when clicked."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...] | Heading, ...]
    wordy: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure: the name of its files, a description for those who cannot see it, and a caption."""

    name: str
    image: Image
    alt: str
    caption: str


@dataclass(frozen=True)
class Given:
    """A picture from a file: its bytes and its kind, such as ``png``."""

    content: bytes
    suffix: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Code:
    """Lines as they are typed."""

    lines: tuple[str, ...]


Block: TypeAlias = Text | Note | Table | Picture | Given | Code


@dataclass(frozen=True)
class Section:
    """Blocks under a title."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A title, opening blocks, and sections."""

    title: str
    opening: tuple[Block, ...]
    sections: tuple[Section, ...] = field(default=())

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, in order."""
        return (*self.opening, *(block for section in self.sections for block in section.blocks))
