"""The functions that `lower` treats as layers, by name, and when a call of one is rounded.

A call is judged by the kinds of its operands (see `operand_kinds`). Views, indexing, casts and all functions that are not in the
table give what PyTorch gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from .operand_kinds import Kind

__all__ = ["FUNCTIONS", "Entry", "FunctionChoice", "choose_functions", "find_entry", "is_question", "why_not"]

Rule: TypeAlias = Literal["layer", "table", "map", "sum", "product", "matmul", "biased", "join", "mean", "attention"]
FunctionChoice: TypeAlias = bool | str | Callable[..., Any] | Iterable[str | Callable[..., Any]]


class Entry(NamedTuple):
    """A function: its name, the rule that decides, and what its backward reads."""

    name: str
    rule: Rule
    own_output: bool = True
    """The result is memory of its own that backward does not read: Q_A may be written into it."""
    keeps_grid: bool = False
    """The result is some of the numbers of the first operand."""


_RULES: dict[Rule, str] = {
    "layer": "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d batch_norm layer_norm "
    "rms_norm group_norm instance_norm local_response_norm normalize",
    "table": "embedding embedding_bag",
    "map": "relu relu6 leaky_relu elu selu celu gelu silu mish glu prelu rrelu hardtanh hardswish hardsigmoid hardshrink "
    "softplus softsign softshrink sigmoid tanh tanhshrink threshold logsigmoid softmax softmin gumbel_softmax dropout "
    "dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout max_pool1d max_pool2d max_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d lp_pool1d lp_pool2d fractional_max_pool2d fractional_max_pool3d interpolate upsample",
    "sum": "add sub rsub",
    "product": "mul div true_divide multiply divide addcmul",
    "matmul": "matmul mm bmm mv einsum tensordot",
    "biased": "addmm baddbmm addbmm addmv",
    "join": "cat concat concatenate stack hstack vstack dstack",
    "mean": "mean",
    "attention": "scaled_dot_product_attention",
}  # fmt: skip

_SPECIAL_METHODS = {
    "add": "__add__ __radd__ __iadd__", "sub": "__sub__ __isub__", "rsub": "__rsub__", "mul": "__mul__ __rmul__ __imul__",
    "div": "__truediv__ __itruediv__ __div__ __idiv__", "matmul": "__matmul__ __rmatmul__ __imatmul__",
}  # fmt: skip

# Functions whose backward reads their result, or that may return their input: it must not be overwritten.
_KEPT_RESULTS = (
    "sigmoid tanh softmax softmin gumbel_softmax selu celu elu leaky_relu rrelu normalize scaled_dot_product_attention lp_pool1d "
    "lp_pool2d alpha_dropout hardsigmoid softsign threshold relu6 hardtanh glu prelu logsigmoid upsample interpolate dropout "
    "dropout1d dropout2d dropout3d feature_alpha_dropout relu"
)
_READS_RESULT = frozenset(_KEPT_RESULTS.split())


def _functions_of(name: str) -> list[Any]:
    """Return all callables of PyTorch that compute a function: of its modules and methods, in place or not."""
    suffixes = ("", "_", "_with_indices")
    found = [getattr(place, name + suffix, None) for place in (F, torch, Tensor) for suffix in suffixes]
    found += [getattr(Tensor, method, None) for method in _SPECIAL_METHODS.get(name, "").split()]
    return [f for f in found if callable(f)]


def _build_table() -> dict[Any, Entry]:
    table: dict[Any, Entry] = {}
    for rule, names in _RULES.items():
        for name in names.split():
            entry = Entry(name, rule, name not in _READS_RESULT, "max_pool" in name)
            table.update({f: entry for f in _functions_of(name) if f not in table})
    table[F.softmax], table[torch.softmax] = table[Tensor.softmax], table[Tensor.softmax]
    return table


def _find_questions() -> frozenset[Any]:
    """Return the methods and attributes of tensors that many forwards ask for, and that are no tensors."""
    methods = (
        "dim size numel stride storage_offset is_floating_point is_contiguous is_complex element_size __len__ __bool__"
    )
    attributes = "shape dtype device layout ndim requires_grad is_nested is_cpu is_cuda is_sparse is_leaf is_meta"
    return frozenset(
        [getattr(Tensor, name) for name in methods.split()]
        + [getattr(Tensor, name).__get__ for name in attributes.split()]
        + [torch.is_floating_point, torch.is_tensor, torch.numel]
    )


_QUESTIONS = _find_questions()
_TABLE = _build_table()
FUNCTIONS: tuple[str, ...] = tuple(dict.fromkeys(entry.name for entry in _TABLE.values()))


def find_entry(function: Any) -> Entry | None:
    """Return the entry of a callable of PyTorch; None if it is not in the table."""
    try:
        return _TABLE.get(function)
    except TypeError:  # not hashable
        return None


def is_question(function: Any) -> bool:
    """Return True for a method or attribute of tensors that returns none: there is nothing to be lowered or followed."""
    try:
        return function in _QUESTIONS
    except TypeError:  # not hashable
        return False


def choose_functions(functions: FunctionChoice, skip: FunctionChoice) -> frozenset[str]:
    """Return the names of the functions to lower; raise ValueError for one that is not in the table."""
    return _names_of("functions", functions) - _names_of("skip_functions", skip)


def _names_of(what: str, choice: FunctionChoice) -> frozenset[str]:
    if isinstance(choice, bool):
        return frozenset(FUNCTIONS if choice else ())
    single = isinstance(choice, str) or not isinstance(choice, Iterable)
    chosen: Sequence[Any] = [choice] if single else list(choice)  # type: ignore[arg-type]
    names = []
    for one in chosen:
        entry = None if isinstance(one, str) else find_entry(one)
        name = one if isinstance(one, str) else entry.name if entry is not None else getattr(one, "__name__", repr(one))
        if name not in FUNCTIONS:
            raise ValueError(
                f"{what} has {name!r}, which is no function that can be lowered; known are {', '.join(FUNCTIONS)}"
            )
        names.append(name)
    return frozenset(names)


# ---- rules: the reason why a call is not rounded, or None if it is


def why_not(entry: Entry, kinds: Sequence[Kind], result: Tensor) -> str | None:
    """Return the reason why the result of a call with these kinds of operands is left as it is; None if it is rounded."""
    return _REASONS[entry.rule](kinds, result)


def _layer(kinds: Sequence[Kind], result: Tensor) -> str | None:
    return "computed from parameters alone" if kinds and kinds[0] in (Kind.PARAMETER, Kind.CONSTANT) else None


def _table(kinds: Sequence[Kind], result: Tensor) -> str | None:
    return None if Kind.PARAMETER in kinds or Kind.ACTIVATION in kinds else "a table that is no parameter"


def _map(kinds: Sequence[Kind], result: Tensor) -> str | None:
    return None if kinds and kinds[0] in (Kind.ACTIVATION, Kind.MASKED) else "no activation"


def _sum(kinds: Sequence[Kind], result: Tensor) -> str | None:
    if Kind.ACTIVATION not in kinds and Kind.MASKED not in kinds:
        return "no activation"
    if len(kinds) < 2:
        return "a sum with a number"
    if Kind.DATA in kinds or Kind.MASKED in kinds:
        return "a sum with data, which may be a mask"
    return _few_dims(result)


def _product(kinds: Sequence[Kind], result: Tensor) -> str | None:
    if Kind.ACTIVATION not in kinds:
        return "no activation"
    if len(kinds) < 2:
        return "a product with a number"
    if not all(kind in (Kind.ACTIVATION, Kind.PARAMETER) for kind in kinds):
        return "a product with data or a mask"
    return _few_dims(result)


def _matmul(kinds: Sequence[Kind], result: Tensor) -> str | None:
    if Kind.ACTIVATION in kinds or Kind.MASKED in kinds or {Kind.DATA, Kind.PARAMETER} <= set(kinds):
        return _few_dims(result)
    return "no activation"


def _biased(kinds: Sequence[Kind], result: Tensor) -> str | None:
    if len(kinds) > 2 and kinds[0] in (Kind.DATA, Kind.MASKED):
        return "a sum with data, which may be a mask"
    return _matmul(kinds, result)


def _join(kinds: Sequence[Kind], result: Tensor) -> str | None:
    if Kind.ACTIVATION not in kinds:
        return "no activation"
    if len(kinds) < 2:
        return "joined with nothing"
    return "joined with a mask" if Kind.MASKED in kinds else _few_dims(result)


def _mean(kinds: Sequence[Kind], result: Tensor) -> str | None:
    if not kinds or kinds[0] is not Kind.ACTIVATION:
        return "no activation"
    if result.dim() > 1 and result.shape[-1] == 1 and result.shape[-2] != 1:
        return "a statistic of each row, as in a norm"
    return _few_dims(result)


def _few_dims(result: Tensor) -> str | None:
    return "fewer than two dims, as in a loss" if result.dim() < 2 else None


_REASONS: dict[Rule, Callable[[Sequence[Kind], Tensor], str | None]] = {
    "layer": _layer, "table": _table, "map": _map, "sum": _sum, "product": _product, "matmul": _matmul,
    "biased": _biased, "join": _join, "mean": _mean, "attention": _layer,
}  # fmt: skip
