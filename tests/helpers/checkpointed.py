"""Networks whose blocks are checkpointed in one mode or another, and the gradients of several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qlangevin as ql
from qlangevin import lowering

Mode: TypeAlias = Literal["reentrant", "hooks"] | None
MODES: list[Mode] = ["reentrant", "hooks"]


def run_region(mode: Mode, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function, in a checkpointed region unless the mode is None."""
    if mode is None:
        return function(*args)
    return checkpoint(function, *args, use_reentrant=mode == "reentrant", **options)


class Block(nn.Module):
    """Layers of several kinds. The first is a ReLU, which treats inputs on the grid in a way of its own."""

    def __init__(self, size: int, shared: nn.Module) -> None:
        super().__init__()
        self.relu, self.a, self.shared, self.norm = nn.ReLU(), nn.Linear(size, size), shared, nn.LayerNorm(size)
        self.act, self.b, self.drop = nn.GELU(), nn.Linear(size, size), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.norm(self.shared(self.a(self.relu(x)))))
        z: Tensor = self.drop(self.b(y))
        return z + x


class Blocks(nn.Module):
    """Three blocks, each a region; one layer is shared by all of them, and runs once more at the end."""

    def __init__(self, mode: Mode = None, size: int = 48, inner: Mode = None) -> None:
        super().__init__()
        shared = nn.Linear(size, size)
        self.mode, self.inner, self.options = mode, inner, dict[str, Any]()
        self.first, self.blocks = nn.Linear(size, size), nn.ModuleList(Block(size, shared) for _ in range(3))
        self.last = shared

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = run_region(self.mode, lambda y, b=block: run_region(self.inner, b, y), x, **self.options)
        y: Tensor = self.last(x)
        return y


def build_blocks(mode: Mode = None, inner: Mode = None, size: int = 48, **settings: Any) -> Blocks:
    """Return lowered blocks, the same weights for each mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Blocks(mode, size, inner)
    return ql.lower(model, "bfp8", "bfp8", seed=3, **settings)


def batches(count: int, size: int = 48) -> list[Tensor]:
    """Return inputs that require gradients; the generator of dropout begins anew."""
    torch.manual_seed(1)
    return [torch.randn(32, size).requires_grad_() for _ in range(count)]


def step_results(
    model: nn.Module, inputs: list[Tensor], call: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """Return the outputs of a forward and a backward on each input, the gradients, and the runs counted."""
    found = []
    for x in inputs:
        model.zero_grad()
        y = (call or model)(x)
        y.square().sum().backward()
        found += [y.detach(), *gradients_of(model, x)]
        found.append(torch.tensor(list(lowering.state_dict(model).values())))
    return found


def gradients_of(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Return the gradients of inputs and parameters."""
    return [g for t in (*inputs, *model.parameters()) if (g := t.grad) is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return True if all tensors are equal, bit for bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
