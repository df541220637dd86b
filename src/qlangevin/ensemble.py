"""A model run with many sets of weights: one after the other, or small models with all of them at once.

One after the other, a sample is decoded, used, and let go of. At once (`torch.func.vmap`) their weights are stacked, and a
matrix product becomes a batch of them. That pays where a sample's own products are so small that calling them takes longer
than computing them; how large that is was measured. Both give the same numbers but for the order of float sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from . import lowering
from .contents import unwrapped

__all__ = ["Ensemble", "evaluating", "inputs_of", "reestimated"]

Tensors = Mapping[str, Tensor]

STACK = 1 << 24  # floats of stacked weights at a time: 64 MB
WORK = 1 << 26  # weights times examples: beyond that a product takes longer than its call
CONVOLVED = 1 << 14  # numbers that go into a model with convolutions, which CPUs do not batch well over weights
STACKED_INPUT = 1 << 26  # samples times numbers that go in: what is computed has about their size


class Ensemble:
    """A model and the sets of weights it is to be run with; ``decode`` gives those of the i-th."""

    def __init__(self, model: nn.Module, count: int, decode: Callable[[int], Tensors], vectorize: bool | None) -> None:
        self.model, self.count, self.decode = unwrapped(model), count, decode
        self.weights = sum(p.numel() for p in self.model.parameters())
        kinds = {type(module) for module in self.model.modules()}
        self.recurrent = any(issubclass(kind, nn.RNNBase) for kind in kinds)
        self.convolves = any(issubclass(kind, nn.modules.conv._ConvNd) for kind in kinds)
        self.vectorize = vectorize
        self.can_vectorize: bool | None = None  # nobody knows yet
        self.kept: Tensors | None = None

    def outputs(self, inputs: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """(i, outputs of some samples for inputs[i]), (sample, example, ...), until all samples have been there for all i."""
        with torch.no_grad(), evaluating(self.model):
            at_once = [i for i, x in enumerate(inputs) if self._at_once(x)]
            singly = [i for i in range(len(inputs)) if i not in at_once]
            if at_once:
                for stack in self._stacks():
                    for i in at_once:
                        yield from ((i, y) for y in self._stacked(stack, inputs[i]))
            for s in range(self.count if singly else 0):
                tensors = self.decode(s)
                for i in singly:
                    yield i, self._run(tensors, inputs[i]).unsqueeze(0)

    def _at_once(self, x: Any) -> bool:
        """Whether these inputs go through with many samples at a time."""
        if self.vectorize is not None:
            return self.vectorize
        first = next(iter(tensors_in(x)), None)
        if self.count < 2 or self.recurrent or first is None or self.weights > STACK // 2:
            return False
        work = self.weights * (first.shape[0] if first.dim() else 1)
        if work > WORK or (self.convolves and first.numel() > CONVOLVED):
            return False
        if self.can_vectorize is None:
            self.can_vectorize = self._try_two(x)
        return self.can_vectorize

    def _try_two(self, x: Any) -> bool:
        """Not every model can: what depends on the value of a weight, or has no batched form, has to be run singly."""
        two = {name: torch.stack((t, t)) for name, t in self.decode(0).items()}
        torch_loops: Any = torch._C._functorch
        before = torch_loops._is_vmap_fallback_enabled()
        torch_loops._set_vmap_fallback_enabled(False)  # which would run them singly too, and warn
        try:
            list(self._stacked(two, x))
        except Exception:
            return False
        finally:
            torch_loops._set_vmap_fallback_enabled(before)
        return True

    def _stacks(self) -> Iterator[Tensors]:
        """The weights of as many samples at a time as there is room for; kept if that is all of them."""
        if self.kept is not None:
            yield self.kept
            return
        size = max(1, STACK // max(self.weights, 1))
        for start in range(0, self.count, size):
            members = [self.decode(s) for s in range(start, min(start + size, self.count))]
            stack = {name: torch.stack([tensors[name] for tensors in members]) for name in members[0]}
            if len(members) == self.count:
                self.kept = stack
            yield stack

    def _stacked(self, stack: Tensors, x: Any) -> Iterator[Tensor]:
        samples = len(next(iter(stack.values())))
        numbers = sum(t.numel() for t in tensors_in(x))
        size = max(1, STACKED_INPUT // max(numbers, 1))
        for start in range(0, samples, size):
            some = {name: t[start : start + size] for name, t in stack.items()}
            yield vmap(lambda tensors: self._run(tensors, x), randomness="error")(some)

    def _run(self, tensors: Tensors, x: Any) -> Tensor:
        args, kwargs = inputs_of(x)
        output = functional_call(self.model, dict(tensors), args, kwargs)
        if not isinstance(output, Tensor):
            raise TypeError(f"the model must return a tensor, got {type(output).__name__}; wrap it in one that does")
        return output


def inputs_of(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: a tensor, a tuple of arguments, or a dict of named ones."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x), {}) if isinstance(x, (list, tuple)) else ((x,), {})


def tensors_in(x: Any) -> list[Tensor]:
    args, kwargs = inputs_of(x)
    return [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context the model is in evaluation; afterwards every part of it is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def reestimated(model: nn.Module, tensors: Tensors, batches: Iterator[Any]) -> dict[str, Tensor]:
    """Statistics of batch normalization for these weights: averages over batches of data, each of the same weight."""
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    }
    blank = {
        f"{name}.{kind}": torch.zeros_like(tensors[f"{name}.{kind}"])
        for name in norms
        for kind in ("running_mean", "running_var", "num_batches_tracked")
    }
    momenta, counts = {name: module.momentum for name, module in norms.items()}, lowering.state_dict(model)
    with evaluating(model):
        try:
            lowering.load_state_dict(model, dict.fromkeys(counts, 0))  # so that rounding is the same each time
            for module in norms.values():
                module.train()
                module.momentum = None  # which means: the plain average
            for x in batches:
                args, kwargs = inputs_of(x)
                functional_call(model, {**tensors, **blank}, args, kwargs)
        finally:
            lowering.load_state_dict(model, counts)
            for name, module in norms.items():
                module.momentum = momenta[name]
    if norms and not all(int(blank[f"{name}.num_batches_tracked"]) for name in norms):
        raise ValueError("batch_norm must be a loader that gives batches each time it is gone through; it gave none")
    return blank
