"""Packed parameters in checkpointed regions, stepped after backward and within it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from tests.helpers.checkpointed import MODES, Mode, batches, run_region, same
from tests.helpers.networks import two_linear
from tests.helpers.packing import numbers


class Parts(nn.Module):
    """Regions in a row. With ``tied`` the first and the last share a matrix."""

    def __init__(self, mode: Mode, tied: bool = False) -> None:
        super().__init__()
        self.mode, self.parts = mode, nn.ModuleList(two_linear() for _ in range(3))
        if tied:
            self.parts[2][0].weight = self.parts[0][0].weight  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = run_region(self.mode, part, x)
        return x


def chain(mode: Mode, in_backward: bool, tied: bool = False) -> list[Tensor]:
    """Return the weights after some steps of a packed and lowered model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Parts(mode, tied)
    ql.lower(ql.pack(model, "bfp8"), "bfp8", "bfp8")
    sampler = ql.SGLD(model.parameters(), 1e-3, 100, step_in_backward=in_backward)
    for x in batches(3, 64):
        sampler.zero_grad()
        model(x).square().mean().backward()
        sampler.step()
    return list(numbers(model).values())


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_chain_is_the_same_with_checkpointing(mode: Mode, in_backward: bool) -> None:
    assert same(chain(mode, in_backward), chain(None, False))


def test_tied_weights_step_after_all_regions_that_use_them() -> None:
    expected = chain(None, False, tied=True)
    assert same(chain("hooks", True, tied=True), expected)
    assert same(chain("reentrant", False, tied=True), expected)


def test_tied_weights_in_reentrant_regions_would_step_too_early() -> None:
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        chain("reentrant", True, tied=True)
