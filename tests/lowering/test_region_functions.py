"""Functions called straight from what is given to `checkpoint`, without a module around them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qlangevin as ql
from qlangevin import lowering
from qlangevin.lowering import functions


class Residual(nn.Module):
    """Two residual blocks, written as functions of this forward; ``mode`` checkpoints them."""

    def __init__(self, mode: str, begin_with_function: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.mode, self.begin_with_function = mode, begin_with_function

    def block(self, x: Tensor, layer: nn.Module) -> Tensor:
        h = layer(F.silu(x)) if self.begin_with_function else layer(x)
        return F.gelu(h) + x

    def forward(self, x: Tensor) -> Tensor:
        x = F.tanh(self.head.weight.new_ones(32) * x)
        for layer in (self.first, self.second):
            if self.mode:
                x = checkpoint(self.block, x, layer, use_reentrant=self.mode == "reentrant")
            else:
                x = self.block(x, layer)
        out: Tensor = self.head(F.relu(x))
        return out


def results(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        x = torch.randn(64, 32, requires_grad=True)
        y = model(x)
        y.square().mean().backward()
        assert x.grad is not None
        found += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return [*found, torch.tensor([n for _, n in sorted(lowering.state_dict(model).items())])]


@pytest.mark.parametrize("mode", ["reentrant", "hooks"])
def test_recomputation_rounds_them_again_with_the_same_bits(mode: str) -> None:
    plain, region = (results(ql.lower(Residual(m), "bfp8", "bfp8")) for m in ("", mode))
    assert all(torch.equal(a, b) for a, b in zip(plain, region, strict=True))
    assert not functions._thread.frames
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("mode", ["reentrant", "hooks"])
def test_those_before_the_first_layer_stay_in_full_precision_and_say_so(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "_warned", set())
    model = ql.lower(Residual(mode, begin_with_function=True), "bfp8", "bfp8")
    with pytest.warns(ql.QLangevinWarning, match="before its first layer stay in full precision"):
        results(model)
    assert not any("silu" in name for name in lowering.state_dict(model))


def test_parts_draw_the_bits_of_the_whole() -> None:
    whole, parts = (nn.Sequential(Residual(""), nn.Linear(4, 4)) for _ in range(2))
    ql.lower(whole, "bfp8", "bfp8")
    ql.lower(parts[0], "bfp8", "bfp8", prefix="0")
    ql.lower(parts[1], "bfp8", "bfp8", prefix="1")
    parts[1].load_state_dict(whole[1].state_dict())
    assert all(torch.equal(a, b) for a, b in zip(results(whole)[:-1], results(parts)[:-1], strict=True))
