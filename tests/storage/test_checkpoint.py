"""Checkpoints: resumed runs are the same to the bit, and the file is replaced atomically."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qlangevin as ql
from benchmarks.kills import Options, content, kill_runs
from qlangevin.quantization.qtensor import QTensor
from qlangevin.storage import state_json
from qlangevin.storage.leftovers import host_id
from tests.helpers.checkpoint_runs import KINDS, STEPS, comparable, make, seed_all


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_at_any_step_a_run_is_the_same_to_the_bit(kind: str, tmp_path: Path) -> None:
    whole = make(kind)
    losses = whole.train(STEPS, lambda step: whole.save(tmp_path / str(step), step=step))
    for step in range(STEPS):
        resumed = make(kind)
        seed_all(99)
        assert resumed.load(tmp_path / str(step)) == {"step": step}
        assert resumed.train(STEPS) == losses[step:]
        assert resumed.state() == whole.state()


@pytest.mark.filterwarnings("ignore:dropout is active while sampling")
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_checkpoint_of_a_resumed_run_is_the_same_to_the_byte(kind: str, tmp_path: Path) -> None:
    whole = make(kind)
    with ql.SampleStore.create(tmp_path / "whole", whole.model, whole.sampler) as store:
        whole.train(5)
        store.append(whole.model)
        whole.save(tmp_path / "whole", store=store, step=5)
        shutil.copytree(tmp_path / "whole", tmp_path / "killed")
        whole.train(STEPS)
        whole.save(tmp_path / "whole", store=store, step=STEPS)
    resumed = make(kind)
    seed_all(99)
    with ql.SampleStore.create(tmp_path / "killed", resumed.model, resumed.sampler, resume=True) as store:
        resumed.load(tmp_path / "killed", store)
        resumed.train(STEPS)
        resumed.save(tmp_path / "killed", store=store, step=STEPS)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_weights_overwritten_after_a_resume_are_noticed(tmp_path: Path) -> None:
    """The sampler notes versions of tensors for that, which a checkpoint does not hold."""
    run = make("accumulator")
    run.train(3)
    run.save(tmp_path)
    resumed = make("accumulator")
    resumed.load(tmp_path)
    weight: Any = resumed.model[0].weight  # type: ignore[index]
    assert "version" not in resumed.sampler.state_dict()["state"][0]
    resumed.train(4)
    with torch.no_grad():
        weight.copy_(torch.full_like(weight, -1.5))
    resumed.train(5)
    assert (weight < -1).all()  # the step began at the new weights, not at the accumulator
    assert (resumed.sampler.state[weight]["accumulator"] < -1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_can_be_taken_back_to_its_own_checkpoint(kind: str, tmp_path: Path) -> None:
    run = make(kind)
    run.train(5)
    run.save(tmp_path)
    before = run.state()
    losses = run.train(STEPS)
    run.load(tmp_path)
    assert run.state() == before
    assert run.train(STEPS) == losses


@pytest.mark.parametrize(("saved", "loaded"), [("plain", "packed"), ("packed", "plain")])
def test_a_packed_run_does_not_go_on_unpacked_nor_the_reverse(saved: str, loaded: str, tmp_path: Path) -> None:
    run, other = make(saved), make(loaded)
    run.save(tmp_path)
    before = other.state()
    with pytest.raises(ValueError, match="bfp8"):
        other.load(tmp_path)
    assert other.state() == before


def test_packed_weights_can_be_looked_at_unpacked(tmp_path: Path) -> None:
    run, other = make("packed"), make("plain")
    run.train(5)
    run.save(tmp_path)
    ql.load_checkpoint(tmp_path, other.model)
    for p, q in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert isinstance(p, QTensor)
        assert not isinstance(q, QTensor)
        assert torch.equal(p.detach() + 0.0, q.detach())


@pytest.mark.slow
def test_six_killed_runs_have_the_stores_of_runs_never_killed(tmp_path: Path) -> None:
    results = kill_runs(Options(runs=6, seed=1, steps=80), tmp_path)
    assert [result.problem for result in results] == [""] * 6
    assert all(result.died for result in results)


# ---- what is saved, what is given


def test_the_model_alone_is_loaded_and_no_generator_is_touched(tmp_path: Path) -> None:
    run, other = make("lowered"), make("lowered")
    run.train(5)
    run.save(tmp_path)
    seed_all(99)
    before, wanted = state_json.random_state(), other.state()[2:]
    ql.load_checkpoint(tmp_path, other.model)
    assert comparable(state_json.random_state()) == comparable(before)
    assert other.state()[:2] == run.state()[:2]
    assert other.state()[2:-1] == wanted[:-1]


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("run.safetensors", "run.safetensors"),
        ("", "checkpoint.safetensors"),
        ("run", "run/checkpoint.safetensors"),
        ("lr0.1/chain-0", "lr0.1/chain-0/checkpoint.safetensors"),
    ],
)
def test_a_path_is_a_folder_unless_it_says_that_it_is_a_file(path: str, file: str, tmp_path: Path) -> None:
    ql.save_checkpoint(str(tmp_path / path), nn.Linear(1, 1), best=0.5)
    assert [str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*") if found.is_file()] == [file]
    assert ql.load_checkpoint(tmp_path / path, nn.Linear(1, 1)) == {"best": 0.5}


def test_a_checkpoint_saved_before_there_is_a_store_does_not_take_its_place(tmp_path: Path) -> None:
    ql.save_checkpoint(tmp_path / "run", model := nn.Linear(1, 1))
    with ql.SampleStore.create(tmp_path / "run", model) as store:
        store.append(model)
    assert ql.load_checkpoint(tmp_path / "run", model) == {}


def test_a_file_of_any_name_that_is_there_is_a_checkpoint(tmp_path: Path) -> None:
    ql.save_checkpoint(tmp_path / "run.safetensors", nn.Linear(1, 1), best=0.5)
    (tmp_path / "run.safetensors").rename(tmp_path / "old")
    model = nn.Linear(1, 1)
    assert ql.load_checkpoint(tmp_path / "old", model) == {"best": 0.5}
    ql.save_checkpoint(tmp_path / "old", model, best=1)
    assert [found.name for found in tmp_path.iterdir()] == ["old"]


def test_a_missing_checkpoint_is_an_error_unless_it_may_be_missing(tmp_path: Path) -> None:
    run = make()
    before = run.state()
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*checkpoint\.safetensors"):
        run.load(tmp_path)
    assert ql.load_checkpoint(tmp_path, run.model, run.sampler, run.schedule, run.loader, missing_ok=True) == {}
    assert run.state() == before


def test_without_a_checkpoint_a_run_begins_and_has_one(tmp_path: Path) -> None:
    run = make()
    with ql.SampleStore.create(tmp_path / "store", run.model, run.sampler, run.schedule) as store:
        with pytest.raises(FileNotFoundError):
            run.load(tmp_path, store)
        assert ql.load_checkpoint(tmp_path, run.model, run.sampler, store=store, missing_ok=True) == {}
        store.append(run.model)
        assert ql.load_checkpoint(tmp_path, run.model, run.sampler, store=store, missing_ok=True) == {}
        assert len(store) == 0


def test_samples_without_a_checkpoint_are_not_thrown_away(tmp_path: Path) -> None:
    run = make()
    with ql.SampleStore.create(tmp_path / "store", run.model, run.sampler, run.schedule) as store:
        store.append(run.model)
        for missing_ok in (False, True):
            with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
                ql.load_checkpoint(tmp_path / "mistyped", run.model, run.sampler, store=store, missing_ok=missing_ok)
        assert len(store) == 1


@pytest.mark.parametrize("argument", ["model", "loader"])
def test_things_that_have_no_state_are_named(argument: str, tmp_path: Path) -> None:
    run = make()
    wrong: dict[str, Any] = {"model": run.sampler, "loader": torch.utils.data.DataLoader(range(3))}  # type: ignore[arg-type]
    given: dict[str, Any] = {"model": run.model, argument: wrong[argument]}
    with pytest.raises(TypeError, match=f"{argument} must"):
        ql.save_checkpoint(tmp_path / "it", **given)


def test_several_writers_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    runs = [make() for _ in range(2)]

    def save(run: Any) -> None:
        for _ in range(20):
            run.save(tmp_path / "it")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, runs))
    runs[0].load(tmp_path / "it")
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_store_is_taken_back_to_its_checkpoint(tmp_path: Path) -> None:
    run = make()
    with ql.SampleStore.create(tmp_path / "store", run.model, run.sampler, run.schedule) as store:
        store.append(run.model)
        run.save(tmp_path, store=store)
        before = content(store.path)
        run.train(3)
        store.append(run.model)
        run.load(tmp_path, store)
        assert len(store) == 1
        assert content(store.path) == before


def test_a_store_with_samples_to_be_drawn_again_must_be_given(tmp_path: Path) -> None:
    """Appending would fail some steps later, or store samples twice."""
    run = make()
    with ql.SampleStore.create(tmp_path / "store", run.model, run.sampler, run.schedule) as store:
        store.append(run.model)
        run.save(tmp_path, store=store)
        run.load(tmp_path)  # nothing has come after it
        run.train(3)
        store.append(run.model)
        before = run.state()
        with pytest.raises(ValueError, match=r"after 1 samples, and the store in .*store, .* has 2: pass it as store="):
            run.load(tmp_path)
        assert run.state() == before
        other = make()
        other.load(tmp_path)  # of another sampler, to look at
        ql.load_checkpoint(tmp_path, run.model)
    run.load(tmp_path)  # nothing can be appended
    with (
        ql.SampleStore.open(tmp_path / "store", write=True),
        pytest.raises(ValueError, match="pass it as store="),
    ):
        run.load(tmp_path)


@pytest.mark.parametrize("name", ["sampler", "schedule", "loader"])
def test_a_store_in_the_place_of_another_component_is_named(name: str, tmp_path: Path) -> None:
    run = make()
    with ql.SampleStore.create(tmp_path / "store", run.model, run.sampler, run.schedule) as store:
        parts: dict[str, Any] = {name: store}
        for call in (ql.save_checkpoint, ql.load_checkpoint):
            with pytest.raises(TypeError, match=f"{name} .* got a SampleStore: this is a store, pass it as store="):
                call(tmp_path, run.model, **parts)


@pytest.mark.parametrize("name", ["sampler", "schedule", "loader", "store"])
def test_what_is_given_must_have_been_saved(name: str, tmp_path: Path) -> None:
    run = make()
    parts: dict[str, Any] = {"sampler": run.sampler, "schedule": run.schedule, "loader": run.loader}
    with ql.SampleStore.create(tmp_path / "store", run.model, run.sampler) as store:
        parts["store"] = store
        ql.save_checkpoint(tmp_path, run.model, **{n: part for n, part in parts.items() if n != name})
        run.train(3)
        before = run.state()
        with pytest.raises(ValueError, match=f"was saved without (the|a) {name}"):
            ql.load_checkpoint(tmp_path, run.model, **parts)
        assert run.state() == before


def test_what_was_saved_need_not_be_given(tmp_path: Path) -> None:
    run, other = make(), make()
    run.train(4)
    run.save(tmp_path)
    ql.load_checkpoint(tmp_path, other.model, other.sampler)
    assert other.state()[2] == run.state()[2]
    assert other.schedule.last_epoch == other.loader.position == 0


# ---- the file is replaced atomically


def _fails(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
@pytest.mark.parametrize("size", [1, 1 << 21])  # floats: written in one run, in several
def test_if_the_disk_fails_the_checkpoint_before_is_there(
    call: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    run.save(tmp_path, best=torch.ones(size))
    before = run.state()
    run.train(4)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _fails)
        with pytest.raises(OSError, match="No space left"):
            run.save(tmp_path, best=torch.zeros(size))
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.safetensors"]
    assert torch.equal(run.load(tmp_path)["best"], torch.ones(size))
    assert run.state() == before


def test_what_a_killed_process_left_behind_is_overwritten(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for process in (gone.pid, os.getpid()):  # numbers are used again
        (tmp_path / f".checkpoint.safetensors.{host_id()}-{process}-1-1.tmp").write_bytes(b"half of a checkp")
    make().save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.safetensors"]


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        run = make("packed")
        run.train(3)
        run.save(tmp_path / f"{name}.safetensors", best=0.5)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_pickled(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickled")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    monkeypatch.setattr(torch, "save", never)
    monkeypatch.setattr(torch, "load", never)
    run = make(kind)
    run.train(2)
    run.save(tmp_path)
    state = run.state()
    other = make(kind)
    other.load(tmp_path)
    assert other.state() == state
