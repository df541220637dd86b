"""`python -m qlangevin.gpu.check`: what it says, compares and returns."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from qlangevin.gpu.check import __main__ as program
from qlangevin.gpu.check.comparing import SPECIFICATION, Case, Place, compare, same_bits
from qlangevin.gpu.check.operations import code_cases, corrected_cases, quantize_cases
from qlangevin.gpu.check.table import comparison_lines, head_lines, measurement_line
from qlangevin.gpu.check.timing import Measurement
from qlangevin.gpu.check.training import beside_cases, network_cases, step_cases

ELSEWHERE = Place(torch.device("cpu"), "kernels")
NEVER, AT_ONCE = time.monotonic() + 1e6, 0.0


def case(elsewhere: Callable[[], Iterable[Tensor]]) -> Case:
    """Return a case whose right result is [1, 2]."""
    return Case("a case", lambda place: elsewhere() if place is ELSEWHERE else [torch.tensor([1.0, 2.0])])


def fail() -> list[Tensor]:
    raise RuntimeError("out of shared memory\nand more")


@pytest.mark.parametrize(
    ("elsewhere", "problem"),
    [
        (lambda: [torch.tensor([1.0, 2.0000002])], "1 of 2 elements, the first at 1: 2.000000"),
        (lambda: [torch.tensor([1.0, 2.0]).bfloat16()], "torch.bfloat16 of shape (2,) in place of torch.float32"),
        (list, "0 results in place of 1"),
        (fail, "RuntimeError: out of shared memory"),
    ],
)
def test_a_case_that_differs_is_described(elsewhere: Callable[[], Iterable[Tensor]], problem: str) -> None:
    found = compare("cases", [case(elsewhere), case(lambda: [torch.tensor([1.0, 2.0])])], ELSEWHERE, NEVER)
    assert found.cases == 2
    [said] = found.differ
    assert problem in said
    assert "\n" not in said


def test_cases_that_would_begin_too_late_are_counted_as_left_out() -> None:
    found = compare("cases", [case(fail)] * 3, ELSEWHERE, AT_ONCE)
    assert (found.cases, found.left_out, found.differ) == (0, 3, [])


def test_bits_are_compared_not_values() -> None:
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert same_bits(torch.tensor([torch.nan, 1.0]), torch.tensor([-torch.nan, 1.0]))
    assert not same_bits(torch.tensor(torch.nan), torch.tensor(1.0))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))


def test_cases_have_a_result_on_the_pytorch_path() -> None:
    shapes = [(3, 20)]
    families = [
        quantize_cases("nearest", shapes), quantize_cases("stochastic", shapes), corrected_cases(shapes),
        code_cases(shapes), step_cases(shapes, quick=True), beside_cases(shapes, steps=1), network_cases(4),
    ]  # fmt: skip
    for cases in families:
        found = compare("cases", cases, SPECIFICATION, NEVER)
        assert found.cases
        assert found.differ == []


def test_the_table_is_plain_text() -> None:
    found = compare("quantize", [case(fail)] * 7, ELSEWHERE, NEVER)
    lines = [*head_lines([("torch", "2.13.0")], "A remark."), *comparison_lines(found)]
    assert lines[0].split() == ["torch", "2.13.0"]
    assert "A remark." in lines
    assert lines[-7].split() == ["quantize", "7", "7"]
    assert lines[-1].strip() == "... and 2 more"
    assert measurement_line(Measurement("a step", 1.5, "ms", "randn", 3.0)).split() == [
        "a",
        "step",
        "1.500",
        "ms",
        "0.50x",
        "randn",
    ]


def test_without_triton_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert program.main([]) == 2
    assert "pip install 'qlangevin[gpu]'" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--device", "nonsense"]) == 2
    assert "PyTorch has no device 'nonsense' here" in capsys.readouterr().err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_child_process_has_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    started = []

    def run(command: list[str], env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        started.append((command, env["TRITON_INTERPRET"]))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert program.main(["--quick"]) == 1
    assert started == [([sys.executable, "-m", "qlangevin.gpu.check", "--quick"], "1")]


def test_a_device_without_kernels_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Place, "has_kernels", False)
    assert program.check(torch.device("cpu"), quick=True) == 2
    assert "no kernels for cpu" in capsys.readouterr().err


@pytest.mark.slow
def test_the_program_finds_no_difference_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "qlangevin.gpu.check", "--quick", "--device", "cpu"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "no bit differs" in ended.stdout
    assert "interpreter" in ended.stdout
    assert f"torch         {torch.__version__}" in ended.stdout
    assert "left out" in ended.stdout
