"""`F.multi_head_attention_forward` as the functions it is made of, so that each can be lowered.

PyTorch shows it to a `TorchFunctionMode` as one function. Here its own code runs with every function shown but the last
projection, whose result is the output of the module and is rounded there.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.nn import functional as F
from torch.overrides import _pop_mode_temporarily

__all__ = ["expanded"]


def _hidden_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with _pop_mode_temporarily(), DisableTorchFunctionSubclass():
        return F.linear(x, weight, bias)


def _never(*_: Any) -> bool:
    return False


def _expand(function: Any) -> Any:
    """Return a function with the same code that does not look for overrides of itself."""
    names = function.__globals__ | {"has_torch_function": _never, "linear": _hidden_linear}
    clone = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


expanded = _expand(F.multi_head_attention_forward)
