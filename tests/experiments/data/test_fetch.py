"""The folders searched for files, and downloads from a local server."""

import gzip
import hashlib
import socket
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from qlangevin.experiments.data import fetch, load_dataset
from qlangevin.experiments.data.fetch import LAYOUTS, File, Layout, cache_folder
from qlangevin.storage.leftovers import host_id
from tests.helpers.official import mnist

NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *arguments: Any) -> None:
        """Print no lost connection: some tests hang up in the middle of a download."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(*arguments)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no other folder named."""
    monkeypatch.delenv("QLANGEVIN_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/qlangevin"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a small MNIST, and that of a server where it is expected."""
    folder = tmp_path / "served"
    mnist(folder)
    with QuietServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        expect(monkeypatch, folder, f"http://127.0.0.1:{server.server_port}")
        yield folder
        server.shutdown()


def expect(monkeypatch: pytest.MonkeyPatch, folder: Path, base: str) -> None:
    contents = {name: (folder / name).read_bytes() for name in NAMES}
    files = tuple(
        File((name, name[:-3]), f"{base}/{name}", len(data), hashlib.sha256(data).hexdigest())
        for name, data in contents.items()
    )
    monkeypatch.setitem(LAYOUTS, "mnist", Layout("MNIST", ("mnist",), files, "the official files"))


# ---- folders


def test_a_given_folder_goes_before_the_variable_and_the_variable_before_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mnist(cache / "mnist", train=10)
    assert len(load_dataset("mnist").train) == 10
    mnist(tmp_path / "variable/mnist", train=11)
    monkeypatch.setenv("QLANGEVIN_DATA", str(tmp_path / "variable"))
    assert len(load_dataset("mnist").train) == 11
    mnist(tmp_path / "given", train=12)
    assert len(load_dataset("mnist", tmp_path / "given").train) == 12
    monkeypatch.setenv("QLANGEVIN_DATA", "")
    assert len(load_dataset("mnist").train) == 10


def test_a_folder_of_its_own_goes_before_the_folder_itself(tmp_path: Path) -> None:
    mnist(tmp_path, train=10)
    mnist(tmp_path / "fashion-mnist", train=11)
    assert len(load_dataset("mnist", tmp_path).train) == 10
    assert len(load_dataset("fashion-mnist", tmp_path).train) == 11


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/qlangevin")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/qlangevin")


def test_what_is_missing_in_a_given_folder_is_named_and_not_downloaded(
    tmp_path: Path, served: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    with pytest.raises(ValueError, match=f"the data folder {empty} does not exist; give one that does, or none$"):
        load_dataset("mnist", empty)
    empty.mkdir()
    expected = "train-images-idx3-ubyte.gz or train-images-idx3-ubyte, .* in a folder mnist; get the official files$"
    with pytest.raises(ValueError, match=f"there is no MNIST in {empty}: it was to be {expected}"):
        load_dataset("mnist", empty)
    monkeypatch.setenv("QLANGEVIN_DATA", str(empty))
    with pytest.raises(ValueError, match=f"there is no MNIST in {empty}"):
        load_dataset("mnist")
    mnist(empty)
    (empty / NAMES[3]).unlink()
    with pytest.raises(
        ValueError, match=f"{empty} lacks t10k-labels-idx1-ubyte.gz or t10k-labels-idx1-ubyte of MNIST; get"
    ):
        load_dataset("mnist")
    assert not cache.exists()


def test_imagenet_is_not_downloaded(cache: Path) -> None:
    with pytest.raises(
        ValueError, match=f"no ImageNet in {cache}: .*//image-net.org, which takes an account, as files train"
    ):
        load_dataset("imagenet")
    assert not cache.exists()


# ---- downloads


def test_what_is_missing_is_downloaded_once(served: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_dataset("mnist")
    assert (len(found.train), len(found.test)) == (12, 5)
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(NAMES)
    for path in served.iterdir():
        path.unlink()
    assert len(load_dataset("mnist").train) == 12
    expect(monkeypatch, cache / "mnist", "http://127.0.0.1:1")
    (cache / "mnist" / NAMES[0][:-3]).write_bytes(gzip.decompress((cache / "mnist" / NAMES[0]).read_bytes()))
    (cache / "mnist" / NAMES[0]).unlink()
    assert len(load_dataset("mnist").train) == 12  # unpacked by somebody


def test_a_download_that_was_interrupted_is_completed(served: Path, cache: Path) -> None:
    load_dataset("mnist")
    before = (cache / "mnist" / NAMES[0]).stat()
    (cache / "mnist" / NAMES[2]).unlink()
    killed, elsewhere = (  # both of a process that is not there, one of them on another host that shares the folder
        cache / "mnist" / f".{NAMES[2]}.{host}-999999999-1-1.tmp" for host in (host_id(), "01234567")
    )
    for left in (killed, elsewhere):
        left.write_bytes(b"half")
    load_dataset("mnist")
    assert (cache / "mnist" / NAMES[2]).exists()
    assert not killed.exists()
    assert elsewhere.exists()
    assert (cache / "mnist" / NAMES[0]).stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("change", ["longer", "shorter", "other"])
def test_another_file_than_the_known_one_is_refused(served: Path, cache: Path, change: str) -> None:
    path = served / NAMES[1]
    data = path.read_bytes()
    wrong = {"longer": data + b"more", "shorter": data[:-1], "other": data[:-1] + b"\xff"}[change]
    path.write_bytes(wrong)
    digest = hashlib.sha256(wrong).hexdigest()
    message = (
        f"/{NAMES[1]} gave another file than the known one: {len(wrong)} bytes with SHA-256 {digest}, expected were "
    )
    with pytest.raises(
        ValueError, match=message + f"{len(data)} with .*; try again, or put the right file into {cache}"
    ):
        load_dataset("mnist")
    assert [path.name for path in (cache / "mnist").iterdir()] == [NAMES[0]]


def test_an_endless_answer_is_not_waited_for(served: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PIECE", 100)
    path = served / NAMES[1]
    path.write_bytes(path.read_bytes() + bytes(10**6))
    with pytest.raises(ValueError, match=r"gave another file than the known one: [1-9]00 bytes"):
        load_dataset("mnist")


def test_a_file_that_is_not_there_any_more(served: Path, cache: Path) -> None:
    (served / NAMES[0]).unlink()
    message = (
        rf"/{NAMES[0]} could not be downloaded \(.*not found\); try again, or put the file into {cache}/mnist by other"
    )
    with pytest.raises(ValueError, match=f"(?i){message}"):
        load_dataset("mnist")
    assert list((cache / "mnist").iterdir()) == []


def test_no_network(cache: Path, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        expect(monkeypatch, served, f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ValueError, match=r"could not be downloaded \(.*refused\); try again, or put the file into"):
            load_dataset("mnist")


def test_a_server_that_says_nothing(cache: Path, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        expect(monkeypatch, served, f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ValueError, match=r"could not be downloaded \(timed out\)"):
            load_dataset("mnist")
    assert list((cache / "mnist").iterdir()) == []


def test_a_cache_that_cannot_be_written(served: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(b"a file is in the way")
    with pytest.raises(ValueError, match=f"could not be downloaded .*Not a directory.*{cache}"):
        load_dataset("mnist")


def test_what_can_be_downloaded_is_known_by_its_content() -> None:
    for name, layout in LAYOUTS.items():
        for file in layout.files:
            if name != "imagenet":
                assert file.url.startswith(("https://", "http://fashion-mnist.s3-website"))  # which has no https
                assert file.url.rpartition("/")[2] in file.names
                assert len(bytes.fromhex(file.sha256)) == 32
                assert file.size > 1000
