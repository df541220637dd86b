"""A lowered model on the Triton kernels, interpreted: ``TRITON_INTERPRET=1 python -m tests.helpers.interpreted_lowering``.

A process of its own, because triton reads the variable when it is imported.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import qlangevin as ql
from qlangevin import gpu, lowering
from qlangevin.lowering import graph_count
from tests.helpers.checkpointed import MODES, Mode, batches, run_region, same, step_results
from tests.helpers.networks import gradients, same_gradients, two_linear


def network() -> nn.Sequential:
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 3),
    ]
    return nn.Sequential(*layers)


def compare(format: str, last: bool, dtype: torch.dtype = torch.float32) -> None:
    """Compare loss and gradients of three runs, the last one counted as in a CUDA graph, with those of the CPU."""
    model, x, labels = network().to(dtype), torch.randn(6, 3, 8, 8, dtype=dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    if last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.to(memory_format=torch.channels_last)
    ql.lower(model, format, format)
    other, is_capturing = copy.deepcopy(model), graph_count.is_capturing
    for in_graph in (False, False, True):
        expected = gradients(model, x, labels)
        graph_count.is_capturing = (lambda x: True) if in_graph else is_capturing
        with gpu.interpreted():
            found = gradients(other, x, labels)
        assert same_gradients(found, expected), (format, last, dtype, in_graph)
        assert lowering.state_dict(model) == lowering.state_dict(other)
    graph_count.is_capturing = is_capturing


def count_launches() -> None:
    """Check that convolution, norm and ReLU take a launch each, forward and backward, from the second run on."""
    from qlangevin.gpu import launch

    model, x = ql.lower(network()[:3], "bfp8", "bfp8"), torch.randn(6, 3, 8, 8)
    with gpu.interpreted():
        for _ in range(2):
            before = launch.launches
            y = model(x)
            between = launch.launches
            y.backward(torch.ones_like(y))
    assert (between - before, launch.launches - between) == (3, 3)


def compare_checkpointed(mode: Mode) -> None:
    """Compare a network with a checkpointed region with one without, on the CPU."""
    model, other = (ql.lower(two_linear(), "bfp8", "bfp8") for _ in range(2))
    other.load_state_dict(model.state_dict())
    expected = step_results(model, batches(2, 64))
    with gpu.interpreted():
        found = step_results(other, batches(2, 64), lambda x: run_region(mode, other, x))
    assert same(found, expected), mode


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    compare("bfp8", True)
    compare("fixed8.4", False)
    compare("fp8_e5m2", True)
    compare("fixed8.4", True, torch.bfloat16)
    count_launches()
    for mode in MODES:
        compare_checkpointed(mode)
    print("the bits are those of the CPU")
