"""Settings of a step, validated once for each parameter group, and the random bits of its parameters."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from .._dtensor import shard_of
from .._validate import check_choice, check_flag, check_number
from ..quantization.formats import BF16, FLOAT32_MAX, FP8_E4M3, FP16, FP32, fit_dtype, parse
from ..quantization.operators import Algorithm, Rounding
from ..quantization.qtensor import QTensor
from ..quantization.random import Key
from .preconditioner import RMS, parse_preconditioner
from .underdamped import INTEGRATORS, Integrator, Underdamped, solve

__all__ = ["FIELDS", "FORMATS", "NAMED", "SETTINGS", "StepSettings", "parameter_key", "settings_from_text"]

FORMATS = ("weights", "gradients", "accumulator", "velocity")  # the settings that are formats
NAMED = (*FORMATS, "preconditioner")  # the settings that groups keep by name
VELOCITIES = 2**32 - 1  # in the place of a shard, of which there are fewer: the stream of velocities


@dataclass(frozen=True)
class StepSettings:
    """Validated settings of one parameter group; formats by name.

    The loss is the MEAN over the batch. With N data, learning rate lr, temperature T and weight decay λ (the Gaussian prior's
    precision over N) a step is the paper's with α = lr / N: its noise has variance v = 2 lr T / N.
    """

    lr: float
    num_data: float
    temperature: float = 1.0
    weight_decay: float = 0.0
    weights: str | None = None  # None: that of the parameter's codes or dtype
    gradients: str | None = None  # None: full precision
    accumulator: str | None = None  # None: there is no accumulator
    rounding: Rounding = "corrected"
    algorithm: Algorithm = "exact"
    maximize: bool = False
    seed: int = 0
    stream: int = 0
    localization: float = 0.0  # γ: the energy γ/2 |θ - w0|² is added to U
    box: float | None = None  # weights stay within this distance of w0
    preconditioner: str | None = None  # `RMS` by name
    friction: float | None = None  # of underdamped dynamics; None: there is no velocity
    velocity: str | None = None  # None: see `velocity_format`
    masked: bool = False  # some of the parameters have masks
    integrator: Integrator = "exact"  # of underdamped dynamics

    def __post_init__(self) -> None:
        count = self.num_data
        is_number = isinstance(count, numbers.Real) and not isinstance(count, bool) and 0 < count < math.inf
        if not (is_number and float(count).is_integer()):
            raise ValueError(
                f"num_data must be the number of training examples, or of predicted tokens, a positive integer, got {count!r}"
            )
        self._set("num_data", float(count))  # plain numbers, also of NumPy's
        for name in ("lr", "temperature", "weight_decay"):
            self._set(name, check_number(name, getattr(self, name), FLOAT32_MAX))
        if not self.variance < FLOAT32_MAX:
            raise ValueError(
                f"the noise would have variance 2 lr temperature / num_data = {self.variance}; check num_data"
            )
        for name in FORMATS:
            if getattr(self, name) is not None:
                self._set(name, str(parse(getattr(self, name))))
        check_choice("rounding", self.rounding, ("nearest", "stochastic", "corrected"))
        check_choice("algorithm", self.algorithm, ("exact", "paper"))
        self._set("maximize", check_flag("maximize", self.maximize))
        self._check_dynamics()
        key = Key(self.seed, self.stream)
        self._set("seed", key.seed)
        self._set("stream", key.stream)

    def _check_dynamics(self) -> None:
        self._set("localization", check_number("localization", self.localization, FLOAT32_MAX))
        if self.box is not None and not check_number("box", self.box, FLOAT32_MAX) > 0:
            raise ValueError("box must be a positive distance from the centre, got 0; leave it out for none")
        if self.preconditioner is not None:
            self._set("preconditioner", str(parse_preconditioner(self.preconditioner)))
        if self.friction is not None and not check_number("friction", self.friction, FLOAT32_MAX) > 0:
            raise ValueError("friction must be positive, got 0: without friction nothing forgets where a chain began")
        check_choice("integrator", self.integrator, INTEGRATORS)
        if self.velocity is not None and self.friction is None:
            raise ValueError("velocity is the format of SGHMC's velocities; SGLD has none")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> StepSettings:
        """Read the settings of a parameter group; a tensor lr, as schedulers may set, becomes a number."""
        values = [group[name] for name in FIELDS]
        values[0] = float(values[0]) if isinstance(values[0], Tensor) else values[0]
        return _validate_once(*values)

    @property
    def variance(self) -> float:
        """Variance of the noise of one step."""
        return 2 * self.lr * self.temperature / self.num_data

    @property
    def push(self) -> float:
        """The part of the learning rate that moves weights in the same step; velocities bring the rest later."""
        return self.lr if self.friction is None else -self.underdamped(1.0).push

    @property
    def pull(self) -> float:
        """γ/N, the strength of the localization for the mean loss."""
        return self.localization / self.num_data

    @property
    def rms(self) -> RMS | None:
        """The preconditioner."""
        return None if self.preconditioner is None else parse_preconditioner(self.preconditioner)

    @property
    def is_plain(self) -> bool:
        """True if a step needs nothing beside weights, gradient and accumulator."""
        beside = self.localization or self.masked or self.box is not None
        return not (beside or self.preconditioner or self.friction is not None)

    @property
    def needs_center(self) -> bool:
        return self.localization > 0 or self.box is not None

    def underdamped(self, unit: float) -> Underdamped:
        """Return the coefficients of a step with friction, for velocities in a unit."""
        assert self.friction is not None
        return solve(self.lr, self.friction, self.temperature / self.num_data, unit, self.integrator)

    @property
    def noise_free_rounding(self) -> Rounding:
        """Rounding of numbers that have their noise already, μ + sqrt(v) ξ, or get none: weights from an accumulator."""
        return "nearest" if self.rounding == "nearest" else "stochastic"

    def weights_format(self, theta: Tensor) -> str | None:
        """Return the format a parameter is kept in: that of its codes, else ``weights``, else that of its dtype.

        Half precision clips it to its range. None for float64, which has no format.
        """
        name = str(theta.format) if isinstance(theta, QTensor) else self.weights or _DTYPE_FORMATS.get(theta.dtype)
        return name if name is None or theta.dtype is torch.float32 else _fit_name(name, theta.dtype)

    def velocity_format(self, theta: Tensor) -> str | None:
        """Return the format of the velocities of a parameter; None for float64.

        By default they have as many bytes as the weights, and a range of their own: velocities are far larger than their
        standard deviation, which is their unit, while a chain finds its way.
        """
        if self.velocity or self.accumulator:
            return self.velocity or self.accumulator
        weights = self.weights_format(theta)
        if weights is None or weights in _DTYPE_FORMATS.values():
            return weights
        return str(FP8_E4M3 if parse(weights).storage_bits <= 8 else BF16)

    def key_of(self, p: Tensor, index: int, step: int) -> Key:
        """Return the random bits of a parameter, or of the shard of it that this process has."""
        return parameter_key(self.seed, self.stream, index, step, shard_of(p))

    def velocity_key_of(self, p: Tensor, index: int, step: int) -> Key:
        """Return the random bits of a parameter's velocities."""
        return parameter_key(self.seed, self.stream, index, step, (*shard_of(p), VELOCITIES))

    @cached_property
    def text(self) -> str:
        """The settings as the operator takes them."""
        return json.dumps([getattr(self, name) for name in FIELDS])


