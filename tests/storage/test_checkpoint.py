"""Runs that are killed, resumed, given something that does not fit, or a file that is not what was written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset

import qlangevin as ql
from benchmarks.kills import Options, content, kill_runs
from qlangevin.quantization.qtensor import QTensor
from qlangevin.storage import checkpoint, files, model_tensors, state_json
from qlangevin.storage.files import DamagedError

STEPS = 12


@pytest.fixture(autouse=True)
def _generators_as_before() -> Iterator[None]:
    before = state_json.random_state()
    yield
    state_json.set_random_state(before)


# ---- runs of every kind


@dataclass
class Run:
    model: nn.Module
    sampler: Optimizer
    schedule: Any
    loader: ql.Loader

    def save(self, path: Path, **more: Any) -> None:
        ql.save_checkpoint(path, self.model, self.sampler, self.schedule, self.loader, **more)

    def load(self, path: Path, store: ql.SampleStore | None = None) -> dict[str, Any]:
        return ql.load_checkpoint(path, self.model, self.sampler, self.schedule, self.loader, store)

    def train(self, until: int, each: Callable[[int], None] = lambda step: None) -> list[float]:
        """Step, and tell ``each`` how many steps are done before every one; returns the losses."""
        batches, losses = chain.from_iterable(repeat(self.loader)), []
        while self.schedule.last_epoch < until:
            each(self.schedule.last_epoch)
            x, labels = next(batches)
            self.sampler.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), labels)
            loss.backward()
            self.sampler.step()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    def state(self) -> Any:
        """All that makes up a run, for comparison to the bit; versions of tensors belong to a process."""
        states = [part.state_dict() for part in (self.sampler, self.schedule, self.loader)]
        layers = ql.lowering.state_dict(self.model)
        return plain([model_tensors.named_tensors(self.model), layers, *states, state_json.random_state()])


def plain(tree: Any) -> Any:
    if isinstance(tree, QTensor):
        return plain([tree.codes, tree.exponents])
    if isinstance(tree, Tensor):
        return str(tree.dtype), tuple(tree.shape), bytes(tree.detach().reshape(-1).view(torch.uint8).numpy())
    if isinstance(tree, dict):
        return {k: plain(v) for k, v in tree.items() if k != "version"}
    if isinstance(tree, (list, tuple)):
        return [plain(item) for item in tree]
    return repr(tree)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class Augmented(Dataset[tuple[Tensor, int]]):
    """Draws from the global generators of NumPy and Python."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), np.random.standard_normal() + random.gauss(0, 1)), index % 3


def make(kind: str = "plain", samples: int = 4, batch_size: int = 6, lower: bool | None = None, **options: Any) -> Run:
    """A run that has not begun; 20 examples, so that 12 steps are 3 epochs."""
    seed_all(0)
    middle = {"dropout": nn.Dropout(0.5), "batchnorm": nn.BatchNorm1d(5)}.get(kind, nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 5), middle, nn.Linear(5, 3))
    examples = TensorDataset(torch.randn(20, 4), torch.arange(20) % 3)
    if kind == "float64":
        model.double()
        examples = TensorDataset(examples.tensors[0].double(), examples.tensors[1])
    if kind == "lowered" if lower is None else lower:
        ql.lower(model, "bfp8", "bfp8", seed=2)
    if kind in ("packed", "in backward"):
        ql.pack(model, "bfp8")
    loader = ql.Loader(Augmented() if kind == "augmented" else examples, batch_size, seed=3)
    if kind == "torch":
        momentum = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return Run(model, momentum, torch.optim.lr_scheduler.StepLR(momentum, 5), loader)
    given: dict[str, Any] = {"weights": None if kind in ("packed", "in backward", "float64") else "bfp8"}
    given |= {"accumulator": {"weights": "fixed8.6", "accumulator": "fp32"}}.get(kind, {})
    given |= {"bf16 accumulator": {"weights": "bfp8", "accumulator": "bf16"}}.get(kind, {})
    sampler = ql.SGLD(model.parameters(), 0.1, 20, step_in_backward=kind == "in backward", **given | options)
    if kind == "cyclical":
        return Run(
            model, sampler, ql.CyclicalLR(sampler, STEPS, 2, 2, exploration_temperature=0, exploration=0.5), loader
        )
    return Run(model, sampler, ql.LinearDecayLR(sampler, STEPS, samples, burn_in=0.5), loader)


