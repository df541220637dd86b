"""Links, pipes and devices in a store of a stranger: refused, and nothing is deleted, created or read elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import qlangevin as ql
from qlangevin import DamagedError, SampleStore
from qlangevin.storage import folders
from qlangevin.storage.folders import Folder
from qlangevin.storage.leftovers import host_id
from tests.helpers.stores import build, draw, fill_store, is_sample, read_files

LEFT = f".manifest.json.{host_id()}-999999999-1-1.tmp"
PLACES = [
    *["manifest.json", "frozen.safetensors", "checkpoint.safetensors", ".lock", LEFT],
    *["samples/000000.safetensors", "samples/000007.safetensors", f"samples/{LEFT}"],
]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of files that are nobody's business."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("000000.safetensors", "000005.safetensors", LEFT, "letter.txt"):
        (folder / name).write_bytes(b"mine")
    return folder


def put(kind: str, path: Path, target: Path) -> None:
    """Put a link, a pipe or a folder in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": target / "letter.txt", "new": target / "new", "zeros": Path("/dev/zero")}[kind])


@pytest.mark.parametrize("kind", ["link", "new", "zeros", "pipe", "folder"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_ordinary_file_is_refused_by_a_writer(
    kind: str, place: str, tmp_path: Path, elsewhere: Path
) -> None:
    model, run = build(), tmp_path / "run"
    fill_store(run, 2)
    put(kind, run / place, elsewhere)
    there, before = read_files(elsewhere), sorted(run.rglob("*"))
    attempts: list[Callable[[], object]] = [
        lambda: SampleStore.open(run, write=True),
        lambda: SampleStore.create(run, model, resume=True),
    ]
    for attempt in attempts:
        with pytest.raises(DamagedError, match=r"symbolic link|not an ordinary file") as caught:
            attempt()
        assert str(run / place) in str(caught.value)
    assert read_files(elsewhere) == there
    assert sorted(run.rglob("*")) == before
    (run / place).rmdir() if kind == "folder" else (run / place).unlink()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("place", ["manifest.json", "frozen.safetensors", "samples/000000.safetensors"])
def test_what_is_no_ordinary_file_is_refused_by_a_reader(
    kind: str, place: str, tmp_path: Path, elsewhere: Path
) -> None:
    fill_store(tmp_path / "run", 2)
    shutil.copy(tmp_path / "run" / place, elsewhere / "letter.txt")  # even if it leads to the right bytes
    put(kind, tmp_path / "run" / place, elsewhere)
    with pytest.raises(DamagedError, match=r"symbolic link|not an ordinary file"):
        [sample.decode() for sample in SampleStore.open(tmp_path / "run")]


def test_a_linked_folder_of_samples_deletes_nothing_where_it_leads(tmp_path: Path, elsewhere: Path) -> None:
    run = tmp_path / "run"
    fill_store(run, 2)
    shutil.rmtree(run / "samples")
    (run / "samples").symlink_to(elsewhere)
    there = read_files(elsewhere)
    attempts: list[Callable[[], object]] = [
        lambda: SampleStore.open(run, write=True),
        lambda: SampleStore.create(run, build(), resume=True),
        lambda: SampleStore.open(run)[0].decode(),
    ]
    for attempt in attempts:
        with pytest.raises(
            DamagedError, match=r"samples is a symbolic link, and those are not followed inside a store"
        ):
            attempt()
    assert read_files(elsewhere) == there
    (run / "manifest.json").unlink()
    with pytest.raises(DamagedError, match="symbolic link"):
        SampleStore.create(run, build())
    assert read_files(elsewhere) == there


def test_a_folder_replaced_by_a_link_while_it_is_cleaned_deletes_nothing(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fill_store(tmp_path / "run", 2).path
    (run / "samples" / "000005.safetensors").write_bytes(b"half")
    there, real = read_files(elsewhere), Folder.names

    def race(folder: Folder) -> list[str]:
        found = real(folder)
        if folder.path.name == "samples" and not (run / "samples").is_symlink():
            (run / "samples").rename(run / "moved")
            (run / "samples").symlink_to(elsewhere)
        return found

    monkeypatch.setattr(Folder, "names", race)
    with pytest.raises(DamagedError, match="symbolic link"), SampleStore.open(run, write=True) as writer:
        writer.append(build())
    assert read_files(elsewhere) == there


def test_a_file_replaced_by_a_link_after_it_was_looked_at_is_refused(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = fill_store(tmp_path / "run", 1).path, Folder.require_file

    def race(folder: Folder, name: str, about: os.stat_result, what: str) -> None:
        real(folder, name, about, what)
        if name == ".lock":
            (run / ".lock").unlink()
            (run / ".lock").symlink_to(elsewhere / "new")

    monkeypatch.setattr(Folder, "require_file", race)
    with pytest.raises(DamagedError, match=r"\.lock is a symbolic link"):
        SampleStore.open(run, write=True)
    assert not (elsewhere / "new").exists()


def test_a_path_that_the_user_gives_may_lead_through_links(tmp_path: Path) -> None:
    fill_store(tmp_path / "run", 1)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with SampleStore.open(tmp_path / "link", write=True) as writer:
        writer.append(draw(build(), 1), step=1)
        ql.save_checkpoint(tmp_path / "link", model := build(), store=writer)
    assert [is_sample(sample, i) for i, sample in enumerate(SampleStore.open(tmp_path / "link"))] == [True] * 2
    ql.load_checkpoint(tmp_path / "link", model)
    assert sorted(p.name for p in (tmp_path / "run").iterdir() if p.name != ".lock") == [
        *("checkpoint.safetensors", "frozen.safetensors", "manifest.json", "samples")
    ]


@pytest.mark.parametrize("given", ["run", "run/checkpoint.safetensors"])
def test_a_checkpoint_that_is_a_link_is_neither_read_nor_replaced(given: str, tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "run").mkdir()
    ql.save_checkpoint(elsewhere / "letter.txt", model := nn.Linear(1, 1))
    (tmp_path / "run/checkpoint.safetensors").symlink_to(elsewhere / "letter.txt")
    there = read_files(elsewhere)
    for attempt in (ql.load_checkpoint, ql.save_checkpoint):
        with pytest.raises(DamagedError, match=r"checkpoint.safetensors is a symbolic link"):
            attempt(tmp_path / given, model)
    assert read_files(elsewhere) == there
    assert (tmp_path / "run/checkpoint.safetensors").is_symlink()


def test_hard_links_lose_a_name_and_keep_their_content(tmp_path: Path, elsewhere: Path) -> None:
    run = fill_store(tmp_path / "run", 1).path
    os.link(elsewhere / "letter.txt", run / "samples" / "000003.safetensors")
    os.link(elsewhere / "letter.txt", run / LEFT)
    shutil.copytree(run, tmp_path / "copy", copy_function=os.link)
    there, copied = read_files(elsewhere), read_files(tmp_path / "copy")
    with SampleStore.open(run, write=True) as writer:
        writer.append(draw(build(), 1), step=1)
    assert read_files(elsewhere) == there
    assert read_files(tmp_path / "copy") == copied
    assert sorted(p.name for p in (run / "samples").iterdir()) == ["000000.safetensors", "000001.safetensors"]


def test_without_descriptors_of_folders_links_are_refused_too(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "HAVE_DESCRIPTORS", False)
    fill_store(tmp_path / "run", 2).verify()
    (tmp_path / "run/samples/000001.safetensors").unlink()
    (tmp_path / "run/samples/000001.safetensors").symlink_to(elsewhere / "letter.txt")
    with pytest.raises(DamagedError, match="symbolic link"):
        SampleStore.open(tmp_path / "run", write=True)
    with pytest.raises(DamagedError, match="symbolic link"):
        SampleStore.open(tmp_path / "run")[1].decode()


def test_nothing_stays_open(tmp_path: Path) -> None:
    fill_store(tmp_path, 1)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        kept = [sample.decode() for sample in SampleStore.open(tmp_path)]
        with SampleStore.open(tmp_path, write=True) as writer, pytest.raises(ValueError, match="another model"):
            writer.append(nn.Linear(1, 1))
    assert len(kept) == 1
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before
