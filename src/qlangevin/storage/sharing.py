"""One file of frozen parameters for all chains of a run: ``chain-1/frozen.safetensors`` is a hard link to that of ``chain-0``.

No file of a store is ever changed in place, so that each chain can be moved, copied or removed as if the file were its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from . import files
from .errors import DamagedError
from .files import Bytes, Digest
from .folders import Folder
from .leftovers import temporary_name
from .sample import FROZEN, MANIFEST, Samples, chain_folders

__all__ = ["write_frozen"]

CHAIN = re.compile(r"chain-\d+")


def write_frozen(folder: Folder, path: Path, chunks: Sequence[Bytes], check: Callable[[], object]) -> Digest:
    """Write the file of frozen parameters of a store; link it if a chain beside this one has the same file."""
    beside = [p for p in chain_folders(path.parent) if p.name != path.name] if CHAIN.fullmatch(path.name) else []
    if not any((other / MANIFEST).exists() for other in beside):
        return files.write_hashed(folder, FROZEN, chunks, check)
    digest = Digest(sum(map(len, chunks)), files.sha256(*chunks))
    for other in beside:
        with suppress(OSError, DamagedError, NotImplementedError):  # a file system without links has a file for each
            if _link(folder, other, digest, check):
                return digest
    files.write_in(folder, FROZEN, chunks, check)
    return digest


def _link(folder: Folder, other: Path, digest: Digest, check: Callable[[], object]) -> bool:
    """Link the frozen parameters of another store, if these are what it has and they are not damaged."""
    temporary, what = temporary_name(FROZEN), f"{FROZEN} of {other}"
    with Folder.open(other) as there:
        record = Samples._read_manifest(there).frozen
        if record is None or record.digest != digest:
            return False
        folder.unlink(temporary)
        folder.link(there, FROZEN, temporary)
    try:
        with files.open_file(folder.path / temporary, what, folder) as file, files.map_file(file, what) as mapped:
            if file.size != digest.size or files.sha256(mapped) != digest.sha256:
                return False
        check()
        folder.replace(temporary, FROZEN)
        folder.sync()
        return True
    finally:
        folder.unlink(temporary)