@lru_cache(maxsize=256)
def _fit_name(name: str, dtype: torch.dtype) -> str:
    return str(fit_dtype(parse(name), dtype))


FIELDS = tuple(StepSettings.__dataclass_fields__)
SETTINGS = {f.name: None if f.default is MISSING else f.default for f in fields(StepSettings)}  # and their defaults
_DTYPE_FORMATS = {torch.float32: str(FP32), torch.bfloat16: str(BF16), torch.float16: str(FP16)}


@lru_cache(maxsize=64, typed=True)  # a sampler that steps in backward asks for each parameter; typed: True is not 1
def _validate_once(*values: Any) -> StepSettings:
    return StepSettings(*values)


@lru_cache(maxsize=64)
def settings_from_text(text: str) -> StepSettings:
    """Return the settings that `StepSettings.text` stands for."""
    return StepSettings(*json.loads(text))


@lru_cache(maxsize=65536)
def _parameter_stream(seed: int, stream: int, index: int, shard: tuple[int, ...]) -> int:
    key = Key(seed, stream)
    for number in (index, *shard):
        key = key.fold(number)
    return key.stream


def parameter_key(seed: int, stream: int, index: int, step: int, shard: tuple[int, ...] = ()) -> Key:
    """Return the random bits of one parameter of a chain at one step: its stream is derived from the chain's.

    The stream of a shard is derived from that of its parameter.
    """
    return Key(seed, _parameter_stream(seed, stream, index, shard), step)
