"""Recurrent modules of several layers, run one layer at a time, so that something can be done with what each gives."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["layer_by_layer"]

Between: TypeAlias = Callable[[nn.Module, Tensor], Tensor]


def layer_by_layer(module: nn.RNNBase, between: Between, x: Any, hx: Any = None) -> tuple[Any, Any]:
    """What the forward of `nn.RNN`, `nn.GRU` or `nn.LSTM` computes, with ``between`` on every layer's output and on the final
    states."""
    directions = 2 if module.bidirectional else 1
    finals: list[Any] = []
    for i in range(module.num_layers):
        rows = slice(i * directions, (i + 1) * directions)
        start = None if hx is None else hx[rows] if isinstance(hx, Tensor) else tuple(h[rows] for h in hx)
        x, final = type(module).forward(_single(module, i, directions), x, start)
        finals.append(final)
        last = i == module.num_layers - 1

        def rounded(out: Tensor, last: bool = last) -> Tensor:
            y = between(module, out)
            return y if last or module.dropout == 0 else nn.functional.dropout(y, module.dropout, module.training)

        x = x._replace(data=rounded(x.data)) if isinstance(x, PackedSequence) else rounded(x)
    if isinstance(finals[0], Tensor):
        return x, between(module, torch.cat(finals))
    return x, tuple(between(module, torch.cat(states)) for states in zip(*finals, strict=True))


def _single(module: nn.RNNBase, i: int, directions: int) -> nn.RNNBase:
    """One layer as a module of its own, with the same parameters."""
    if module.num_layers == 1:
        return module
    one = copy.copy(module)  # its own dict of attributes, the same tensors in it
    names = [name for d in range(directions) for name in module._all_weights[i * directions + d]]
    size = module.input_size if i == 0 else directions * (module.proj_size or module.hidden_size)
    weights = [getattr(module, name) for name in names]
    one.__dict__.update(num_layers=1, dropout=0.0, input_size=size)
    one.__dict__.update(
        _flat_weights=weights, _flat_weights_names=names, _flat_weight_refs=[weakref.ref(w) for w in weights]
    )
    return one
