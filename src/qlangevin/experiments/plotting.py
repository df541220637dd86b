"""Pictures on disk: whole or not at all, and refused before the work rather than after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["check_picture", "save"]


def check_picture(path: Path) -> None:
    """Refuse a path that a picture cannot be saved to."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.is_dir():
        raise ValueError(f"--out must be a file, {path} is a directory")
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--out must end in .png, .pdf, .svg or another of {', '.join(sorted(kinds))}, got {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"--out={path} cannot be written: {error.strerror}; choose another place") from error


def save(path: Path, draw: Callable[[Path], None]) -> None:
    """Draw beside ``path``, then move: a file of that name is replaced by a whole one or not at all."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        draw(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