KINDS = [
    *["plain", "packed", "in backward", "accumulator", "bf16 accumulator", "lowered", "dropout", "batchnorm"],
    *["augmented", "torch", "float64", "cyclical"],
]


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
    assert plain(state_json.random_state()) == plain(before)
    assert other.state()[:2] == run.state()[:2]
    assert other.state()[2:-1] == wanted[:-1]


@pytest.mark.parametrize("path", ["run.safetensors", "checkpoint", ""])
def test_a_folder_holds_a_checkpoint_under_its_usual_name(path: str, tmp_path: Path) -> None:
    ql.save_checkpoint(str(tmp_path / path), nn.Linear(1, 1), best=0.5)
    assert [file.name for file in tmp_path.iterdir()] == [path or "checkpoint.safetensors"]
    assert ql.load_checkpoint(tmp_path / path, nn.Linear(1, 1)) == {"best": 0.5}


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


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """Of one with other settings, and of one with the same settings and other samples."""
    run, other = make(), make()
    other.train(3)
    with ql.SampleStore.create(tmp_path / "a", run.model, run.sampler, run.schedule) as store:
        store.append(run.model)
        run.save(tmp_path, store=store)
    with ql.SampleStore.create(tmp_path / "b", other.model, other.sampler, other.schedule) as store:
        store.append(other.model)
        before = other.state()
        with pytest.raises(ValueError, match=r"is of another run than the store in .*last is"):
            other.load(tmp_path, store)
        assert other.state() == before
        assert len(store) == 1
    with ql.SampleStore.create(tmp_path / "c", run.model, run.sampler) as store:
        store.append(run.model)
        with pytest.raises(ValueError, match=r"settings\.schedule"):
            run.load(tmp_path, store)


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


# ---- what does not fit


def _other_model(**change: Any) -> Run:
    run = make()
    run.model[0] = nn.Linear(4, 5, **change)  # type: ignore[operator]
    run.sampler = ql.SGLD(run.model.parameters(), 0.1, 20, weights="bfp8")
    run.schedule = ql.LinearDecayLR(run.sampler, STEPS, 4, burn_in=0.5)
    return run


def _frozen() -> Run:
    run = make()
    run.model.get_parameter("0.bias").requires_grad_(False)
    return run


def _with_sampler(sampler: Callable[[nn.Module], Optimizer]) -> Run:
    run = make()
    run.sampler = sampler(run.model)
    run.schedule = ql.LinearDecayLR(run.sampler, STEPS, 4, burn_in=0.5)
    return run


def _with_schedule(schedule: Callable[[Optimizer], Any]) -> Run:
    run = make()
    run.schedule = schedule(run.sampler)
    return run


def _two_groups(model: nn.Module) -> Optimizer:
    return ql.SGLD([{"params": list(m.parameters())} for m in (model[0], model[2])], 0.1, 20)  # type: ignore[index]


def _part(model: nn.Module) -> Optimizer:
    return ql.SGLD(list(model.parameters())[:2], 0.1, 20)


