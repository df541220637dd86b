"""Kinds of tensors inside a model's forward: activations, parameters, constants, data, and what may hold infinities.

An activation comes from a layer. `propagate` gives the result of any other function the kind that follows from its operands:

    anything with an activation                  an activation
    an activation summed with data, or filled    masked: data may be an attention mask, with -inf in it
    parameters alone (with integers)             a parameter; a float buffer of the running module is a constant
    the rest                                     data: inputs, masks, positions

The kind is a mark on the tensor. A tensor without one that requires a gradient comes from a function that PyTorch does not show
us, such as an `autograd.Function`: it counts as an activation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from torch import Tensor, nn

__all__ = ["Kind", "find_kind", "find_mark", "float_operands", "mark", "note_write", "propagate", "set_kinds"]

LARGEST_CONSTANT = 1e3  # buffers with larger numbers may be masks


class Kind(Enum):
    """The kind of a float tensor."""

    ACTIVATION = "activation"
    MASKED = "masked"
    PARAMETER = "parameter"
    CONSTANT = "constant"
    DATA = "data"


_BY_VALUE = {kind.value: kind for kind in Kind}
_WRITING = frozenset(
    ("__setitem__", "copy_", "fill_", "index_copy_", "index_put_", "put_", "scatter_", "slice_scatter", "zero_")
)
_FILLING = frozenset(
    ("masked_fill", "masked_fill_", "where", "masked_scatter", "masked_scatter_", "index_fill", "index_fill_")
)


def mark(t: Tensor, kind: Kind) -> None:
    """Note the kind on a tensor."""
    t._qlangevin_kind = kind.value  # type: ignore[attr-defined]  # a str, which torch.save and torch.load bear


def find_mark(t: Tensor) -> Kind | None:
    """Return the kind that is noted on a tensor."""
    return _BY_VALUE.get(getattr(t, "_qlangevin_kind", ""))


def find_kind(t: Tensor, module: nn.Module) -> Kind:
    """Return the kind of a float tensor that the forward of a module uses."""
    kind = find_mark(t)
    if kind is not None:
        return kind
    if isinstance(t, nn.Parameter) or any(t is p for p in module._parameters.values()):  # also under functional_call
        return Kind.PARAMETER
    if t.requires_grad:
        return Kind.ACTIVATION if t.grad_fn is not None else Kind.DATA
    is_buffer = any(t is buffer for buffer in module._buffers.values())
    return Kind.CONSTANT if is_buffer and _is_moderate(t) else Kind.DATA


def _is_moderate(buffer: Tensor) -> bool:
    """Return True if no number of a buffer is so large that it may mask; computed once for each change of it."""
    found = getattr(buffer, "_qlangevin_moderate", None)
    version = 0 if buffer.is_inference() else buffer._version
    if found is None or found[0] != version:
        found = version, bool((buffer.abs() <= LARGEST_CONSTANT).all())
        buffer._qlangevin_moderate = found  # type: ignore[attr-defined]
    return bool(found[1])


def float_operands(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the float tensors among the arguments of a function, also those in lists, but no single numbers and no empty ones."""
    for value in (*args, *kwargs.values()):
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(t, Tensor) and t.is_floating_point() and t.dim() and t.numel():
                yield t


def propagate(function: Any, kinds: list[Kind], is_sum: bool = False) -> Kind:
    """Return the kind of the result of a function that is not rounded, from those of its operands."""
    if Kind.MASKED in kinds:
        return Kind.MASKED
    if Kind.ACTIVATION in kinds:
        fills = getattr(function, "__name__", "") in _FILLING or (is_sum and Kind.DATA in kinds)
        return Kind.MASKED if fills else Kind.ACTIVATION
    if not kinds or Kind.DATA in kinds:
        return Kind.DATA
    return Kind.PARAMETER if Kind.PARAMETER in kinds else Kind.CONSTANT


def note_write(function: Any, target: Any, kinds: list[Kind], operands: int) -> None:
    """Note what a function has written into a tensor, the first of its operands: numbers and data may be a mask.

    ``kinds`` are those of the ``operands`` that are float tensors, the target's first.
    """
    if getattr(function, "__name__", "") not in _WRITING or not isinstance(target, Tensor) or not kinds:
        return
    if operands > 1 and kinds[-1] is Kind.ACTIVATION:
        mark(target, Kind.MASKED if kinds[0] is Kind.MASKED else Kind.ACTIVATION)
    elif kinds[0] is Kind.ACTIVATION:
        mark(target, Kind.MASKED)


def set_kinds(result: Any, kind: Kind) -> None:
    """Note a kind on all float tensors of a result."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            mark(result, kind)
    elif isinstance(result, (list, tuple)):
        for value in result:
            set_kinds(value, kind)
