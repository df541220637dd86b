"""A step inside of a function that `torch.compile` compiles: one operator that its graph has for all of it.

A graph holds tensors and constants; a step has counters, settings that schedules change, and checks. So the graph gets the
number of the sampler, the tensors that the step writes and the gradients, and the operator finds the rest when it runs.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

from torch import Tensor

from ..quantization import operators
from ..quantization.qtensor import QTensor

__all__ = ["register", "trace_step", "trace_zero_grad"]


class Sampler(Protocol):
    """A sampler as the operator sees it."""

    everyone: list[Tensor]
    handle: int

    def step_compiled(self, gradients: dict[Tensor, Tensor], thetas: dict[Tensor, Tensor]) -> None: ...


_samplers: weakref.WeakValueDictionary[int, Sampler] = weakref.WeakValueDictionary()
_handles = itertools.count()


def register(sampler: Sampler) -> int:
    """Return a number for a sampler, by which graphs refer to it."""
    handle = next(_handles)
    _samplers[handle] = sampler
    return handle


def trace_step(sampler: Sampler) -> None:
    """Step all parameters that have gradients by one operator."""
    params = sampler.everyone  # a walk through the groups would have the graph depend on lr
    places = [i for i, p in enumerate(params) if p.grad is not None]
    written, gradients = [], []
    for i in places:
        p = params[i]
        gradients.append(p.grad)
        if isinstance(p, QTensor):
            written.append(p.codes)
            if p.exponents is not None:
                written.append(p.exponents)
        else:
            written.append(p)
    sampler_step_op(sampler.handle, places, written, gradients)


def trace_zero_grad(sampler: Sampler, set_to_none: bool) -> None:
    """Drop all gradients; torch's own method cannot be traced."""
    for p in sampler.everyone:
        if set_to_none:
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()


@operators.operator("sampler_step_", mutates=("written",))
def sampler_step_op(handle: int, places: list[int], written: list[Tensor], gradients: list[Tensor]) -> None:
    """Step the parameters at some places among all of a sampler's, in the memory given for each: numbers, or codes and exponents.

    A compiler may give copies in place of the parameters, and copy back what was written.
    """
    sampler = _samplers[handle]
    params = sampler.everyone
    memory, thetas, found = iter(written), dict[Tensor, Tensor](), dict[Tensor, Tensor]()
    for i, gradient in zip(places, gradients, strict=True):
        p = params[i]
        found[p] = gradient
        if isinstance(p, QTensor):
            codes = next(memory)
            thetas[p] = p.with_codes(codes, None if p.exponents is None else next(memory))
        else:
            thetas[p] = next(memory)
    sampler.step_compiled(found, thetas)


@operators.fake("sampler_step_")
def _(handle: int, places: list[int], written: list[Tensor], gradients: list[Tensor]) -> None:
    return None
