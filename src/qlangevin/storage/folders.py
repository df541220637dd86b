"""Folders as open descriptors: what is inside is reached through them, and never through a symbolic link.

A path is looked up anew at each use, so that somebody can put another folder, or a link to one, in its place between a check and
a deletion. A descriptor stays with the folder that was opened. Only the path that a user gives may lead through links. On
systems without descriptors of folders (Windows) paths are used, and checked for links before each use.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import DamagedError, retry

__all__ = ["Folder", "close_quietly", "exists", "is_folder", "look_up", "make_folder"]

HAVE_DESCRIPTORS = (
    {os.open, os.mkdir, os.unlink, os.rename, os.stat} <= os.supports_dir_fd
    and os.scandir in os.supports_fd
    and hasattr(os, "O_NOFOLLOW")
)
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
# Without waiting: opening a pipe in the place of a file would block until somebody opens its other end.
SAFELY = NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
AS_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)


class Folder:
    """An open folder. Errors name ``path``, the path under which it was opened."""

    def __init__(self, path: Path, descriptor: int | None, owned: bool = True) -> None:
        self.path, self.descriptor, self._owned = path, descriptor, owned

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Open a folder by a path that the user gives, which may lead through symbolic links."""
        if HAVE_DESCRIPTORS:
            return cls(path, os.open(path, AS_FOLDER))
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return cls(path, None)

    def enter(self, name: str) -> Folder:
        """Open a folder in this one; raise DamagedError if it is missing, a link or no folder."""
        about = self.status(name)
        if about is None:
            raise DamagedError(f"{self.path} is damaged: its folder {name} is missing")
        if not stat.S_ISDIR(about.st_mode):
            kind = self.describe_kind(name, about).replace("is not an ordinary file", "is not a folder")
            raise DamagedError(f"{self.path} is damaged: {kind}; put a folder there, or remove it")
        descriptor = None
        if HAVE_DESCRIPTORS:
            try:
                descriptor = os.open(name, AS_FOLDER | NOFOLLOW, dir_fd=self.descriptor)
            except OSError as error:
                raise self._locate(error, name) from None
        return Folder(self.path / name, descriptor)

    def borrow(self) -> Folder:
        """Return the same folder, to be closed without closing this one."""
        return Folder(self.path, self.descriptor, owned=False)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor. Nothing was written through it, so that an error means nothing."""
        if self._owned and self.descriptor is not None:
            descriptor, self.descriptor = self.descriptor, -1
            self._owned = False
            close_quietly(descriptor)

    # ---- looking

    def identity(self) -> tuple[int, int]:
        """Return what tells the open folder from every other: device and inode."""
        about = retry(os.stat, self.path) if self.descriptor is None else retry(os.fstat, self.descriptor)
        return about.st_dev, about.st_ino

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of an entry, of a link itself; None if there is none."""
        try:
            return retry(os.stat, self._at(name), dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._locate(error, name) from None

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        try:
            with retry(os.scandir, self.path if self.descriptor is None else self.descriptor) as entries:
                return sorted(entry.name for entry in entries)
        except OSError as error:
            raise self._locate(error, "") from None

    def describe_kind(self, name: str, about: os.stat_result) -> str:
        """Return a clause that says what an entry is."""
        if stat.S_ISLNK(about.st_mode):
            return f"{self.path / name} is a symbolic link, and those are not followed inside a store"
        return f"{self.path / name} is not an ordinary file"

    def require_file(self, name: str, about: os.stat_result, what: str) -> None:
        """Raise DamagedError unless an entry is an ordinary file."""
        if not stat.S_ISREG(about.st_mode):
            kind = self.describe_kind(name, about)
            raise DamagedError(f"{what} is damaged: {kind}; put an ordinary file there, or remove it")

    # ---- files

    def open_file(self, name: str, what: str, flags: int = os.O_RDONLY) -> int:
        """Open an ordinary file and return its descriptor; raise DamagedError if it is a link or something else.

        With O_CREAT, it is made if it is missing; otherwise a missing one is a DamagedError too.
        """
        about = self.status(name)  # before it is opened: opening a device can do something
        if about is not None:
            self.require_file(name, about, what)
        elif not flags & os.O_CREAT:
            raise DamagedError(f"{what} is missing: there is no {self.path / name}")
        try:
            descriptor = os.open(self._at(name), flags | SAFELY, 0o666, dir_fd=self.descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link since it was looked at
                raise DamagedError(
                    f"{what} is damaged: {self.path / name} is a symbolic link, and those are not followed inside a store"
                ) from None
            raise self._locate(error, name) from None
        try:
            self.require_file(name, retry(os.fstat, descriptor), what)
        except BaseException:
            close_quietly(descriptor)
            raise
        return descriptor

    def unlink(self, name: str) -> None:
        """Remove a file, or a link and not what it points to; do nothing if it is missing."""
        try:
            retry(os.unlink, self._at(name), dir_fd=self.descriptor)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._locate(error, name) from None

    def replace(self, old: str, new: str) -> None:
        """Rename a file, in the place of another if there is one."""
        try:
            retry(os.replace, self._at(old), self._at(new), src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError as error:
            raise self._locate(error, new) from None

    def link(self, there: Folder, old: str, new: str) -> None:
        """Give a file of another folder a name in this one, too: a hard link."""
        try:
            retry(
                os.link, there._at(old), self._at(new),
                src_dir_fd=there.descriptor, dst_dir_fd=self.descriptor, follow_symlinks=False,
            )  # fmt: skip
        except OSError as error:
            raise self._locate(error, new) from None

    def make(self, name: str) -> None:
        """Make a folder in this one, if it is missing."""
        try:
            retry(os.mkdir, self._at(name), dir_fd=self.descriptor)
        except FileExistsError:
            pass
        except OSError as error:
            raise self._locate(error, name) from None

    def sync(self) -> None:
        """Have the entries of the folder written to the disk, on systems where a folder can be opened."""
        if self.descriptor is not None:
            try:
                os.fsync(self.descriptor)
            except OSError as error:
                raise self._locate(error, "") from None

    def _at(self, name: str) -> str:
        return name if self.descriptor is not None else str(self.path / name)

    def _locate(self, error: OSError, name: str) -> OSError:
        """Return an error of the system with the whole path of the entry, not its name only."""
        return OSError(error.errno, error.strerror, str(self.path / name))


def look_up(path: Path, follow_links: bool = True) -> os.stat_result | None:
    """Return the status of a path; None if there is nothing. Raise other errors, which pathlib may take for nothing."""
    try:
        return retry(os.stat, path, follow_symlinks=follow_links)
    except (FileNotFoundError, NotADirectoryError):
        return None


def exists(path: Path) -> bool:
    """Return True if there is anything of that path, be it a link that leads nowhere."""
    return look_up(path, follow_links=False) is not None


def is_folder(path: Path) -> bool:
    """Return True for a folder, or a link to one."""
    about = look_up(path)
    return about is not None and stat.S_ISDIR(about.st_mode)


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing; have its name, and theirs, written to the disk."""
    missing, last = [path], path.parent
    while look_up(last) is None:
        missing.append(last)
        last = last.parent
    for each in reversed(missing):
        with suppress(FileExistsError):
            retry(os.mkdir, each)
        try:
            above = Folder.open(each.parent)
        except PermissionError:  # it can be entered, but not read
            continue
        with above:
            above.sync()


def close_quietly(descriptor: int) -> None:
    """Close a descriptor through which nothing was written: an error means nothing, and it is closed in any case."""
    with suppress(OSError):
        os.close(descriptor)
