"""Stores with damaged or forged files: errors that name them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fuzz
from qlangevin import DamagedError
from tests.helpers.stores import fill_store, is_sample


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
