"""A folder of samples: one writer, many readers, and nothing lost, whatever happens when."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickletools
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks import fuzz
from qlangevin import SGLD, ConstantLR, CyclicalLR, DamagedError, Key, QTensor, Sample, SampleStore, pack
from qlangevin.quantization import random
from qlangevin.storage import files as files_module
from tests.helpers.processes import fork

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> Iterator[None]:
    """Packing looks for optimizers among all objects: among fewer, if those of imported modules are set aside."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def build(width: int = 3, frozen: bool = True) -> nn.Sequential:
    """Packed, plain and frozen parameters, and buffers; the same each time."""
    model = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Linear(width, 2), nn.Linear(2, 2))
    draw(model, 0)
    model[3].requires_grad_(not frozen)
    return pack(model, "bfp8", layers="0", rounding="nearest")


@torch.no_grad()
def draw(model: nn.Module, seed: int) -> nn.Module:
    """Other weights, from a seed."""
    for i, p in enumerate(model.parameters()):
        if p.requires_grad:
            p.copy_(random.normal(Key(seed).fold(i), p.numel()).view(p.shape))
    return model


def filled(path: Path, count: int = 3) -> SampleStore:
    """A store with the samples 0, 1, ..., open for reading."""
    model = build()
    with SampleStore.create(path, model) as writer:
        for i in range(count):
            writer.append(draw(model, i), step=i)
    return SampleStore.open(path)


def content(path: Path) -> dict[str, bytes]:
    """All files of a folder but the lock."""
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file() and p.name != ".lock"
    }


@cache
def wanted(seed: int) -> dict[str, Tensor]:
    tensors: dict[str, Any] = draw(build(), seed).state_dict()
    return {name: t.decode() if isinstance(t, QTensor) else t for name, t in tensors.items()}


def is_sample(sample: Sample, seed: int) -> bool:
    found = sample.decode()
    return found.keys() == wanted(seed).keys() and all(torch.equal(t, wanted(seed)[name]) for name, t in found.items())


