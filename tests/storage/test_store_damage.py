"""Stores with damaged or forged files: errors that name them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import fuzz
from qlangevin import DamagedError, Posterior, SampleStore
from tests.helpers.stores import build, fill_store, is_sample


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_names_all_damaged_samples(tmp_path: Path) -> None:
    s = fill_store(tmp_path, 5)
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


@pytest.mark.parametrize("damaged", [[0], [2], [4], [1, 3], [0, 1, 4]])
def test_errors_say_how_to_leave_damaged_samples_out(damaged: list[int], tmp_path: Path) -> None:
    good = [i for i in range(5) if i not in damaged]
    fill_store(tmp_path / "run", 5)
    for i in damaged:
        damage(tmp_path / "run" / "samples" / f"{i:06d}.safetensors")
    store = SampleStore.open(tmp_path / "run")
    with pytest.raises(DamagedError) as caught:
        store.verify()
    assert f"The other {len(good)} samples of {store.path} are as they were written; to leave" in str(caught.value)
    calls = str(caught.value).split(" out: store = ")[1]
    found = Posterior.open(eval(calls.split("Posterior.open(")[1].removesuffix(", model)")), build(), link="identity")
    assert [sample.index for sample in found.members] == good
    found.predict(torch.ones(2, 5))
    if len(damaged) == 1:
        with pytest.raises(DamagedError, match=re.escape(calls)):
            Posterior.open(store, build(), link="identity").predict(torch.ones(2, 5))


def test_there_is_no_way_around_the_only_sample(tmp_path: Path) -> None:
    store = fill_store(tmp_path, 1)
    damage(tmp_path / "samples" / "000000.safetensors")
    with pytest.raises(DamagedError, match=r"SHA-256 differs\)$"):
        store[0].decode()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_verify_looks_at_frozen_parameters(count: int, tmp_path: Path) -> None:
    s = fill_store(tmp_path, count)
    damage(tmp_path / "frozen.safetensors")
    for _ in range(2):
        with pytest.raises(DamagedError, match=r"frozen.safetensors of .* is damaged"):
            s.verify()
        for i in range(count):
            with pytest.raises(DamagedError, match=r"frozen.safetensors of .* is damaged"):
                s[i].decode()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dropout is active")  # the state of PyTorch's generator is among what is damaged
def test_damaged_and_forged_stores_and_checkpoints_are_refused_or_well_formed() -> None:
    assert [result for result in fuzz.fuzz(400) if result.outcome == fuzz.FAILED] == []


@pytest.mark.slow
def test_the_store_works_without_pickle(tmp_path: Path) -> None:
    fill_store(tmp_path)
    program = (
        "import sys, pickle, qlangevin\n"
        "def refuse(*_, **__): raise SystemExit('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = refuse\n"
        "print(len([s.decode() for s in qlangevin.SampleStore.open(sys.argv[1])]))"
    )
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout == "3\n"