MISFITS: dict[str, tuple[Callable[[], Run], str]] = {
    "parameters": (lambda: _other_model(bias=False), "of another model: '0.bias' is missing in the model"),
    "dtype": (lambda: make("float64"), "'0.weight' is parameter float32 .* and parameter float64"),
    "buffers": (lambda: make("batchnorm"), "'1.running_mean' is in the model only"),
    "frozen": (_frozen, "'0.bias' is parameter .* there and frozen"),
    "groups": (lambda: _with_sampler(_two_groups), "one for each of 2 groups"),
    "group": (lambda: _with_sampler(_part), "parameter group that doesn't match the size"),
    "optimizer": (lambda: _with_sampler(lambda model: torch.optim.SGD(model.parameters(), 0.1)), "SGLD|SGD|sampler"),
    "schedule's length": (lambda: make(samples=3), "of another schedule: samples is 4 there and 3 here"),
    "schedule": (lambda: make("cyclical"), "LinearDecayLR as schedule"),
    "torch's schedule": (lambda: _with_schedule(lambda s: torch.optim.lr_scheduler.StepLR(s, 2)), "schedule"),
    "loader": (lambda: make(batch_size=4), "another order: batch_size is 6 there and 4 here"),
    "lowering": (lambda: make(lower=True), "of a model lowered otherwise: '0'"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(misfit: str, tmp_path: Path) -> None:
    build, message = MISFITS[misfit]
    run = make()
    run.train(5)
    run.save(tmp_path)
    other = build()
    other.train(3)
    before = other.state()
    with pytest.raises(ValueError, match=message):
        other.load(tmp_path)
    assert other.state() == before
    other.train(STEPS)  # and it goes on


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    run, other = make("torch"), make()
    run.train(2)
    ql.save_checkpoint(tmp_path, run.model, run.sampler)
    before = other.state()
    with pytest.raises(ValueError, match=r"sampler|SGLD|SGD"):
        ql.load_checkpoint(tmp_path, other.model, other.sampler)
    assert other.state() == before


def test_a_model_lowered_in_part_is_refused(tmp_path: Path) -> None:
    make("lowered").save(tmp_path)
    other = make()
    ql.lower(other.model, "bfp8", layers=nn.ReLU)
    with pytest.raises(ValueError, match="lowered otherwise: '0', '2' in one only"):
        other.load(tmp_path)


def test_a_packed_model_of_another_format_is_refused(tmp_path: Path) -> None:
    make("packed").save(tmp_path)
    model = ql.pack(make().model, "fixed8.6")
    with pytest.raises(ValueError, match=r"'0.weight' is parameter bfp8 .* and parameter fixed8\.6"):
        ql.load_checkpoint(tmp_path, model)


def test_a_store_that_has_lost_samples_is_refused(tmp_path: Path) -> None:
    run = make()
    with ql.SampleStore.create(tmp_path / "store", run.model, run.sampler) as store:
        store.append(run.model)
        store.append(run.model)
        run.save(tmp_path, store=store)
        store.truncate(1)
        run.train(3)
        before = run.state(), content(store.path)
        with pytest.raises(ValueError, match=r"comes after 2 samples, but .*store has 1"):
            run.load(tmp_path, store)
        assert (run.state(), content(store.path)) == before


@pytest.mark.parametrize("how", ["closed", "for reading"])
def test_a_store_that_cannot_be_taken_back_is_refused(how: str, tmp_path: Path) -> None:
    run = make()
    with ql.SampleStore.create(tmp_path / "store", run.model, run.sampler) as store:
        run.save(tmp_path, store=store)
        store.append(run.model)
    run.train(3)
    before = run.state(), content(store.path)
    with pytest.raises(PermissionError):
        run.load(tmp_path, store if how == "closed" else ql.SampleStore.open(tmp_path / "store"))
    assert (run.state(), content(store.path)) == before


# ---- damaged files


def refused(path: Path, data: bytes | None, run: Run | None = None, error: type[ValueError] = DamagedError) -> None:
    """A file is found to be damaged, and a run that was to be loaded from it is as before."""
    if data is not None:
        path.write_bytes(data)
    run = run or make()
    before = run.state()
    with pytest.raises(error):
        run.load(path)
    assert run.state() == before


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small checkpoint."""
    path = tmp_path_factory.mktemp("intact") / "checkpoint"
    run = make("packed")
    run.train(2)
    run.save(path, best=torch.ones(2))
    return path.read_bytes()


def test_a_byte_that_has_changed_is_found(intact: bytes, tmp_path: Path) -> None:
    rng, run = random.Random(0), make("packed")
    header = 8 + struct.unpack("<Q", intact[:8])[0]
    places = [*range(8), *rng.sample(range(8, header), 300), *rng.sample(range(header, len(intact)), 200)]
    for place in places:
        changed = bytearray(intact)
        changed[place] ^= 1 << rng.randrange(8)
        refused(tmp_path / "it", bytes(changed), run)


def test_a_changed_bit_of_any_name_or_shape_is_found(intact: bytes, tmp_path: Path) -> None:
    length = struct.unpack("<Q", intact[:8])[0]
    begin = intact.index(b'"sha256"')
    assert 8 < begin < 8 + length
    run = make("packed")
    for place in range(begin, 8 + length):
        for bit in (place % 8, (place + 3) % 8):
            changed = bytearray(intact)
            changed[place] ^= 1 << bit
            refused(tmp_path / "it", bytes(changed), run)


@pytest.mark.parametrize(("old", "new"), [(b'"F32"', b'"I32"'), (b'"I8"', b'"U8"'), (b'"I64"', b'"F64"')])
def test_another_dtype_in_the_header_is_found(intact: bytes, old: bytes, new: bytes, tmp_path: Path) -> None:
    places = [i for i in range(len(intact)) if intact.startswith(old, i)]
    assert places
    for place in places:
        refused(tmp_path / "it", intact[:place] + new + intact[place + len(old) :], make("packed"))


def test_a_file_cut_short_or_too_long_is_found(intact: bytes, tmp_path: Path) -> None:
    rng, run = random.Random(1), make("packed")
    for length in [*range(12), *rng.sample(range(len(intact)), 200), len(intact) - 1]:
        refused(tmp_path / "it", intact[:length], run)
    refused(tmp_path / "it", intact + b"\0", run)
    refused(tmp_path / "it", intact + intact, run)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"\xff" * 100, b"{}", struct.pack("<Q", 2) + b"{}"])
def test_what_was_never_a_checkpoint_is_found(data: bytes, tmp_path: Path) -> None:
    refused(tmp_path / "it", data)


@pytest.mark.parametrize("length", [0, 1, 2**20, 10**8, 10**8 + 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_header_that_says_it_is_of_another_length_is_found(intact: bytes, length: int, tmp_path: Path) -> None:
    refused(tmp_path / "it", struct.pack("<Q", length) + intact[8:], make("packed"))


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DamagedError, match="not an ordinary file"):
        make().load(tmp_path / "pipe")


# ---- files made to do harm, with correct checksums


def forged(text: str, tensors: dict[str, Tensor], path: Path) -> None:
    """Have `save_checkpoint` write anything: this text for its own, these tensors."""

    def flatten(tree: Any, found: dict[str, Tensor], where: str) -> None:
        found.update({name: t for name, t in tensors.items() if not name.startswith("model.")})

    parts = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "json", SimpleNamespace(dumps=lambda *_, **__: text))
        patch.setattr(checkpoint, "flatten", flatten)
        patch.setattr(model_tensors, "gather", lambda *_: parts)
        ql.save_checkpoint(path, nn.Linear(1, 1))


def taken_apart(data: bytes, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    path.write_bytes(data)
    about, tensors = checkpoint._open(path, "it")
    return about, {name: t.clone() for name, t in tensors.items()}


def test_a_forgery_that_changes_nothing_is_loaded(intact: bytes, tmp_path: Path) -> None:
    about, tensors = taken_apart(intact, tmp_path / "it")
    forged(json.dumps(about), tensors, tmp_path / "it")
    make("packed").load(tmp_path / "it")


KEYS = ["checkpoint", "tensors", "layers", "lowered", "states", "random", "counters"]
WRONG: list[Any] = [None, [], {}, "x", -1, 0.5, [[1]], {"tuple": []}, {"dict": []}, {"dict": [[1, 2]]}, {"x": -1}]


@pytest.mark.parametrize("key", [*KEYS, "store"])
def test_an_entry_that_is_missing_is_found(key: str, intact: bytes, tmp_path: Path) -> None:
    about, tensors = taken_apart(intact, tmp_path / "it")
    del about[key]
    forged(json.dumps(about), tensors, tmp_path / "it")
    refused(tmp_path / "it", None, make("packed"))


@pytest.mark.parametrize("key", KEYS)
def test_an_entry_of_another_kind_is_found(key: str, intact: bytes, tmp_path: Path) -> None:
    about, tensors = taken_apart(intact, tmp_path / "it")
    run = make("packed")
    for wrong in WRONG:
        if (key, wrong) not in [("layers", {}), ("lowered", {}), ("counters", {"dict": []})]:  # which can be
            # Some say something that could be true of another model.
            error = ValueError if key in ("tensors", "layers", "lowered", "states") else DamagedError
            forged(json.dumps(about | {key: wrong}), tensors, tmp_path / "it")
            refused(tmp_path / "it", None, run, error)


@pytest.mark.parametrize("samples", ["2", -1, 0.5, []])
def test_a_number_of_samples_that_is_none_is_found(samples: Any, intact: bytes, tmp_path: Path) -> None:
    run = make("packed")
    about, tensors = taken_apart(intact, tmp_path / "it")
    forged(json.dumps(about | {"store": {"samples": samples}}), tensors, tmp_path / "it")
    with ql.SampleStore.create(tmp_path / "store", run.model) as store:
        for _ in range(3):
            store.append(run.model)
        before = run.state(), content(store.path)
        with pytest.raises(DamagedError):
            run.load(tmp_path / "it", store)
        assert (run.state(), content(store.path)) == before


@pytest.mark.parametrize("count", ["x", None, -1, 2**64])
def test_a_count_of_a_layer_that_is_none_is_found(count: Any, tmp_path: Path) -> None:
    make("lowered").save(tmp_path / "it")
    about, tensors = taken_apart((tmp_path / "it").read_bytes(), tmp_path / "it")
    about["layers"]["2"] = count
    forged(json.dumps(about), tensors, tmp_path / "it")
    refused(tmp_path / "it", None, make("lowered"))


@pytest.mark.parametrize("version", [2, 0, None, "1", [1]])
def test_another_version_is_found(version: Any, intact: bytes, tmp_path: Path) -> None:
    about, tensors = taken_apart(intact, tmp_path / "it")
    forged(json.dumps(about | {"checkpoint": version}), tensors, tmp_path / "it")
    with pytest.raises(DamagedError, match="reads version 1"):
        make("packed").load(tmp_path / "it")


@pytest.mark.parametrize("depth", [100, 400, 700, 950, 5000, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"tuple":[]}', '{"dict":[[1,]]}'])
def test_deep_nesting_is_found_or_loaded(brackets: str, depth: int, intact: bytes, tmp_path: Path) -> None:
    about, tensors = taken_apart(intact, tmp_path / "it")
    middle = len(brackets) - brackets.count("]") - brackets.count("}")
    nested = brackets[:middle] * depth + "1" + brackets[middle:] * depth
    text = json.dumps(about | {"counters": "HERE"}).replace('"HERE"', '{"dict":[["a",' + nested + "]]}")
    forged(text, tensors, tmp_path / "it")
    run = make("packed")
    before = run.state()
    try:
        assert list(run.load(tmp_path / "it")) == ["a"]
    except DamagedError:
        assert run.state() == before


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"a":1,"a":1}', "NaN", "\x00", '{"checkpoint":1}'])
def test_what_is_not_the_json_of_a_checkpoint_is_found(text: str, intact: bytes, tmp_path: Path) -> None:
    forged(text, taken_apart(intact, tmp_path / "it")[1], tmp_path / "it")
    refused(tmp_path / "it", None)


@pytest.mark.parametrize(
    "metadata", [None, {}, {"qlangevin": "{}"}, {"sha256": hashlib.sha256().hexdigest()}, {"format": "pt"}]
)
def test_a_safetensors_file_of_somebody_else_is_found(metadata: dict[str, str] | None, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"weight": torch.ones(2)}
    refused(tmp_path / "it", b"".join(bytes(part) for part in files.tensor_parts(tensors, metadata)))


CODES, EXPONENTS = "model.0.weight.codes", "model.0.weight.exponents"
CHANGES: dict[str, dict[str, Tensor | None]] = {
    "no codes": {CODES: None},
    "no exponents": {EXPONENTS: None},
    "few codes": {CODES: torch.zeros(3, dtype=torch.int8)},
    "many codes": {CODES: torch.zeros(500, 4, dtype=torch.int8)},
    "codes in another shape": {CODES: torch.zeros(4, 5, dtype=torch.int8)},
    "wide codes": {CODES: torch.zeros(5, 4, dtype=torch.int16)},
    "floats for codes": {CODES: torch.zeros(5, 4)},
    "a code that is none": {CODES: torch.full((5, 4), -128, dtype=torch.int8)},
    "few exponents": {EXPONENTS: torch.zeros(1, dtype=torch.int8)},
    "empty exponents": {EXPONENTS: torch.zeros(0, dtype=torch.int8)},
    "many exponents": {EXPONENTS: torch.zeros(50, dtype=torch.int8)},
    "wide exponents": {EXPONENTS: torch.zeros(5, dtype=torch.int64)},
}


@pytest.mark.parametrize("kind", ["packed", "plain"])
@pytest.mark.parametrize("change", CHANGES)
def test_tensors_that_are_not_what_is_described_are_found(
    change: str, kind: str, intact: bytes, tmp_path: Path
) -> None:
    about, tensors = taken_apart(intact, tmp_path / "it")
    new: dict[str, Any] = tensors | CHANGES[change]
    forged(json.dumps(about), {name: t for name, t in new.items() if t is not None}, tmp_path / "it")
    refused(tmp_path / "it", None, make(kind))


@pytest.mark.parametrize(
    "weight", [torch.ones(5), torch.ones(1), torch.ones(4, 5), torch.ones(5, 4).int(), torch.ones(5, 4).double()]
)
def test_parameters_that_are_not_what_is_described_are_found(weight: Tensor, tmp_path: Path) -> None:
    make().save(tmp_path / "it")
    about, tensors = taken_apart((tmp_path / "it").read_bytes(), tmp_path / "it")
    forged(json.dumps(about), tensors | {"model.0.weight": weight}, tmp_path / "it")
    refused(tmp_path / "it", None)


# ---- files are replaced as a whole


def _fails(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
@pytest.mark.parametrize("size", [1, 1 << 21])  # one piece to hash, several
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
    for process, thread in ((gone.pid, 1), (os.getpid(), 1)):  # numbers are used again
        (tmp_path / f".checkpoint.safetensors.{process}-{thread}.tmp").write_bytes(b"half of a checkp")
    make().save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.safetensors"]


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        run = make("packed")
        run.train(3)
        run.save(tmp_path / name, best=0.5)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


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


def test_another_way_of_lowering_is_refused(tmp_path: Path) -> None:
    run, other = make("lowered"), make("lowered")
    run.save(tmp_path)
    ql.unlower(other.model)
    ql.lower(other.model, activations="bfp8", errors="bfp8", seed=99)
    with pytest.raises(ValueError, match=r"lowered otherwise: .*seed=99"):
        other.load(tmp_path)
