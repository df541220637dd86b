"""Save pictures atomically, and check their path before the work starts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["check_path", "save_figure"]


def check_path(path: Path) -> None:
    """Raise ValueError if a picture cannot be saved to this path."""
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


def save_figure(path: Path, draw: Callable[[Path], None]) -> None:
    """Draw into a temporary file beside ``path``, then rename it: an existing picture is replaced only by a complete one."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        draw(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
