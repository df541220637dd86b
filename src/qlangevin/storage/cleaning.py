"""Cleaning the folder of a store: refuse what may not be there, and remove what a killed writer left behind."""

from __future__ import annotations

import re

from .files import DamagedError
from .folders import Folder
from .leftovers import is_temporary, remove_leftovers
from .locking import NAME as LOCK
from .sample import FOLDER, FROZEN, MANIFEST

__all__ = ["CHECKPOINT", "clean", "holds_samples", "refuse_links"]

CHECKPOINT = "checkpoint.safetensors"
SAMPLE = re.compile(r"(\d{6,})\.safetensors")


def refuse_links(folder: Folder) -> None:
    """Raise DamagedError if a name that a store uses is that of a link, a pipe or a folder, before anything is removed."""
    ours = (MANIFEST, FROZEN, CHECKPOINT, LOCK)
    _require_files(folder, [name for name in folder.names() if name in ours or is_temporary(name)])
    if folder.status(FOLDER) is not None:
        with folder.enter(FOLDER) as samples:
            _require_files(samples, [name for name in samples.names() if SAMPLE.fullmatch(name) or is_temporary(name)])


def _require_files(folder: Folder, names: list[str]) -> None:
    for name in names:
        about = folder.status(name)
        if about is not None:
            folder.require_file(name, about, f"{name} in {folder.path}")


def holds_samples(folder: Folder) -> bool:
    """Return True if there are files of samples."""
    if folder.status(FOLDER) is None:
        return False
    with folder.enter(FOLDER) as samples:
        return any(name.endswith(".safetensors") for name in samples.names())


def clean(folder: Folder, count: int) -> None:
    """Remove temporary files of writers that are gone, and files of samples after the first ``count``."""
    refuse_links(folder)
    remove_leftovers(folder)
    try:
        samples = folder.enter(FOLDER)
    except DamagedError:
        if folder.status(FOLDER) is not None:
            raise
        return  # removed by somebody: reading a sample says so
    with samples:
        remove_leftovers(samples)
        for name in samples.names():
            match = SAMPLE.fullmatch(name)
            if match and int(match[1]) >= count:
                samples.unlink(name)
