"""Find the files of a data set: in a given folder, or in the cache, to which they are downloaded from their official source."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..._progress import progress_bar
from ...storage.folders import Folder
from ...storage.leftovers import remove_leftovers, temporary_name

__all__ = ["LAYOUTS", "File", "Layout", "cache_folder", "find_files"]

PIECE = 1 << 18  # bytes read at once: small enough for the bar to move and Ctrl-C to be handled
TIMEOUT = 60  # seconds without an answer


@dataclass(frozen=True)
class File:
    """A file to download, and the names under which it, or its unpacked content, may be present."""

    names: tuple[str, ...]
    url: str = ""
    size: int = 0
    sha256: str = ""

    def within(self, folder: Path) -> Path | None:
        """Return the path of the file in a folder; None if it is missing."""
        return next((path for name in self.names if (path := folder / name).exists()), None)

    def __str__(self) -> str:
        return " or ".join(self.names)


@dataclass(frozen=True)
class Layout:
    """Files of a data set, and the subfolders of the data folder in which they may be."""

    title: str
    folders: tuple[str, ...]
    files: tuple[File, ...]
    origin: str  # what the user has to get, and from where

    @property
    def wanted(self) -> str:
        """Names of all files, for messages."""
        return ", ".join(map(str, self.files))


def idx_files(base: str, *known: tuple[str, int, str]) -> tuple[File, ...]:
    """Return the files of MNIST and of data sets of the same form."""
    return tuple(File((f"{name}.gz", name), f"{base}/{name}.gz", size, digest) for name, size, digest in known)


def archive_file(url: str, size: int, sha256: str, *unpacked: str) -> tuple[File, ...]:
    """Return one archive, which may be present unpacked."""
    return (File((*unpacked, url.rpartition("/")[2]), url, size, sha256),)


# Sizes and SHA-256 as published with TensorFlow Datasets.
LAYOUTS = {
    "mnist": Layout(
        "MNIST",
        ("mnist", "MNIST/raw", "MNIST"),
        idx_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            ("train-images-idx3-ubyte", 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            ("train-labels-idx1-ubyte", 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            ("t10k-images-idx3-ubyte", 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            ("t10k-labels-idx1-ubyte", 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
        "the four idx files from https://ossci-datasets.s3.amazonaws.com/mnist",
    ),
    "fashion-mnist": Layout(
        "Fashion-MNIST",
        ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
        idx_files(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            ("train-images-idx3-ubyte", 26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            ("train-labels-idx1-ubyte", 29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            ("t10k-images-idx3-ubyte", 4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            ("t10k-labels-idx1-ubyte", 5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
        "the four idx files from https://github.com/zalandoresearch/fashion-mnist",
    ),
    "cifar10": Layout(
        "CIFAR-10",
        ("cifar10", "cifar-10"),
        archive_file(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            170052171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            *("cifar-10-batches-bin/test_batch.bin", "test_batch.bin"),
        ),
        "the binary version from https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "cifar100": Layout(
        "CIFAR-100",
        ("cifar100", "cifar-100"),
        archive_file(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            168513733,
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            *("cifar-100-binary/test.bin", "test.bin"),
        ),
        "the binary version from https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "imdb": Layout(
        "IMDB",
        ("imdb", "IMDB"),
        archive_file(
            "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
            84125825,
            "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
            *("aclImdb/train", "train"),
        ),
        "the Large Movie Review Dataset from https://ai.stanford.edu/~amaas/data/sentiment",
    ),
    "imagenet": Layout(
        "ImageNet",
        ("imagenet", "ImageNet", "ILSVRC/Data/CLS-LOC"),
        (File(("train",)),),
        "ILSVRC 2012 from https://image-net.org, which takes an account, as files train/<class>/*.JPEG and val/<class>/*.JPEG",
    ),
}


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/qlangevin, or ~/.cache/qlangevin."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "qlangevin"


def find_files(name: str, data_dir: Path | str | None = None, progress: bool = True) -> list[Path]:
    """Return the files of a data set: in ``data_dir``, else in $QLANGEVIN_DATA, else in the cache, downloaded if need be."""
    layout, given = LAYOUTS[name], data_dir or os.environ.get("QLANGEVIN_DATA")
    root = Path(given).expanduser() if given else cache_folder()
    if given and not root.is_dir():
        raise ValueError(f"the data folder {root} does not exist; give one that does, or none")
    candidates = [root / name for name in (*layout.folders, ".")]
    folder = next((each for each in candidates if any(file.within(each) for file in layout.files)), None)
    if folder is None:
        if given or not all(file.url for file in layout.files):
            raise ValueError(
                f"there is no {layout.title} in {root}: it was to be {layout.wanted}, there or in a folder "
                f"{layout.folders[0]}; get {layout.origin}"
            )
        folder = root / name
    missing = [file for file in layout.files if not file.within(folder)]
    if missing and given:
        raise ValueError(f"{folder} lacks {', '.join(map(str, missing))} of {layout.title}; get {layout.origin}")
    return [file.within(folder) or download(file, folder, progress) for file in layout.files]


def download(file: File, folder: Path, progress: bool = True) -> Path:
    """Download a file and check its SHA-256; it appears under its name only when it is complete."""
    target = folder / file.url.rpartition("/")[2]
    temporary = target.with_name(temporary_name(target.name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with Folder.open(folder) as opened:
            remove_leftovers(opened, target.name)
        size, digest = _copy(file, temporary, progress)
        if (size, digest) != (file.size, file.sha256):
            raise ValueError(
                f"{file.url} gave another file than the known one: {size} bytes with SHA-256 {digest}, expected were "
                f"{file.size} with {file.sha256}; try again, or put the right file into {folder}"
            )
        os.replace(temporary, target)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(
            f"{file.url} could not be downloaded ({reason}); try again, or put the file into {folder} by other means"
        ) from error
    finally:
        with suppress(OSError):  # it was renamed if all went well
            temporary.unlink()
    return target


def _copy(file: File, path: Path, progress: bool) -> tuple[int, str]:
    """Copy the file from its URL and return (bytes, SHA-256); stop when there are more bytes than there should be."""
    size, digest, label = 0, hashlib.sha256(), f"downloading {file.url.rpartition('/')[2]}"
    with (
        urllib.request.urlopen(file.url, timeout=TIMEOUT) as answer,
        open(path, "xb") as out,
        progress_bar(file.size, label, progress) as advance,
    ):
        while size <= file.size and (piece := answer.read(PIECE)):
            out.write(piece)
            digest.update(piece)
            size += len(piece)
            advance(label, len(piece))
    return size, digest.hexdigest()
