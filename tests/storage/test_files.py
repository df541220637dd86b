"""Atomic writes: the order of what the disk is asked for, checksums, and messages about files that are wrong."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from qlangevin import DamagedError
from qlangevin.storage import files
from tests.helpers.stores import write_hashed


@pytest.mark.parametrize("size", [0, 5, files.RUN - 1, files.RUN, files.RUN + 1, 3 * files.RUN + 7])
def test_the_checksum_is_the_sha256_of_the_file(size: int, tmp_path: Path) -> None:
    content = bytes(i * i % 251 for i in range(1000)) * (size // 1000 + 1)
    chunks: list[files.Bytes] = [
        content[: size // 3],
        memoryview(content)[size // 3 : size // 2],
        b"",
        content[size // 2 : size],
    ]
    digest = write_hashed(tmp_path / "x", chunks)
    assert (tmp_path / "x").read_bytes() == content[:size]
    assert digest == (size, hashlib.sha256(content[:size]).hexdigest())
    assert files.sha256(*chunks) == digest.sha256


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="there is no sha256sum")
def test_sha256sum_prints_the_checksum_of_a_large_file(tmp_path: Path) -> None:
    digest = write_hashed(tmp_path / "x", [os.urandom(files.RUN), b"abc"])
    printed = subprocess.run(["sha256sum", tmp_path / "x"], capture_output=True, text=True, check=True).stdout
    assert printed.split()[0] == digest.sha256


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        calls.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def note_replace(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        assert src_dir_fd == dst_dir_fd
        calls.append(("rename", os.stat(old, dir_fd=src_dir_fd).st_ino))
        replace(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    files.write(tmp_path / "x", [b"abc"])
    file, folder = (tmp_path / "x").stat().st_ino, tmp_path.stat().st_ino
    assert calls == [("sync", file), ("rename", file), ("sync", folder)]


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_could_not_be_written_is_as_it_was(
    call: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(tmp_path / "x", [b"old"])
    with monkeypatch.context() as patch:
        patch.setattr(os, call, lambda *_, **__: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            files.write(tmp_path / "x", [b"new"])
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_what_a_killed_process_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".x.tmp").write_bytes(b"half")
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / ".y.tmp").symlink_to(tmp_path / "target")  # nothing is written through it
    for name in "xy":
        files.write(tmp_path / name, [b"new", b"er"])
        assert (tmp_path / name).read_bytes() == b"newer"
    assert (tmp_path / "target").read_bytes() == b"kept"


def test_files_have_the_permissions_of_other_files(tmp_path: Path) -> None:
    files.write(tmp_path / "x", [b"x"])
    (tmp_path / "y").touch()
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode


@pytest.mark.parametrize("what", ["nothing", "pipe", "folder", "empty", "device", "loop"])
def test_what_is_no_file_is_refused_at_once_and_named(what: str, tmp_path: Path) -> None:
    path = tmp_path / "sample"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "empty":
        path.touch()
    elif what != "nothing":
        path.symlink_to("/dev/zero" if what == "device" else path)
    with pytest.raises((DamagedError, OSError)) as caught:
        files.read(path, "the sample")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": 1, "a": 2}', "a key stands there twice"), (b"[NaN]", "NaN is not a number"), (b"[-Infinity]", "not a number"),
        (b"[" * 100_000, "cannot be read"), (b"\xff\xfe", "cannot be read"), (b"", "cannot be read"),
        (b"9" * 10_000, "cannot be read"), (b"[1e999]", "cannot be read"),
    ],
)  # fmt: skip
def test_json_that_is_none_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(DamagedError, match=f"it is damaged: .*{why}"):
        files.parse_json(text, "it")


def test_manifests_larger_than_any_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"[1, 2, 3]")
    assert files.read(tmp_path / "x", "it") == b"[1, 2, 3]"
    with pytest.raises(DamagedError, match="has 9 bytes, more than any"):
        files.read(tmp_path / "x", "it", limit=8)
