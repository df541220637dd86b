"""What a sampler's parameter group is told, checked.

The loss is the MEAN over the batch. With N data, learning rate lr, temperature T and weight decay λ (the Gaussian prior's
precision over N) a step is the paper's with α = lr / N: its noise has variance 2 lr T / N.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .._validate import check_choice
from ..quantization import operators
from ..quantization.formats import FLOAT32_MAX, FP8_E4M3, FP32, check_holds, parse
from ..quantization.operators import Algorithm, Rounding
from ..quantization.qtensor import QTensor
from ..quantization.random import Key
from .step import Update

__all__ = ["FORMATS", "Settings", "check_parameter"]

FORMATS = ("weights", "gradients", "accumulator")


@dataclass(frozen=True)
class Settings:
    """What a parameter group is told, checked; formats by name."""

    lr: float
    num_data: float
    temperature: float
    weight_decay: float
    weights: str | None
    gradients: str | None
    accumulator: str | None
    rounding: Rounding
    algorithm: Algorithm
    maximize: bool
    seed: int
    stream: int

    def __post_init__(self) -> None:
        for name in ("lr", "temperature", "weight_decay"):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and 0 <= float(value) < FLOAT32_MAX):
                raise ValueError(f"{name} must be a finite number that is not negative, got {value!r}")
            object.__setattr__(self, name, float(value))  # also of NumPy's numbers
        if not (isinstance(self.num_data, numbers.Real) and 0 < self.num_data < math.inf):
            raise ValueError(
                f"num_data must be the number of training examples, a positive number, got {self.num_data!r}"
            )
        if not self.variance < FLOAT32_MAX:
            raise ValueError(
                f"the noise would have variance 2 lr temperature / num_data = {self.variance}; check num_data"
            )
        check_choice("rounding", self.rounding, ("nearest", "stochastic", "corrected"))
        check_choice("algorithm", self.algorithm, ("exact", "paper"))
        Key(self.seed, self.stream)

    @classmethod
    def of(cls, group: dict[str, Any]) -> Settings:
        """Those of a parameter group: formats become names, a tensor lr (as schedulers may set) a number."""
        values = [group[name] for name in _names()]
        values[0] = float(values[0]) if isinstance(values[0], Tensor) else values[0]
        return _settings(*values)

    @property
    def variance(self) -> float:
        """Of the noise of one step."""
        return 2 * self.lr * self.temperature / float(self.num_data)

    def update(self) -> Update:
        return Update(
            self.lr, self.weight_decay, self.variance, self.weights, self.gradients, self.accumulator, self.rounding,
            self.algorithm, self.maximize,
        )  # fmt: skip


@lru_cache(maxsize=1)
def _names() -> tuple[str, ...]:
    return tuple(f.name for f in fields(Settings))


@lru_cache(maxsize=64)  # a sampler that steps in backward asks for each parameter
def _settings(*values: Any) -> Settings:
    given = dict(zip(_names(), values, strict=True))
    return Settings(**given | {name: None if given[name] is None else str(parse(given[name])) for name in FORMATS})


def check_parameter(p: Tensor, settings: Settings) -> None:
    """Refuse formats a parameter, or its accumulator, cannot hold; and another format than the one it is packed in."""
    _check_dtype(p.dtype, settings.weights, settings.accumulator)
    if isinstance(p, QTensor) and p.is_view:
        raise ValueError("it is a view of a packed tensor; only all of it can be stepped")
    if isinstance(p, QTensor) and settings.weights not in (None, str(p.format)):
        raise ValueError(
            f"it is packed as {p.format}, but weights={settings.weights!r}; leave weights out, or unpack it"
        )


@lru_cache(maxsize=1024)
def _check_dtype(dtype: torch.dtype, weights: str | None, accumulator: str | None) -> None:
    check_holds(dtype, parse(weights) if weights else FP32 if dtype == torch.float32 else FP8_E4M3)
    if accumulator:
        check_holds(operators.working_dtype(dtype), parse(accumulator))