def wait(child: int) -> int:
    """Its exit code: 0 if all went well, 1 if something was raised, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- a sequence of samples


def test_a_store_is_a_sequence(tmp_path: Path) -> None:
    s = filled(tmp_path)
    assert len(s) == 3
    assert [sample.step for sample in s] == [0, 1, 2]
    assert [sample.index for sample in s[1:]] == [1, 2]
    assert [sample.index for sample in s[::-2]] == [2, 0]
    assert s[5:] == []
    assert s[-1].index == 2
    assert all(is_sample(sample, i) for i, sample in enumerate(s))
    for bad in (3, -4):
        with pytest.raises(IndexError, match=f"sample {bad} of a store with 3"):
            s[bad]


def test_a_sample_is_a_mapping_in_the_order_of_the_model(tmp_path: Path) -> None:
    sample = filled(tmp_path)[0]
    assert list(sample) == [name for name, _ in (*build().named_parameters(), *build().named_buffers())]
    assert len(sample) == len(sample.decode()) == len(list(sample))
    assert isinstance(sample["0.weight"], QTensor)
    assert not isinstance(sample["2.weight"], QTensor)
    with pytest.raises(KeyError):
        sample["nothing"]


def test_what_is_printed(tmp_path: Path) -> None:
    s = filled(tmp_path)
    assert repr(s) == f"SampleStore({str(tmp_path)!r}, 3 samples, {s.nbytes} bytes)"
    assert repr(s[1]) == f"Sample(1 of {tmp_path}, step 1, {s[1].nbytes} bytes)"


def test_nbytes_is_what_the_tensors_take_on_the_disk(tmp_path: Path) -> None:
    s = filled(tmp_path)
    assert s.nbytes == sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors"))
    assert s[0].nbytes == (tmp_path / "samples" / "000000.safetensors").stat().st_size


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    s = filled(tmp_path)
    found = load_file(tmp_path / "samples" / "000001.safetensors")
    weight: Any = s[1]["0.weight"]
    assert torch.equal(found["0.weight.codes"], weight.codes)
    assert torch.equal(found["0.weight.exponents"], weight.exponents)
    assert torch.equal(found["1.running_mean"], s[1]["1.running_mean"])
    assert not [name for name in found if name.startswith("3.")]  # frozen: stored once
    assert load_file(tmp_path / "frozen.safetensors").keys() == {"3.weight", "3.bias"}


def test_two_equal_runs_give_the_same_bytes(tmp_path: Path) -> None:
    filled(tmp_path / "a")
    filled(tmp_path / "b")
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_nothing_in_the_folder_is_a_pickle(tmp_path: Path) -> None:
    filled(tmp_path)
    for name, data in content(tmp_path).items():
        assert not data.startswith(b"PK"), name
        with pytest.raises((ValueError, IndexError, UnicodeDecodeError)):
            list(pickletools.genops(data))


def test_the_manifest_says_where_the_samples_come_from(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    sampler = SGLD(model.parameters(), 0.1, 1000, weights="bfp8", seed=7)
    with SampleStore.create(tmp_path, model, sampler, ConstantLR(sampler, 100, 2)) as s:
        model(torch.ones(1, 3)).sum().backward()
        sampler.step()
        assert s.append(model).step == 1
        assert s.append(model, step=5).step == 5
    about = json.loads((tmp_path / "manifest.json").read_text())
    assert about["version"] == 1
    assert about["library"]
    assert about["settings"] == SampleStore.open(tmp_path).settings
    assert about["settings"]["seed"] == 7
    assert about["settings"]["sampler"]["groups"][0]["num_data"] == 1000
    assert about["settings"]["schedule"]["schedule"] == "ConstantLR"
    assert about["tensors"]["weight"] == {"kind": "parameter", "shape": [2, 3], "dtype": "float32", "format": "bfp8"}
    assert [record["step"] for record in about["samples"]] == [1, 5]


def test_tensors_written_to_in_memory_do_not_change_the_store(tmp_path: Path) -> None:
    s = filled(tmp_path)
    before = content(tmp_path)
    weight: Any = s[0]["0.weight"]
    weight.codes.zero_()
    s[0]["2.weight"].zero_()
    assert content(tmp_path) == before
    assert is_sample(s[0], 0)


# ---- readers, while it grows


def test_a_reader_sees_what_is_added_and_taken_away(tmp_path: Path) -> None:
    reader = filled(tmp_path, 1)
    kept = reader[0]
    model = build()
    with SampleStore.open(tmp_path, write=True) as writer:
        writer.append(draw(model, 1))
        assert len(reader) == 2
        assert reader.nbytes == writer.nbytes
        assert is_sample(reader[1], 1)
        writer.truncate(1)
        assert len(reader) == 1
        writer.append(draw(model, 2))
        assert is_sample(reader[1], 2)
    assert is_sample(kept, 0)


def test_nbytes_of_a_reader_grows_too(tmp_path: Path) -> None:
    reader = filled(tmp_path, 1)
    with SampleStore.open(tmp_path, write=True) as writer:
        writer.append(build())
        assert reader.nbytes == writer.nbytes


def test_a_sample_added_while_a_reader_opens_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 1)
    read = SampleStore._read

    def slow(path: Path) -> Any:
        found = read(path)
        monkeypatch.undo()
        with SampleStore.open(path, write=True) as writer:
            writer.append(build())
        return found

    monkeypatch.setattr(SampleStore, "_read", staticmethod(slow))
    assert len(SampleStore.open(tmp_path)) == 2


def test_a_reader_needs_no_permission_to_write(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / ".lock").unlink()
    assert len(SampleStore.open(tmp_path)) == 3
    assert not (tmp_path / ".lock").exists()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    s = filled(tmp_path)
    for action in (lambda: s.append(build()), lambda: s.truncate(0)):
        with pytest.raises(PermissionError, match=r"or open for reading; SampleStore.open\(..., write=True\) to write"):
            action()
    assert len(s) == 3


def test_samples_read_by_another_process_while_they_are_written(tmp_path: Path) -> None:
    filled(tmp_path, 1)

    def follow() -> None:
        reader, seen = SampleStore.open(tmp_path), 0
        while seen < 15:
            for sample in reader[seen:]:
                sample.decode()
                seen += 1

    child, model = fork(follow), build()
    with SampleStore.open(tmp_path, write=True) as writer:
        for i in range(1, 15):
            writer.append(draw(model, i))
    assert wait(child) == 0


# ---- one writer


def test_a_lock_that_is_refused_closes_no_file_of_others(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path, build()):
        with pytest.raises(BlockingIOError) as caught:
            SampleStore.open(tmp_path, write=True)
        other = os.open(tmp_path, os.O_RDONLY)  # gets the number of the lock's file
        del caught
        gc.collect()
        os.fstat(other)
        os.close(other)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path, build()):
        attempts: list[Callable[[], Any]] = [
            lambda: SampleStore.open(tmp_path, write=True),
            lambda: SampleStore.create(tmp_path, build(), resume=True),
        ]
        for again in attempts:
            with pytest.raises(BlockingIOError, match="another writer has it open; there can be one at a time"):
                again()
        assert wait(fork(lambda: SampleStore.open(tmp_path, write=True))) == 1
    assert wait(fork(lambda: SampleStore.open(tmp_path, write=True))) == 0
    with SampleStore.open(tmp_path, write=True) as s:
        s.append(build())


def test_a_writer_that_was_forgotten_gives_the_folder_free(tmp_path: Path) -> None:
    s = SampleStore.create(tmp_path, build())
    del s
    gc.collect()
    SampleStore.open(tmp_path, write=True).close()


def test_a_closed_writer_reads_on_but_does_not_write(tmp_path: Path) -> None:
    s = SampleStore.create(tmp_path, model := build())
    s.append(draw(model, 0))
    s.close()
    s.close()
    with pytest.raises(PermissionError, match="is closed"):
        s.append(model)
    assert is_sample(s[0], 0)


def test_a_closed_writer_does_not_take_other_samples_for_its_own(tmp_path: Path) -> None:
    s = SampleStore.create(tmp_path, model := build())
    s.append(draw(model, 0), step=0)
    s.close()
    with SampleStore.open(tmp_path, write=True) as other:
        other.truncate(0)
        other.append(draw(model, 1), step=1)
    assert s[0].step == 1  # it reads on, as any reader does
    assert is_sample(s[0], 1)


def test_a_forked_process_cannot_write_and_does_not_keep_the_lock(tmp_path: Path) -> None:
    read, write = os.pipe()

    def worker(s: SampleStore) -> None:
        with pytest.raises(PermissionError, match="was opened by the process this one was forked from"):
            s.append(build())
        os.write(write, str(os.getpid()).encode())
        signal.pause()

    def holder() -> None:
        s = SampleStore.create(tmp_path, build())
        fork(lambda: worker(s))
        signal.pause()

    child = fork(holder)
    os.close(write)
    grandchild = int(os.read(read, 100) or b"0")
    os.close(read)
    assert grandchild
    with pytest.raises(BlockingIOError):
        SampleStore.open(tmp_path, write=True)
    os.kill(child, signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL
    SampleStore.open(tmp_path, write=True).close()
    os.kill(grandchild, 0)  # which is still there
    os.kill(grandchild, signal.SIGKILL)


# ---- disks that are full, processes that are killed


@pytest.mark.parametrize(("call", "nth"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("replace", 1), ("replace", 2)])
def test_an_append_that_fails_changes_nothing(
    call: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "whole", 3)
    reader, before = filled(tmp_path / "s", 2), content(tmp_path / "s")
    real, calls = getattr(os, call), 0

    def fail(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise FULL
        return real(*args)

    with SampleStore.open(tmp_path / "s", write=True) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(
                OSError, match="No space left on device: sample 2 was not stored; the 2 before it"
            ) as caught:
                writer.append(draw(build(), 5), step=2)
        assert caught.value.errno == errno.ENOSPC
        assert str(tmp_path / "s") in str(caught.value)
        assert content(tmp_path / "s") == before
        assert len(reader) == len(writer) == 2
        assert all(is_sample(sample, i) for i, sample in enumerate(reader))
        writer.append(draw(build(), 2), step=2)
    assert content(tmp_path / "s") == content(tmp_path / "whole")


@pytest.mark.parametrize("limit", [100, 1500])  # bytes: no room for the sample, or only for the sample
def test_a_file_that_becomes_too_large_changes_nothing(limit: int, tmp_path: Path) -> None:
    filled(tmp_path, 2)
    before = content(tmp_path)
    assert len(before["samples/000000.safetensors"]) < 1500 < len(before["manifest.json"])

    def append() -> None:
        with SampleStore.open(tmp_path, write=True) as writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            with pytest.raises(OSError, match="sample 2 was not stored; the 2 before it are safe"):
                writer.append(draw(build(), 2))
            assert content(tmp_path) == before
            assert len(writer) == 2

    assert wait(fork(append)) == 0
    assert content(tmp_path) == before


STEPS = {"write", "_write_and_hash", "sync_folder", "append", "_publish"}  # where something changes


class AtLine:
    """Does something before the n-th line of the functions that write, and counts them."""

    def __init__(self, n: int, action: Callable[[], Any]) -> None:
        self.left, self.action, self.lines = n, action, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name not in STEPS or not frame.f_code.co_filename.endswith(("files.py", "store.py")):
            return None
        if event == "line":
            self.lines += 1
            self.left -= 1
            if self.left == 0:
                self.action()
        return self

    def __enter__(self) -> AtLine:
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self.before)


def lines_of_append(path: Path) -> int:
    filled(path, 1)
    with SampleStore.open(path, write=True) as writer:
        model = draw(build(), 1)
        with AtLine(0, lambda: None) as counted:
            writer.append(model, step=1)
    return counted.lines


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_process_that_dies_at_any_line_loses_no_sample(tmp_path: Path) -> None:
    lines, whole = lines_of_append(tmp_path / "whole"), content(tmp_path / "whole")
    filled(tmp_path / "one", 1)
    assert lines > 50
    ends, model = set(), draw(build(), 1)
    for n in range(1, lines + 1):
        path = tmp_path / "s"
        shutil.copytree(tmp_path / "one", path)

        def append(n: int = n, path: Path = path) -> None:
            with SampleStore.open(path, write=True) as writer, AtLine(n, lambda: os._exit(77)):
                writer.append(model, step=1)

        assert wait(fork(append)) == 77
        left = SampleStore.open(path)
        ends.add(len(left))
        assert all(is_sample(sample, i) for i, sample in enumerate(left))
        with SampleStore.open(path, write=True) as writer:
            if len(writer) == 1:
                writer.append(model, step=1)
        assert content(path) == whole
        shutil.rmtree(path)
    assert ends == {1, 2}


@pytest.mark.filterwarnings("ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning")
def test_an_append_interrupted_at_any_line_loses_no_sample(tmp_path: Path) -> None:
    lines = lines_of_append(tmp_path / "whole")
    filled(tmp_path / "one", 1)
    model = build()
    for n in range(1, lines + 1):
        path = tmp_path / "s"
        shutil.copytree(tmp_path / "one", path)
        with SampleStore.open(path, write=True) as writer:
            with pytest.raises(KeyboardInterrupt), AtLine(n, interrupt):
                writer.append(draw(model, 1), step=1)
            assert not list(path.rglob("*.tmp"))
            assert all(is_sample(sample, i) for i, sample in enumerate(SampleStore.open(path)))
            writer.append(draw(model, 2), step=2)
            assert is_sample(writer[-1], 2)
            assert len(SampleStore.open(path)) == len(writer)
            SampleStore.open(path).verify()
        shutil.rmtree(path)


def test_a_manifest_that_is_in_its_place_but_not_synced_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 1)
    with SampleStore.open(tmp_path, write=True) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(files_module, "sync_folder", lambda folder: sync_all_but(tmp_path, folder))
            with pytest.raises(OSError, match="No space left on device: sample 1 may not outlive a power failure"):
                writer.append(draw(build(), 1))
        assert len(writer) == len(SampleStore.open(tmp_path)) == 2
        writer.append(draw(build(), 2))
    assert [is_sample(sample, i) for i, sample in enumerate(SampleStore.open(tmp_path))] == [True] * 3


def sync_all_but(one: Path, folder: Path) -> None:
    if folder == one:
        raise FULL


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()])
def test_a_process_that_fails_and_then_dies_leaves_every_listed_sample_readable(
    error: BaseException, tmp_path: Path
) -> None:
    filled(tmp_path, 1)

    def append() -> None:
        syncs, fsync, replace = 0, os.fsync, os.replace

        def fail_once(descriptor: int) -> None:
            nonlocal syncs
            syncs += 1
            if syncs == 4:  # of the folder, after the manifest is in its place
                raise error
            fsync(descriptor)

        def die(old: Path, new: Path) -> None:
            replace(old, new)
            if new.parent.name == "samples":
                os._exit(77)

        with SampleStore.open(tmp_path, write=True) as writer, pytest.MonkeyPatch.context() as patch:
            model = build()
            patch.setattr(os, "fsync", fail_once)
            with pytest.raises(type(error)):
                writer.append(draw(model, 1))
            patch.setattr(os, "replace", die)
            writer.append(draw(model, 2))

    assert wait(fork(append)) == 77
    SampleStore.open(tmp_path).verify()


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    before = content(tmp_path)
    mine = f"{os.getpid()}-1.tmp"  # of a process that had this one's number
    for name in (f".manifest.json.{mine}", f"samples/.000002.safetensors.{mine}", "samples/000002.safetensors"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert len(SampleStore.open(tmp_path)) == 2
    SampleStore.open(tmp_path, write=True).close()
    assert content(tmp_path) == before | {"notes.txt": b"mine"}


def test_a_store_is_created_again_after_a_crash_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "whole", 0)
    real, calls = os.replace, 0
    for nth in (1, 2):

        def fail(old: Path, new: Path, nth: int = nth) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise FULL
            real(old, new)

        with monkeypatch.context() as patch:
            calls = 0
            patch.setattr(os, "replace", fail)
            with pytest.raises(OSError, match="No space"):
                SampleStore.create(tmp_path / f"{nth}", build())
        SampleStore.create(tmp_path / f"{nth}", build()).close()
        assert content(tmp_path / f"{nth}") == content(tmp_path / "whole")


def test_new_folders_are_synced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = set(), os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    SampleStore.create(tmp_path / "s", build()).append(build())
    assert {p.stat().st_ino for p in (tmp_path, tmp_path / "s", tmp_path / "s" / "samples")} <= synced


def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    shutil.copytree(filled(tmp_path / "s").path, shared := Path(tmp_path / "shared"))
    (shared / ".lock").unlink()
    for folder in (shared, shared / "samples"):
        folder.chmod(0o555)
    here = os.open(shared, os.O_RDONLY)

    def look() -> None:
        os.fchdir(here)
        if os.getuid() == 0:  # who may write everywhere
            os.setuid(65534)
        assert len([sample.decode() for sample in SampleStore.open(".")]) == 3
        with pytest.raises(PermissionError):
            SampleStore.open(".", write=True)
        with pytest.raises(PermissionError):
            SampleStore.create("new", build())

    assert wait(fork(look)) == 0
    os.close(here)
    for folder in (shared, shared / "samples"):
        folder.chmod(0o755)


# ---- truncate, resume


def test_truncate_keeps_the_first(tmp_path: Path) -> None:
    filled(tmp_path / "two", 2)
    filled(tmp_path / "s", 4)
    with SampleStore.open(tmp_path / "s", write=True) as s:
        s.truncate(4)
        s.truncate(2)
        assert content(tmp_path / "s") == content(tmp_path / "two")
        for bad in (-1, 3):
            with pytest.raises(ValueError, match=f"count must be between 0 and 2, the samples there are, got {bad}"):
                s.truncate(bad)
        s.append(draw(build(), 7))
        assert is_sample(s[2], 7)
        s.truncate(0)
    assert len(SampleStore.open(tmp_path / "s")) == 0


def sampled(
    path: Path, resume: bool = False, lr: float = 0.1, weights: str = "bfp8", cyclical: bool = False
) -> SampleStore:
    model = nn.Linear(3, 2)
    sampler = SGLD(model.parameters(), lr, 1000, weights=weights)
    schedule = CyclicalLR(sampler, 100, 2, 1) if cyclical else ConstantLR(sampler, 100, 2)
    return SampleStore.create(path, model, sampler, schedule, resume=resume)


def test_resume_goes_on_with_the_same_settings_only(tmp_path: Path) -> None:
    with sampled(tmp_path, resume=True) as s:
        s.append(pack(nn.Linear(3, 2), "bfp8"))
    before = content(tmp_path)
    with sampled(tmp_path, resume=True) as s:
        assert len(s) == 1
    with pytest.raises(FileExistsError, match=r"holds a store already; create\(..., resume=True\) goes on with it"):
        sampled(tmp_path)
    with pytest.raises(
        ValueError, match=r"begun with other settings: sampler.groups\[0\].lr is 0.1 there and 0.2 here"
    ):
        sampled(tmp_path, resume=True, lr=0.2)
    with pytest.raises(
        ValueError, match=r"begun with other settings: .*schedule.schedule is 'ConstantLR' there and 'Cyclical"
    ):
        sampled(tmp_path, resume=True, cyclical=True)
    with pytest.raises(
        ValueError, match=r"another model or sampler: 'weight' is parameter bfp8 \[2, 3\] there, now .* fixed8.6"
    ):
        sampled(tmp_path, resume=True, weights="fixed8.6")
    assert content(tmp_path) == before
    SampleStore.open(tmp_path, write=True).close()  # nobody kept the lock


def test_samples_without_a_manifest_are_not_written_over(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match="holds samples, but no manifest that describes them"):
        SampleStore.create(tmp_path, build())
    with pytest.raises(FileNotFoundError, match=r"there is no store in .*: it has no manifest.json"):
        SampleStore.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        SampleStore.open(tmp_path / "none")


# ---- models that are others


def test_another_model_is_refused_and_the_tensors_named(tmp_path: Path) -> None:
    filled(tmp_path)
    with SampleStore.open(tmp_path, write=True) as s:
        for model, why in (
            (build(4), r"'0.weight' is parameter bfp8 \[3, 5\] there and parameter bfp8 \[4, 5\] in the model"),
            (build()[:3], r"'3.weight' is missing in the model; '3.bias' is missing in the model$"),
            (build().append(nn.Linear(1, 1)), "'4.weight' is in the model only; '4.bias' is in the model only$"),
            (build(frozen=False), "'3.weight' is frozen float32 .* there and parameter float32 .* in the model"),
            (build().double(), "'0.weight' is parameter bfp8 .*; and [0-9]+ more$"),
            (pack(build(), "bfp8", layers="2"), r"'2.weight' is parameter float32 \[2, 3\] there and parameter bfp8"),
        ):
            with pytest.raises(ValueError, match="is of another model: .*" + why):
                s.append(model)
        with pytest.raises(ValueError, match=r"Sample.* is of another model: '0.weight'"):
            s[0].load_into(build(4))
        assert len(s) == 3


@pytest.mark.parametrize("how", ["in place", "behind autograd's back", "another tensor"])
def test_frozen_parameters_must_not_change(how: str, tmp_path: Path) -> None:
    model = build()
    with SampleStore.create(tmp_path, model) as s:
        s.append(model)
        s.append(model)
        layer: Any = model[3]
        with torch.no_grad():
            if how == "in place":
                layer.weight[0, 0] += 1
            elif how == "behind autograd's back":
                layer.weight.data[0, 0] += 1
            else:
                layer.weight = nn.Parameter(layer.weight + 1, requires_grad=False)
        with pytest.raises(ValueError, match=r"'3.weight' is frozen, but has changed since the store was created"):
            s.append(model)
        assert len(s) == 2


def test_a_frozen_parameter_made_in_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False))
    with SampleStore.create(tmp_path, model) as s:
        s.append(model)


@pytest.mark.parametrize("step", [-1, 1.5, True, "1", 2**63])
def test_a_step_that_is_no_number_is_refused_and_the_store_stays_readable(step: Any, tmp_path: Path) -> None:
    filled(tmp_path)
    before = content(tmp_path)
    with (
        SampleStore.open(tmp_path, write=True) as s,
        pytest.raises((ValueError, TypeError), match=f"step must be .*got {step!r}"),
    ):
        s.append(build(), step)
    assert content(tmp_path) == before


# ---- damage


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_names_all_damaged_samples(tmp_path: Path) -> None:
    s = filled(tmp_path, 5)
    s.verify()
    damage(tmp_path / "samples" / "000001.safetensors")
    (tmp_path / "samples" / "000003.safetensors").unlink()
    with pytest.raises(
        DamagedError, match=r"sample 1 of .*SHA-256 differs.*; sample 3 of .* is missing.*The other 3 samples"
    ):
        s.verify()
    for i in (0, 2, 4):
        assert is_sample(s[i], i)
    with pytest.raises(DamagedError, match="sample 1 of"):
        s[1].decode()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_verify_looks_at_frozen_parameters(count: int, tmp_path: Path) -> None:
    s = filled(tmp_path, count)
    damage(tmp_path / "frozen.safetensors")
    for _ in range(2):
        with pytest.raises(DamagedError, match=r"frozen.safetensors of .* is damaged"):
            s.verify()
        for i in range(count):
            with pytest.raises(DamagedError, match=r"frozen.safetensors of .* is damaged"):
                s[i].decode()


def test_fuzz(tmp_path: Path) -> None:
    assert [result for result in fuzz.fuzz(300) if result.outcome == fuzz.FAILED] == []


def test_the_store_works_without_pickle(tmp_path: Path) -> None:
    filled(tmp_path)
    program = (
        "import sys, pickle, qlangevin\n"
        "def refuse(*_, **__): raise SystemExit('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = refuse\n"
        "print(len([s.decode() for s in qlangevin.SampleStore.open(sys.argv[1])]))"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout == "3\n"


def test_a_step_before_that_of_the_last_sample_is_refused(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path, model := build()) as s:
        s.append(model, 5)
        s.append(model, 5)
        with pytest.raises(
            ValueError, match="last sample is of step 5, this one of step 4: was the checkpoint not loaded"
        ):
            s.append(model, 4)
        assert len(s) == 2


def test_threads_append_in_turn(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path, model := build()) as s, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: s.append(model).index, range(20)))
    assert sorted(found) == list(range(20))
    s.verify()
