"""Functions of lowered models among other things: nested regions, modes of the user, exceptions, writes, saved tensors."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qlangevin as ql
from qlangevin import lowering
from qlangevin.lowering import functions


class Called(nn.Module):
    """Two layers, and a forward from outside."""

    def __init__(self, forward: Callable[[Called, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.call = nn.Linear(8, 8), nn.Linear(8, 8), forward
        self.bias = nn.Parameter(torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer(x) + x)


class Nested(nn.Module):
    """A region in a region, both begun by this forward."""

    def __init__(self, outer: bool | None, inner: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c, self.head, self.modes = Residual(), Residual(), nn.Linear(32, 32), (outer, inner)

    def outer(self, x: Tensor) -> Tensor:
        return self.run(self.c, F.gelu(self.a(x)), self.modes[1])

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool | None) -> Tensor:
        if reentrant is None:
            return function(x)
        y: Tensor = checkpoint(function, x, use_reentrant=reentrant)
        return y

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.run(self.outer, F.silu(self.head(x)), self.modes[0]))
        return y


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(64, 32)).pow(2).mean().backward()
        found += [p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and "head" not in name]
    return found


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # PyTorch's own
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_regions_within_regions_change_no_bit(outer: bool, inner: bool) -> None:
    plain, nested = (gradients(ql.lower(Nested(*modes), "bfp8", "bfp8")) for modes in ((None, None), (outer, inner)))
    assert all(torch.equal(a, b) for a, b in zip(plain, nested, strict=True))
    assert not functions._thread.frames
    assert torch._C._len_torch_function_stack() == 0


def test_numbers_written_by_an_index_may_be_a_mask() -> None:
    def attend(m: Called, x: Tensor) -> Tensor:
        scores = m.a(x) @ m.b(x).transpose(1, 2)
        scores[:, torch.ones(6, 6).triu(1).bool()] = -float("inf")
        y: Tensor = (scores + m.bias).softmax(-1) @ x
        return y

    model, x = Called(attend), torch.randn(4, 6, 8)
    expected = model(x)
    ql.lower(model, "bfp16", "bfp16", rounding="nearest")
    assert (model(x) - expected).abs().max() < 1e-2


def test_activations_written_into_zeros_are_activations() -> None:
    def fill(m: Called, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:2] = m.a(x[:2])
        return F.gelu(out)

    model = ql.lower(Called(fill), "bfp8", "bfp8")
    model(torch.randn(4, 8))
    assert lowering.state_dict(model)["/gelu/0"] == 1


def test_outputs_and_inputs_can_be_saved_and_loaded() -> None:
    model = ql.lower(Called(lambda m, x: F.relu(m.a(x.contiguous()))), "bfp8", "bfp8").eval()
    x = torch.randn(4, 8)
    with torch.no_grad():
        y = model(x)
    for t in (x, y):
        buffer = io.BytesIO()
        torch.save(t, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True), t)
    assert not hasattr(x, "_qlangevin_kind")


def test_modes_of_the_user_end_where_they_should() -> None:
    def forward(m: Called, x: Tensor) -> Tensor:
        with torch.device("meta"):
            y = m.a(x)
        assert torch.zeros(1).device.type == "cpu"
        return F.relu(y)

    model = ql.lower(Called(forward), "bfp8", "bfp8")
    model(torch.randn(4, 8))
    assert lowering.state_dict(model)["/relu/0"] == 1
    assert torch._C._len_torch_function_stack() == 0


def test_functions_are_seen_after_a_layer_has_raised() -> None:
    def forward(m: Called, x: Tensor) -> Tensor:
        try:
            y = m.a(x[:, :3])
        except RuntimeError:
            y = m.b(x)
        return F.gelu(y)

    model = ql.lower(Called(forward), "bfp8", "bfp8")
    model(torch.randn(4, 8))
    assert lowering.state_dict(model)["/gelu/0"] == 1
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("format", ["bfp8", "e4m3", "fixed8.5"])
def test_an_infinity_in_float16_reaches_the_scaler(format: str) -> None:
    model = ql.lower(Called(lambda m, x: m.b(F.relu(m.a(x)))), format, format)
    sampler = ql.SGLD(model.parameters(), lr=0.1, num_data=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", torch.float16):
        y = model(torch.randn(16, 8))
    scaler.scale((y.float() - 3).pow(2).sum()).backward()
    scaler.step(sampler)
    scaler.update()
    assert scaler.get_scale() == 2.0**23
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
