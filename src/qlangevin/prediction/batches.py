"""Batches: which part is inputs and which labels, the tensors in them, and their way to a device.

    a tensor                the input
    (x, y), (x,)            inputs and labels; inputs alone
    (x1, x2, ..., y)        several inputs, and labels last
    {"x": ..., ...}         keyword arguments, a tokenizer's output too; "labels" or "label" are the labels

Inputs may themselves be a tensor, a tuple of arguments, or a dict of named ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from ..sampling.loader import Loader

__all__ = [
    "batch_size",
    "check_batch",
    "group_batches",
    "is_several",
    "list_tensors",
    "move_batch",
    "split_batch",
    "split_inputs",
    "without_moving",
]

LABELS = ("labels", "label")  # keys of a dict: those of data collators


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the labels of a batch, None if it has no labels; a dict keeps its labels among its inputs."""
    if isinstance(batch, Mapping):
        return batch, next((batch[name] for name in LABELS if name in batch), None)
    if not is_several(batch):
        return batch, None
    if not batch:
        raise ValueError("a batch must be inputs, or inputs and labels, got nothing")
    if len(batch) == 1:
        return batch[0], split_batch(batch[0])[1] if isinstance(batch[0], Mapping) else None
    return (batch[0] if len(batch) == 2 else tuple(batch[:-1])), batch[-1]


def split_inputs(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments and keyword arguments of a model for these inputs; labels of a dict are left out."""
    if isinstance(x, Mapping):
        return (), {name: value for name, value in x.items() if name not in LABELS}
    return (tuple(x), {}) if is_several(x) else ((x,), {})


def is_several(x: Any) -> bool:
    """Return True for a list or tuple of things."""
    return isinstance(x, (list, tuple)) and not isinstance(x, PackedSequence)


def list_tensors(x: Any) -> list[Tensor]:
    """Return the tensors of inputs, also those in nested tuples and dicts."""
    if isinstance(x, Tensor):
        return [x]
    parts: Iterable[Any] = x.values() if isinstance(x, Mapping) else x if is_several(x) else ()
    return [t for part in parts for t in list_tensors(part)]


def check_batch(x: Any, function: str) -> None:
    """Raise TypeError for a loader, a data set or an iterator in the place of a batch; ``function`` is what got it."""
    if isinstance(x, (DataLoader, Loader, Dataset, Iterator)):
        remedy = (
            f"{function}_loader(loader) takes all batches of one" if function != "samples" else "call it for each batch"
        )
        given = "a data set" if isinstance(x, Dataset) else "an iterator" if isinstance(x, Iterator) else "a loader"
        raise TypeError(f"{function} takes the inputs of one batch, got {given}, {type(x).__name__}: {remedy}")


def batch_size(x: Any) -> int:
    """Return the number of examples: the length of the first tensor, 1 if there is none."""
    first = next(iter(list_tensors(x)), None)
    return first.shape[0] if first is not None and first.dim() else 1


def move_batch(x: Any, device: torch.device) -> Any:
    """Move the tensors of inputs to a device; what is there already stays the same object."""
    if isinstance(x, Mapping):
        moved = {name: move_batch(value, device) for name, value in x.items()}
        if all(moved[name] is value for name, value in x.items()):
            return x
        return x.to(device) if hasattr(x, "to") else moved  # a tokenizer's output stays one
    if is_several(x):
        parts = [move_batch(part, device) for part in x]
        if all(a is b for a, b in zip(parts, x, strict=True)):
            return x
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    if isinstance(x, PackedSequence):
        return x.to(device)  # type: ignore[arg-type]
    return x.to(device) if isinstance(x, Tensor) else x


def without_moving(loader: Iterable[Any]) -> Iterable[Any]:
    """Return the batches of a loader; the position of a `Loader`, which belongs to training, does not change."""
    return loader.untouched() if isinstance(loader, Loader) else loader


def group_batches(loader: Iterable[Any], size: int) -> Iterator[list[tuple[Any, Any]]]:
    """Yield inputs and labels of batches, several at a time until they have ``size`` examples."""
    several: list[tuple[Any, Any]] = []
    examples = 0
    for batch in loader:
        several.append(split_batch(batch))
        examples += batch_size(several[-1][0])
        if examples >= size:
            yield several
            several, examples = [], 0
    if several:
        yield several
