"""State dicts of samplers, schedules and loaders as JSON and tensors: like pickle, but reading executes nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..quantization.qtensor import QTensor
from .files import DamagedError
from .tensor_file import DTYPES

__all__ = ["flatten", "random_state", "set_random_state", "unflatten"]


def flatten(tree: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Turn a tree of dicts, lists, tuples, numbers, strings and tensors into JSON; put the tensors into ``tensors``.

    Numbers, strings, lists and None stay as they are. Anything else becomes an object with one key, which names its type.
    ``where`` is the path to the tree, for names of tensors and error messages.
    """
    if isinstance(tree, Tensor):
        if tree.layout != torch.strided or tree.dtype not in DTYPES or tree.is_meta or isinstance(tree, QTensor):
            kind = f"{type(tree).__name__} of {tree.dtype}, {tree.layout}, on {tree.device}"
            raise TypeError(
                f"{where} is a {kind}, which cannot be saved: only plain tensors that are stored as they are"
            )
        name = f"{where}#{len(tensors)}".encode("ascii", "backslashreplace").decode()
        tensors[name] = tree.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return {"tensor": name}
    if isinstance(tree, np.generic):
        tree = tree.item()
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"float": str(tree)}
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, Mapping):
        pairs = [[flatten(k, tensors, where), flatten(v, tensors, f"{where}.{k}")] for k, v in tree.items()]
        return {"counter" if isinstance(tree, Counter) else "dict": pairs}
    if isinstance(tree, (list, tuple)):
        items = [flatten(item, tensors, f"{where}.{i}") for i, item in enumerate(tree)]
        return items if isinstance(tree, list) else {"tuple": items}
    raise TypeError(
        f"{where} is a {type(tree).__name__}, which cannot be saved: only numbers, words, tensors, and lists, tuples and "
        "dicts of them, because nothing that is read is ever executed"
    )


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert `flatten`; tensors are copied."""
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    try:
        [(kind, content)] = tree.items()
        if kind == "tensor":
            return tensors[content].clone()
        if kind == "float":
            return float(content)
        if kind == "tuple":
            return tuple(unflatten(item, tensors) for item in content)
        if kind in ("dict", "counter"):
            found = {unflatten(k, tensors): unflatten(v, tensors) for k, v in content}
            return Counter(found) if kind == "counter" else found
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise DamagedError("it holds an entry that is of no known kind")


def random_state() -> dict[str, Any]:
    """Return the states of the generators of torch, NumPy and Python, which dropout and data sets draw from."""
    import random

    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what `random_state` returned."""
    import random

    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    if keys.dtype != torch.int64:
        raise TypeError(f"the state of NumPy's generator must be of int64, got {keys.dtype}")
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
