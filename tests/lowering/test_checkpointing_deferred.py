"""Checkpointed regions on devices that the host must not wait for, and in CUDA graphs, which count runs on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.lowering import graph_count, operator
from tests.helpers.checkpointed import MODES, Mode, batches, build_blocks, run_region, same, step_results
from tests.helpers.deferred_layers import NoWaiting, deferred_cpu
from tests.helpers.networks import two_linear


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("whole", [True, False])
def test_the_bits_are_those_of_the_cpu_and_nothing_waits(mode: Mode, whole: bool) -> None:
    expected, model = step_results(build_blocks(), batches(3)), build_blocks(None if whole else mode)

    def call(x: Tensor) -> Tensor:
        with NoWaiting(model):
            y: Tensor = run_region(mode if whole else None, model, x)
        return y

    with deferred_cpu():
        assert same(step_results(model, batches(3), call), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("double", [False, True])
def test_graphs_replay_the_recomputation_too(mode: Mode, double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = False
    for module in (graph_count, operator):
        monkeypatch.setattr(module, "is_capturing", lambda x: now)
    found = []
    for m in (None, mode):
        model = ql.lower(nn.Sequential(two_linear(), two_linear()), "bfp8", "bfp8")
        for i, p in enumerate(model.parameters()):
            nn.init.normal_(p, 0, 0.1, torch.Generator().manual_seed(i))
        results = []
        with deferred_cpu():
            for captured, x in zip([False, True, True, False, True], batches(5, 64), strict=True):
                now = captured and m is not None
                results += step_results(model, [x], lambda x, m=m, f=model: run_region(m, f[1], f[0](x)))  # type: ignore[misc]
        if double:  # after a capture the device counts for tensors without kernels too
            now = False
            model.double()
            results += step_results(model, [x.detach().double().requires_grad_() for x in batches(2, 64)])
        found.append(results)
    assert same(*found)
