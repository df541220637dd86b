"""Regions on the stack: where they are found, and what happens if PyTorch's own names have changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.lowering import replay
from qlangevin.lowering.saved_tensors import SavedAsCodes
from tests.helpers.checkpointed import MODES, Mode, run_region
from tests.helpers.networks import two_linear


class Seen(nn.Module):
    """Notes the regions that it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[replay.Regions] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(replay.enclosing_regions())
        return x.sin()


@pytest.mark.parametrize("mode", MODES)
def test_a_region_is_the_same_in_forward_and_backward(mode: Mode) -> None:
    seen, x = Seen(), torch.ones(2, requires_grad=True)
    y, z = run_region(mode, seen, x), run_region(mode, seen, x)
    (y + 2 * z).sum().backward()
    first, second, *repeated = (region for (region,) in seen.found)
    assert first.backward is second.backward is None
    assert first.serial != second.serial
    assert {region.serial for region in repeated} == {first.serial, second.serial}
    assert all(region.backward is not None for region in repeated)


@pytest.mark.parametrize("outer", MODES)
@pytest.mark.parametrize("inner", MODES)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_an_inner_region_comes_first(outer: Mode, inner: Mode) -> None:
    seen, x = Seen(), torch.ones(2, requires_grad=True)
    run_region(outer, lambda y: run_region(inner, seen, y), x).sum().backward()
    assert len(seen.found[0]) == 2
    assert seen.found[0][0].serial != seen.found[0][1].serial
    assert all(region.backward is None for found in seen.found for region in found[:-1])  # a repetition ends the list


def test_there_are_none_elsewhere() -> None:
    seen, x = Seen(), torch.ones(2, requires_grad=True)
    ql.lower(seen, "bfp8")(x)
    with torch.no_grad():
        seen(x)
    with torch.autograd.graph.save_on_cpu():
        seen(x)
    y = x * 1
    y.register_hook(lambda e: seen(e) * 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        (y * y).sum().backward()
    assert seen.found == [()] * 4


@pytest.mark.parametrize("mode", MODES)
def test_other_names_within_pytorch_are_noticed(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ql.lower(two_linear(8), "bfp8", "bfp8")
    monkeypatch.setattr(replay, "_READERS", {})
    with pytest.raises(RuntimeError, match="do not know the activation checkpointing of PyTorch"):
        run_region(mode, model, torch.randn(4, 8, requires_grad=True))

    def read(variables: dict[str, object]) -> None:
        raise KeyError

    monkeypatch.setattr(replay, "_READERS", dict.fromkeys(["forward", "checkpoint"], read))
    with pytest.raises(RuntimeError, match="do not know the activation checkpointing of PyTorch"):
        run_region(mode, model, torch.randn(4, 8, requires_grad=True))


def test_the_hooks_of_a_lowered_model_are_known() -> None:
    with SavedAsCodes(ql.parse("bfp8"), set()) as _:
        assert replay.enclosing_regions() == ()
