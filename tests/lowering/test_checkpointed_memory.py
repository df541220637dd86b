"""Checkpointed regions of lowered models: the memory they keep for backward, and that they run once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import qlangevin as ql
from qlangevin.lowering.saved_tensors import SavedAsCodes, SavedCodes
from tests.helpers.checkpointed import MODES, Mode, batches, build_blocks, run_region
from tests.helpers.networks import two_linear


class Outputs:
    """The memory of all outputs of layers, and how often a layer has run."""

    def __init__(self, model: nn.Module) -> None:
        self.memory: list[StorageWeakRef] = []
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(self.note)

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.memory.append(StorageWeakRef(output.untyped_storage()))

    def alive(self) -> int:
        return sum(not ref.expired() for ref in self.memory)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Any]]:
    """The tensors that the hooks of a lowered model were given, and what they kept."""
    found, pack = list[tuple[Tensor, Any]](), SavedAsCodes.pack

    def record(saving: SavedAsCodes, t: Tensor) -> Any:
        found.append((t.detach(), pack(saving, t)))
        return found[-1][1]

    monkeypatch.setattr(SavedAsCodes, "pack", record)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("whole", [True, False])
def test_outputs_are_dropped_and_computed_once_more(mode: Mode, whole: bool) -> None:
    model, (x,) = build_blocks(None if whole else mode), batches(1)
    outputs = Outputs(model)
    y = run_region(mode if whole else None, model, x)
    runs = len(outputs.memory)
    assert outputs.alive() == 1  # the model's own: what others keep of inputs to regions are codes, and sums
    y.sum().backward()
    outside, unneeded = (
        (0 if whole else 2),
        (3 if mode == "hooks" else 0),
    )  # hooks stop at the last tensor that is needed
    assert 2 * runs - outside - unneeded <= len(outputs.memory) <= 2 * runs - outside


@pytest.mark.parametrize("mode", MODES)
def test_only_inputs_of_regions_are_kept_and_as_codes(mode: Mode, kept: list[tuple[Tensor, Any]]) -> None:
    size = 64
    parts = [two_linear(size) for _ in range(3)]

    class Model(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            for part in self:
                input = run_region(mode, part, input)
            return input

    model = ql.lower(Model(*parts), "bfp8", "bfp8")
    y = model(torch.randn(32, size, requires_grad=True))
    assert [tuple(t.shape) for t, _ in kept] == [(32, size)] * 3
    assert [isinstance(saved, SavedCodes) for _, saved in kept] == [False, True, True]  # the first is the user's
    y.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_records_live_as_long_as_the_graph(mode: Mode) -> None:
    from qlangevin.lowering import replay

    before = len(replay._records)
    model, (x,) = build_blocks(mode), batches(1)
    y = model(x)
    assert len(replay._records) == before + 3
    y.sum().backward()
    del y
    assert len(replay._records) == before


def test_other_hooks_within_a_model_get_what_is_saved() -> None:
    """Codes are not made for nothing where the hooks of others are innermost."""
    found = []

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = two_linear()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                found.append(SavedAsCodes.innermost())
                y: Tensor = self.layers(x)
            found.append(SavedAsCodes.innermost())
            return y

    ql.lower(Inner(), "bfp8", "bfp8")(torch.randn(32, 64))
    assert found[0] is None
    assert found[1] is not None
