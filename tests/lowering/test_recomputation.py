"""Intermediate results of leaf modules, computed again in backward: the same gradients, without the floats."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qlangevin as ql
from qlangevin import native
from qlangevin.lowering.recomputation import PURE, CallRecord

needs_kernels = pytest.mark.skipif(not native.available, reason="without kernels there are no marks of the grid")


class WrittenGELU(nn.Module):
    """GELU as GPT-2 has it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class RMSNorm(nn.Module):
    """RMSNorm as Llama has it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class InPlace(nn.Module):
    """Writes into a result that was saved before, and into what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x * 0.1)
        z = y * y
        z.mul_(0.5)
        return z.sigmoid_() * x


class Random(nn.Module):
    """Draws numbers, which backward must not draw again."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.rand_like(x) * torch.sigmoid(x)


class Counting(nn.Module):
    """Counts how often its code runs, and takes another way each time."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(x) * torch.sigmoid(x) * self.runs


class Twice(torch.autograd.Function):
    """A function that modes do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> Tensor:
        return 2 * e


class Unseen(nn.Module):
    """Goes on with the result of a function that modes do not see."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Twice.apply(torch.tanh(x))  # type: ignore[no-untyped-call]
        return y.exp() * x


LEAVES = [WrittenGELU, RMSNorm, InPlace, Random, Counting, Unseen]


def network(leaf: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), leaf(), nn.Linear(64, 4))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leaf", LEAVES)
def test_gradients_are_those_without_codes(leaf: type[nn.Module], dtype: torch.dtype) -> None:
    model = network(leaf).to(dtype)
    if leaf is RMSNorm and dtype is torch.bfloat16:
        model[2].to(torch.float32)  # its result
        model[1].to(torch.float32)
    other, x = copy.deepcopy(model), torch.randn(32, 16, dtype=dtype)
    ql.lower(model, "bfp8", "bfp8")
    ql.lower(other, "bfp8", "bfp8", save_codes=False)
    for _ in range(2):
        for a, b in zip(gradients(model, x), gradients(other, x), strict=True):
            assert torch.equal(a, b)


@needs_kernels
@pytest.mark.parametrize("leaf", [WrittenGELU, RMSNorm])
def test_no_intermediate_results_are_kept(leaf: type[nn.Module]) -> None:
    model = ql.lower(network(leaf), "bfp8", "bfp8")
    rows = {row.name: row for row in ql.lowering.summary(model, torch.randn(32, 16)).rows}
    assert rows["1"].float_bytes <= 32 * 4  # RMSNorm: a number for each example
    assert rows["1"].code_bytes in (0, 32 * 64 + 32)  # those of its input, unless they were counted before


def test_the_code_of_a_module_runs_once() -> None:
    model = ql.lower(network(Counting), "bfp8", "bfp8")
    gradients(model, torch.randn(32, 16))
    leaf = model[1]
    assert isinstance(leaf, Counting)
    assert leaf.runs == 1


@needs_kernels
def test_calls_are_repeated_once_in_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat, calls = CallRecord._repeat, []

    def record(self: CallRecord) -> Any:
        calls.append(self)
        return repeat(self)

    monkeypatch.setattr(CallRecord, "_repeat", record)
    model = ql.lower(network(WrittenGELU), "bfp8", "bfp8")
    loss = model(torch.randn(32, 16)).square().sum()
    found = []
    for i in range(2):
        model.zero_grad()
        loss.backward(retain_graph=i == 0)
        found.append([p.grad for p in model.parameters()])
        assert len(calls) == i + 1
        assert calls[0]._values == {}
    for a, b in zip(*found, strict=True):
        assert a is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    class Outer(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.inner, self.checkpointed = network(WrittenGELU), checkpointed

        def forward(self, x: Tensor) -> Tensor:
            if not self.checkpointed:
                return self.inner(x)  # type: ignore[no-any-return]
            return checkpoint(self.inner, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    found = []
    for checkpointed in (False, True):
        model = ql.lower(Outer(checkpointed), "bfp8", "bfp8")
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        found.append(gradients(model, x))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_autocast() -> None:
    model = network(WrittenGELU)
    other, x = copy.deepcopy(model), torch.randn(32, 16)
    ql.lower(model, "bfp8", "bfp8")
    ql.lower(other, "bfp8", "bfp8", save_codes=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = [gradients(m, x) for m in (model, other)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_second_derivatives() -> None:
    found = []
    for save_codes in (True, False):
        model = ql.lower(network(WrittenGELU), "bfp8", save_codes=save_codes)
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [x, *model.parameters()]))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_functions_that_write_or_draw_are_not_repeated() -> None:
    names = {getattr(f, "__name__", "") for f in PURE}
    assert not {name for name in names if name.endswith("_") and not name.endswith("__")}
    assert not names & {"dropout", "rand_like", "bernoulli", "normal", "copy_", "__iadd__", "__setitem__"}
    assert torch.tanh in PURE
    assert Tensor.__rmul__ in PURE
