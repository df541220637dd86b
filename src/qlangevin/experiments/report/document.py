"""What a report consists of, whatever it is written in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from .looks import Image

__all__ = ["Block", "Code", "Document", "Given", "Heading", "Note", "Picture", "Section", "Table", "Text", "printable"]


def printable(text: str) -> str:
    """Without characters that control something or are none."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", "\ufffd", text)


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Note:
    """A paragraph that must not be overlooked."""

    text: str


@dataclass(frozen=True)
class Heading:
    """A row of a table that names those below it."""

    text: str


@dataclass(frozen=True)
class Table:
    """Rows of texts; the first of each names it. ``wordy`` cells are sentences, not numbers; a ``folded`` table opens."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...] | Heading, ...]
    wordy: bool = False
    folded: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure: the name of its files, what it shows for those who cannot see it, and what to look at."""

    name: str
    image: Image
    alt: str
    caption: str


@dataclass(frozen=True)
class Given:
    """A picture that came from outside, as its bytes and its kind, such as ``png``."""

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
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    title: str
    opening: tuple[Block, ...]
    sections: tuple[Section, ...] = field(default=())

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All of them, in order."""
        return (*self.opening, *(block for section in self.sections for block in section.blocks))
