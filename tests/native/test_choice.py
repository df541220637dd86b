"""The environment variable that chooses the kernels of a process."""

import os
import subprocess
import sys

import pytest

from qlangevin import native

PROGRAM = "import torch, qlangevin as ql; print(ql.native.level(), ql.native.enabled_for(torch.ones(1)))"


def run_with(choice: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"QLANGEVIN_KERNELS": choice}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_process_uses_the_kernels_of_its_choice() -> None:
    for level in native.levels()[:1]:
        assert run_with(level).stdout.split() == [level, "True"]
    assert run_with("none").stdout.split() == ["none", "False"]  # and no warning of their absence


@pytest.mark.slow
def test_kernels_that_are_not_there_are_refused() -> None:
    ended = run_with("mmx")
    assert ended.returncode == 1
    assert "the environment variable QLANGEVIN_KERNELS must be one of none, " in ended.stderr
    assert "got 'mmx'" in ended.stderr
