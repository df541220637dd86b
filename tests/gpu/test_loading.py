"""Kernels of GPUs are loaded when they are asked for; where there are none, a warning says why and what helps, once."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import qlangevin as ql
from qlangevin import gpu
from qlangevin.quantization import backend


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_backends", {})
    monkeypatch.setattr(backend, "_without", {"cpu"})


def test_importing_the_library_does_not_import_triton() -> None:
    command = (
        "import sys, qlangevin, torch; qlangevin.quantize(torch.ones(3), 'bfp8'); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


@pytest.mark.parametrize(
    ("triton", "message"),
    [
        (None, r"'cuda' take the PyTorch path.*Triton is not installed; pip install 'qlangevin\[gpu\]'"),
        ("3.4.0", r"Triton 3.4.0 is too old; 3.7 or later is needed: pip install -U triton"),
    ],
)
def test_without_a_triton_that_serves(triton: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = None if triton is None else SimpleNamespace(__version__=triton)
    monkeypatch.setitem(sys.modules, "triton", found)
    with pytest.warns(ql.QLangevinWarning, match=message):
        assert backend._load("cuda") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend._load("cuda") is None  # once


def test_a_device_that_triton_does_not_serve() -> None:
    x = torch.empty(3, device="meta")  # "meta" stands in for any
    with pytest.warns(ql.QLangevinWarning, match=r"does not serve devices of the type 'meta'; move model and data"):
        assert backend.kernels_for(x) is None


def test_kernels_are_loaded_for_a_gpu() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    kernels = backend._load("cuda")
    assert kernels is not None
    assert kernels.deferred
    assert torch.bfloat16 in kernels.floats
    assert backend.is_deferred("cuda")


def test_interpreting_needs_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1 before triton is imported"), gpu.interpreted():
        pass
