"""A model run with many sets of weights: one after the other, or small models with all of them at once.

One after the other, a sample is decoded, used, and let go of. At once (`torch.func.vmap`) their weights are stacked, and a
matrix product becomes a batch of them. That pays where a sample's own products are so small that calling them takes longer
than computing them; how large that is was measured. Both give the same numbers but for the order of float sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import PackedSequence

from .. import lowering
from ..storage.model_tensors import named_tensors, unwrap

__all__ = ["Ensemble", "evaluating", "inputs_of", "reestimated"]

Tensors = Mapping[str, Tensor]

STACK = 1 << 24  # floats of stacked weights at a time: 64 MB
WORK = 1 << 26  # weights times examples: beyond that a product takes longer than its call
CONVOLVED = 1 << 14  # numbers that go into a model with convolutions, which CPUs do not batch well over weights
STACKED_INPUT = 1 << 26  # samples times numbers that go in: what is computed has about their size

# While a model runs, its weights are not its own: one thread at a time.
_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


class Ensemble:
    """A model and the sets of weights it is to be run with; ``decode`` gives those of the i-th."""

    def __init__(self, model: nn.Module, count: int, decode: Callable[[int], Tensors], vectorize: bool | None) -> None:
        self.model, self.count, self.decode = unwrap(model), count, decode
        self.weights = sum(p.numel() for p in self.model.parameters())
        kinds = {type(module) for module in self.model.modules()}
        self.recurrent = any(issubclass(kind, nn.RNNBase) for kind in kinds)
        self.convolves = any(issubclass(kind, nn.modules.conv._ConvNd) for kind in kinds)
        self.places = Places(self.model)
        self.vectorize = vectorize
        self.refused = False  # to be vectorized
        self.kept: Tensors | None = None

    def outputs(self, inputs: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """(i, outputs of some samples for inputs[i]), (sample, example, ...), until all samples have been there for all i."""
        with _locks.setdefault(self.model, RLock()), torch.no_grad(), evaluating(self.model):
            at_once = self._all_at_once({i: x for i, x in enumerate(inputs) if self._at_once(x)})
            for i, found in at_once.items():
                yield from ((i, y) for y in found)
            singly = [i for i in range(len(inputs)) if i not in at_once]
            for s in range(self.count if singly else 0):
                tensors = self.decode(s)
                for i in singly:
                    yield i, self._run(tensors, inputs[i]).unsqueeze(0)
                del tensors  # before the next is decoded

    def _at_once(self, x: Any) -> bool:
        """Whether these inputs are to go through with many samples at a time."""
        if self.vectorize is not None:
            return self.vectorize
        first = next(iter(tensors_in(x)), None)
        if self.count < 2 or self.recurrent or self.refused or first is None or self.weights > STACK // 2:
            return False
        work = self.weights * (first.shape[0] if first.dim() else 1)
        return work <= WORK and not (self.convolves and first.numel() > CONVOLVED)

    def _all_at_once(self, inputs: dict[int, Any]) -> dict[int, list[Tensor]]:
        """The outputs for these inputs; without those of a model that turns out not to be able to.

        What depends on the value of a weight, or has no batched form, has to be run singly.
        """
        found: dict[int, list[Tensor]] = {i: [] for i in inputs}
        with looping_allowed(self.vectorize is not None):
            try:
                for stack in self._stacks() if inputs else ():
                    for i, x in inputs.items():
                        found[i] += self._stacked(stack, x)
            except Exception:
                if self.vectorize:
                    raise
                self.refused, self.kept = True, None
                return {}
        return found

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
        counted = [t for t in tensors_in(x) if not t.is_inference()]
        versions = [t._version for t in counted]
        with self.places.filled(tensors):
            output = self.model(*args, **kwargs)
        if [t._version for t in counted] != versions:
            raise ValueError(
                "the model changes its input in place, so that the next sample would see another; let it copy"
            )
        if not isinstance(output, Tensor) or not output.dtype.is_floating_point:
            kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(
                f"the model must return a tensor of floating-point numbers, got {kind}; wrap it in one that does"
            )
        return output


class Places:
    """Where a model's parameters and persistent buffers are. `torch.func.functional_call` does the same each time anew."""

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise TypeError("the weights of a scripted module cannot be exchanged; give the module it was made from")
        first = {id(t): name for name, t in named_tensors(model).items()}
        self.places: list[tuple[dict[str, Any], str, str, bool]] = [
            (slots, key, first[id(t)], slots is module._buffers)
            for module in model.modules()
            for slots in (module._parameters, module._buffers)
            for key, t in slots.items()
            if id(t) in first
        ]

    @contextmanager
    def filled(self, tensors: Tensors) -> Iterator[None]:
        """Within this context other tensors are in these places; copies of buffers, because a model may write to them."""
        before = [slots[key] for slots, key, _, _ in self.places]
        try:
            for slots, key, name, is_buffer in self.places:
                slots[key] = tensors[name].clone() if is_buffer else tensors[name]
            yield
        finally:
            for (slots, key, _, _), t in zip(self.places, before, strict=True):
                slots[key] = t


@contextmanager
def looping_allowed(allowed: bool) -> Iterator[None]:
    """Whether vmap may do in a loop, with a warning, what has no batched form."""
    switch: Any = torch._C._functorch
    before = switch._is_vmap_fallback_enabled()
    switch._set_vmap_fallback_enabled(allowed and before)
    try:
        yield
    finally:
        switch._set_vmap_fallback_enabled(before)


def inputs_of(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: a tensor, a tuple of arguments, or a dict of named ones."""
    if isinstance(x, Mapping):
        return (), dict(x)
    several = isinstance(x, (list, tuple)) and not isinstance(x, PackedSequence)
    return (tuple(x), {}) if several else ((x,), {})


def tensors_in(x: Any) -> list[Tensor]:
    args, kwargs = inputs_of(x)
    return [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within this context the model is in evaluation; afterwards every part of it is as it was, whatever it has noted."""
    before = [(module, module.training, module.__dict__.copy()) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module.training = training


@torch.no_grad()
def reestimated(model: nn.Module, tensors: Tensors, batches: Iterator[Any]) -> dict[str, Tensor]:
    """Statistics of batch normalization for these weights: averages over batches of data, weighted by their size."""
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    }
    blank = {
        full: torch.zeros_like(tensors[full])
        for name in norms
        for kind in ("running_mean", "running_var", "num_batches_tracked")
        if (full := f"{name}.{kind}".lstrip("."))
    }
    momenta, counts = {name: module.momentum for name, module in norms.items()}, lowering.state_dict(model)
    with evaluating(model):
        try:
            lowering.load_state_dict(model, dict.fromkeys(counts, 0))  # so that rounding is the same each time
            seen = 0
            for x in batches:
                args, kwargs = inputs_of(x)
                new = len(tensors_in(x)[0])
                seen += new
                for module in norms.values():
                    module.train()
                    module.momentum = new / seen
                functional_call(model, {**tensors, **blank}, args, kwargs)
        finally:
            lowering.load_state_dict(model, counts)
            for name, module in norms.items():
                module.momentum = momenta[name]
    if not all(int(count) for name, count in blank.items() if name.endswith("num_batches_tracked")):
        raise ValueError("batch_norm must be a loader that gives batches each time it is gone through; it gave none")
    return blank
