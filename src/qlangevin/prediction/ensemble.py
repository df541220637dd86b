"""A model evaluated with many sets of weights: one after the other, or vectorized.

One after the other, a sample is decoded, used, and freed. Vectorized (`torch.func.vmap`), the weights of many samples are
stacked, and a matrix product becomes a batch of them. That pays where one sample's products are so small that calling them takes
longer than computing them; the limits below were measured. Both give the same numbers but for the order of float sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

from .. import lowering
from .._warnings import warn_once
from ..storage.model_tensors import named_tensors, to_plain, unwrap
from .batches import batch_size, list_tensors
from .calling import Forward, call_model, find_output

__all__ = ["Ensemble", "estimate_batch_norm", "evaluation_mode", "exclusively"]

Tensors = Mapping[str, Tensor]
Stacked = tuple[Tensor, bool]  # a tensor of many samples and True, or one that they share and False

MAX_STACK = 1 << 24  # floats of stacked weights at a time: 64 MB
MAX_WORK = 1 << 26  # weights times examples: beyond that a product takes longer than its call
MAX_CONVOLVED = 1 << 14  # input elements of a model with convolutions, which CPUs do not batch well over weights
MAX_STACKED_INPUT = 1 << 26  # samples times input elements: activations are about as large

# An evaluation exchanges the weights of the model: one thread at a time.
_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def exclusively(model: nn.Module) -> Any:
    """Return the lock of a model, a context manager."""
    return _locks.setdefault(model, RLock())


class Ensemble:
    """A model and the ``count`` sets of weights to evaluate it with; ``decode(i)`` returns the i-th."""

    def __init__(
        self,
        model: nn.Module,
        count: int,
        decode: Callable[[int], Tensors],
        vectorize: bool | None,
        forward: Forward | None = None,
    ) -> None:
        self.model, self.count, self.decode, self.forward = unwrap(model), count, decode, forward
        self.weights = sum(p.numel() for p in self.model.parameters())
        kinds = {type(module) for module in self.model.modules()}
        self.recurrent = any(issubclass(kind, nn.RNNBase) for kind in kinds)
        self.convolves = any(issubclass(kind, nn.modules.conv._ConvNd) for kind in kinds)
        self.slots = WeightSlots(self.model)
        self.vectorize = vectorize
        self.vmap_failed = False  # it cannot transform the model
        self.vmap_limit = math.inf  # input elements with which it ran out of memory
        self.given: set[str] = set()  # warnings
        self.kept_stack: Mapping[str, Stacked] | None = None  # if it holds all samples

    def outputs(self, inputs: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
        """Yield (i, outputs (sample, example, ...) of some samples for inputs[i]), in all those of every sample for every i."""
        with exclusively(self.model), torch.no_grad(), evaluation_mode(self.model):
            vectorized = self._evaluate_vectorized({i: x for i, x in enumerate(inputs) if self._pays_to_vectorize(x)})
            for i, found in vectorized.items():
                yield from ((i, y) for y in found)
            singly, failed = [i for i in range(len(inputs)) if i not in vectorized], self._failure
            for s in range(self.count if singly else 0):
                tensors = self.decode(s)
                for i in singly:
                    yield i, self._call_model(tensors, inputs[i]).unsqueeze(0)
                del tensors  # before the next is decoded
            self.vmap_failed |= failed  # else what failed was not vmap: one after the other fails, too

    def _pays_to_vectorize(self, x: Any) -> bool:
        """Return True if these inputs are to be evaluated with many samples at a time."""
        if self.vectorize is not None:
            return self.vectorize
        first = next(iter(list_tensors(x)), None)
        if self.count < 2 or self.recurrent or self.vmap_failed or first is None or self.weights > MAX_STACK // 2:
            return False
        if _count_elements(x) >= self.vmap_limit:
            return False
        work = self.weights * batch_size(x)
        return work <= MAX_WORK and not (self.convolves and first.numel() > MAX_CONVOLVED)

    def _evaluate_vectorized(self, inputs: dict[int, Any]) -> dict[int, list[Tensor]]:
        """Return the outputs for these inputs, or none if vmap cannot transform the model, or memory does not suffice.

        It cannot if control flow depends on a weight, or an operation has no batched form.
        """
        self._failure = False
        found: dict[int, list[Tensor]] = {i: [] for i in inputs}
        with allow_vmap_fallback(self.vectorize is not None):
            try:
                for stack in self._stack_weights() if inputs else ():
                    for i, x in inputs.items():
                        found[i] += self._call_stacked(stack, x)
            except Exception as error:
                if self.vectorize:
                    raise
                self.kept_stack, self._failure = None, not _is_out_of_memory(error)
                if not self._failure:
                    self._limit_vmap(max(map(_count_elements, inputs.values())))
                return {}
        return found

    def _limit_vmap(self, elements: int) -> None:
        """Vectorize only smaller inputs from here on."""
        self.vmap_limit = elements
        warn_once(
            self.given,
            "memory",
            f"memory did not suffice to evaluate many samples at once for inputs of {elements} numbers: these are evaluated one "
            "sample after the other, and so are larger ones; vectorize=False always does so",
            stacklevel=6,
        )

    def _stack_weights(self) -> Iterator[Mapping[str, Stacked]]:
        """Yield the stacked weights of as many samples at a time as `MAX_STACK` allows; keep them if that is all samples."""
        if self.kept_stack is not None:
            yield self.kept_stack
            return
        size = max(1, MAX_STACK // max(self.weights, 1))
        for start in range(0, self.count, size):
            members = [self.decode(s) for s in range(start, min(start + size, self.count))]
            stack = _stack(members)
            if len(members) == self.count:
                self.kept_stack = stack
            yield stack

    def _call_stacked(self, stack: Mapping[str, Stacked], x: Any) -> Iterator[Tensor]:
        shared = {name: t for name, (t, many) in stack.items() if not many}
        several = {name: t for name, (t, many) in stack.items() if many}
        samples = len(next(iter(several.values())))
        elements = _count_elements(x)
        size = max(1, MAX_STACKED_INPUT // max(elements, 1))
        for start in range(0, samples, size):
            some = {name: t[start : start + size] for name, t in several.items()}
            yield vmap(lambda tensors: self._call_model({**shared, **tensors}, x), randomness="error")(some)

    def _call_model(self, tensors: Tensors, x: Any) -> Tensor:
        counted = [t for t in list_tensors(x) if not t.is_inference()]
        versions = [t._version for t in counted]
        with self.slots.fill(tensors):
            output = call_model(self.model, x, self.forward)
        if [t._version for t in counted] != versions:
            raise ValueError(
                "the model changes its input in place, so that the next sample would see another; let it copy"
            )
        return find_output(output, self.forward)


class WeightSlots:
    """The dict entries of a model's modules that hold its parameters and persistent buffers, found once.

    `torch.func.functional_call` looks for them at every call.
    """

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise TypeError("the weights of a scripted module cannot be exchanged; give the module it was made from")
        first = {id(t): name for name, t in named_tensors(model).items()}
        self.slots: list[tuple[dict[str, Any], str, str, bool]] = [
            (entries, key, first[id(t)], entries is module._buffers)
            for module in model.modules()
            for entries in (module._parameters, module._buffers)
            for key, t in entries.items()
            if id(t) in first
        ]

    @contextmanager
    def fill(self, tensors: Tensors, copy_buffers: bool = True) -> Iterator[None]:
        """Exchange these tensors within this context; buffers are copied, because a model may write to them."""
        before = [(entries, key, entries[key]) for entries, key, _, _ in self.slots]
        try:
            for entries, key, name, is_buffer in self.slots:
                entries[key] = tensors[name].clone() if is_buffer and copy_buffers else tensors[name]
            yield
        finally:
            for entries, key, t in before:
                entries[key] = t


@contextmanager
def allow_vmap_fallback(allowed: bool) -> Iterator[None]:
    """Allow or forbid vmap to loop, with a warning, over operations that have no batched form."""
    switch: Any = torch._C._functorch
    before = switch._is_vmap_fallback_enabled()
    switch._set_vmap_fallback_enabled(allowed and before)
    try:
        yield
    finally:
        switch._set_vmap_fallback_enabled(before)


def _stack(members: Sequence[Tensors]) -> dict[str, Stacked]:
    """Stack the tensors of several samples; those that they share, such as frozen parameters, stay alone."""
    shared = {name for name, t in members[0].items() if all(other[name] is t for other in members)}
    shared = set() if len(members) == 1 or len(shared) == len(members[0]) else shared
    return {
        name: (to_plain(t), False)
        if name in shared
        else (torch.stack([to_plain(other[name]) for other in members]), True)
        for name, t in members[0].items()
    }


def _count_elements(x: Any) -> int:
    return sum(t.numel() for t in list_tensors(x))


def _is_out_of_memory(error: Exception) -> bool:
    """Return True for errors of allocation; that of torch on the CPU is a RuntimeError."""
    words = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed", "bad_alloc")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(w in str(error).lower() for w in words)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; at the end restore that and all other attributes of its modules."""
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
def estimate_batch_norm(
    model: nn.Module, tensors: Tensors, batches: Iterator[Any], forward: Forward | None = None
) -> dict[str, Tensor]:
    """Estimate the statistics of batch normalization for these weights: averages over batches, weighted by their size."""
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    }
    statistics = {
        full: torch.zeros_like(tensors[full])
        for name in norms
        for kind in ("running_mean", "running_var", "num_batches_tracked")
        if (full := f"{name}.{kind}".lstrip("."))
    }
    momenta, counts = {name: module.momentum for name, module in norms.items()}, lowering.state_dict(model)
    with evaluation_mode(model), WeightSlots(model).fill({**tensors, **statistics}, copy_buffers=False):
        try:
            lowering.load_state_dict(model, dict.fromkeys(counts, 0))  # the same rounding for every sample
            seen = 0
            for x in batches:
                new = batch_size(x)
                seen += new
                for module in norms.values():
                    module.train()
                    module.momentum = new / seen
                call_model(model, x, forward)
        finally:
            lowering.load_state_dict(model, counts)
            for name, module in norms.items():
                module.momentum = momenta[name]
    if not all(int(count) for name, count in statistics.items() if name.endswith("num_batches_tracked")):
        raise ValueError("batch_norm must be a loader that gives batches each time it is gone through; it gave none")
    return statistics
