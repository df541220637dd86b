"""Lowered models of fake tensors, which have a shape, a dtype and a device but no numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from qlangevin.lowering.operator import error_op
from tests.helpers.fake_device import run_forward
from tests.helpers.networks import build

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_forward_and_backward_on_a_fake_device() -> None:
    command = [sys.executable, "-m", "tests.helpers.fake_device"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout == "the gradients are on the device\n", run.stderr


@pytest.mark.parametrize("lowered_before", [False, True])
def test_forward_of_fake_cuda_tensors(lowered_before: bool) -> None:
    model, x, _ = build("mlp")
    with torch.no_grad():
        y = run_forward(model, x, "cuda", lowered_before=lowered_before)
    assert isinstance(y, FakeTensor)
    assert (y.shape, y.dtype, y.device.type) == ((6, 3), torch.float32, "cuda")


def test_errors_of_fake_cuda_tensors_keep_their_layout() -> None:
    with FakeTensorMode():
        e = torch.empty(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
        q = error_op(e, "bfp8", "stochastic", 0, 0, torch.zeros((), dtype=torch.int64))
    assert (q.device, q.dtype, q.shape, q.stride()) == (e.device, e.dtype, e.shape, e.stride())
