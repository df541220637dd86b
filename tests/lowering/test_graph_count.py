"""Runs inside of CUDA graphs, counted on the device. A run in which operations are said to be captured stands in for a replay."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import lowering
from qlangevin.lowering import graph_count, operator
from tests.helpers.deferred_layers import DeferredKernels, NoWaiting, deferred_cpu
from tests.helpers.networks import gradients, same_gradients, two_linear


@pytest.fixture
def deferred() -> Iterator[DeferredKernels]:
    with deferred_cpu() as kernels:
        yield kernels


class Capture:
    """Has `is_capturing` return True within its context."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = False
        for module in (graph_count, operator):
            monkeypatch.setattr(module, "is_capturing", lambda x: self.now)

    def __enter__(self) -> None:
        self.now = True

    def __exit__(self, *error: object) -> None:
        self.now = False


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    return Capture(monkeypatch)


def test_only_operations_of_a_gpu_are_captured() -> None:
    assert not graph_count.is_capturing(torch.ones(1))


def test_replays_draw_the_bits_of_further_runs(deferred: DeferredKernels, capture: Capture) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AvgPool2d(2), nn.Flatten())
    ql.lower(model.append(nn.Linear(72, 3)), "bfp8", "bfp8")
    x, labels = torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    other = copy.deepcopy(model)
    runs = [False, False, True, True, False, True]  # True for those of a graph
    for is_replay in runs:
        expected = gradients(other, x, labels)
        if is_replay:
            with capture, NoWaiting(model):
                found = gradients(model, x, labels)
        else:
            with NoWaiting(model):
                found = gradients(model, x, labels)
        assert same_gradients(found, expected)
        assert lowering.state_dict(model) == lowering.state_dict(other)


def test_evaluation_counts_nothing(deferred: DeferredKernels, capture: Capture) -> None:
    model, x = ql.lower(two_linear(8), "bfp8"), torch.randn(4, 8)
    model(x)
    before = lowering.state_dict(model)
    model.eval()
    with capture:
        model(x)
    assert lowering.state_dict(model) == before


def test_a_captured_model_resumes_and_is_copied(deferred: DeferredKernels, capture: Capture) -> None:
    model, x = ql.lower(two_linear(8), "bfp8", "bfp8"), torch.randn(4, 8)
    for is_replay in (False, True, True):
        capture.now = is_replay
        model(x)
    capture.now = False
    twin = copy.deepcopy(model)
    assert lowering.state_dict(twin) == lowering.state_dict(model) == {"0": 3, "1": 3, "2": 3}
    expected = twin(x)
    assert torch.equal(model(x), expected)
    assert lowering.state_dict(twin) == lowering.state_dict(model)
    lowering.load_state_dict(model, dict.fromkeys("012", 3))
    with capture:  # a graph holds the number of runs before it
        assert torch.equal(model(x), expected)


def test_a_capture_before_the_first_run_is_refused(deferred: DeferredKernels, capture: Capture) -> None:
    model = ql.lower(nn.Linear(4, 4), "bfp8")
    with capture, pytest.raises(RuntimeError, match="before its first run in training"):
        model(torch.ones(2, 4))


def test_the_operator_takes_the_number_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    def record(x: Tensor, *args: Any, step: Tensor | None = None) -> Tensor:
        steps.append((args[2].step, step))
        return x.clone()

    monkeypatch.setattr(operator, "quantize_in_memory_order", record)
    on_device = torch.zeros((), dtype=torch.int64, device="meta")  # which nobody can read
    for step in (torch.tensor(5), on_device):
        operator._quantize_at_step(torch.ones(3), "bfp8", 0, "stochastic", 0, 0, step)
    assert steps == [(5, None), (0, on_device)]


def test_a_number_of_the_host_in_a_graph_is_refused(deferred: DeferredKernels, capture: Capture) -> None:
    arguments = ("bfp8", "bfp8", "stochastic", 0, 0, torch.tensor(1))
    operator.lower_op(torch.ones(3), *arguments)
    with capture, pytest.raises(RuntimeError, match="every replay would draw the same random bits"):
        operator.lower_op(torch.ones(3), *arguments)


def test_a_layer_without_kernels_is_not_captured(deferred: DeferredKernels, capture: Capture) -> None:
    model = ql.lower(nn.Linear(4, 4), "fixed8.4").double()
    with capture, pytest.raises(RuntimeError, match=r"without kernels for its output, a Tensor of torch\.float64"):
        model(torch.ones(2, 4, dtype=torch.float64))


def test_runs_without_kernels_after_a_capture_go_on(deferred: DeferredKernels, capture: Capture) -> None:
    model, x = ql.lower(two_linear(8), "bfp8"), torch.randn(4, 8)
    model(x)
    with capture:
        model(x)
    other = copy.deepcopy(model)
    with ql.quantization.backend.suspended(deferred):
        assert torch.equal(model(x), other(x))
    assert lowering.state_dict(model) == lowering.state_dict(other)
