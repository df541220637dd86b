"""One step of Langevin dynamics: its settings, the update as a pure function of tensors, and the driver that steps many.

`step_tensors` runs on two paths that agree bit for bit: `update` in plain PyTorch, which is the specification, and the fused
kernels of the tensors' device. Plain tensors pass through the operator ``qlangevin::sgld_``, which is opaque to `torch.compile`.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from .._dtensor import shard_of
from .._validate import check_choice, check_flag, check_number
from ..quantization import operators, random
from ..quantization.backend import Kernels, TensorStep
from ..quantization.formats import BF16, FLOAT32_MAX, FP16, FP32, parse
from ..quantization.laws import Mean
from ..quantization.operators import Algorithm, Rounding
from ..quantization.qtensor import QTensor, decoded
from ..quantization.random import Key
from .host_copy import has_no_numbers
from .kernel_step import check_shape, step_by_kernels, step_kernels

__all__ = [
    "FIELDS", "FORMATS", "StepSettings", "TensorStep", "parameter_key", "quantize_for", "sgld_op",
    "step_tensors", "update",
]  # fmt: skip

FORMATS = ("weights", "gradients", "accumulator")  # the settings that are formats


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

    def __post_init__(self) -> None:
        count = self.num_data
        is_number = isinstance(count, numbers.Real) and not isinstance(count, bool) and 0 < count < math.inf
        if not (is_number and float(count).is_integer()):
            raise ValueError(f"num_data must be the number of training examples, a positive integer, got {count!r}")
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
        key = Key(self.seed, self.stream)
        self._set("seed", key.seed)
        self._set("stream", key.stream)

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
    def noise_free_rounding(self) -> Rounding:
        """Rounding of numbers that have their noise already, μ + sqrt(v) ξ, or get none: weights from an accumulator."""
        return "nearest" if self.rounding == "nearest" else "stochastic"

    def weights_format(self, theta: Tensor) -> str | None:
        """Return the format a parameter is kept in: that of its codes, else ``weights``, else that of its dtype.

        None for float64, which has no format.
        """
        if isinstance(theta, QTensor):
            return str(theta.format)
        return self.weights or _DTYPE_FORMATS.get(theta.dtype)

    def key_of(self, p: Tensor, index: int, step: int) -> Key:
        """Return the random bits of a parameter, or of the shard of it that this process has."""
        return parameter_key(self.seed, self.stream, index, step, shard_of(p))

    @cached_property
    def text(self) -> str:
        """The settings as the operator takes them."""
        return json.dumps([getattr(self, name) for name in FIELDS])


FIELDS = tuple(StepSettings.__dataclass_fields__)
_DTYPE_FORMATS = {torch.float32: str(FP32), torch.bfloat16: str(BF16), torch.float16: str(FP16)}


@lru_cache(maxsize=64, typed=True)  # a sampler that steps in backward asks for each parameter; typed: True is not 1
def _validate_once(*values: Any) -> StepSettings:
    return StepSettings(*values)


@lru_cache(maxsize=64)
def _from_text(text: str) -> StepSettings:
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


def quantize_for(purpose: int, x: Tensor, format: str | None, rounding: Rounding, key: Key) -> Tensor:
    """Round x to a format with the bits that `random` has for a purpose; without a format return x itself."""
    if format is None:
        return x
    return cast(Tensor, operators.quantize_op(x, format, rounding, *operators.key_bits(key), purpose))


def update(theta: Tensor, gradient: Tensor, settings: StepSettings, format: str | None, key: Key) -> Tensor:
    """Return θ' on the grid of ``format`` (None: float64, no grid), as a new float32 or float64 tensor.

    With learning rate lr, weight decay λ, noise variance v and standard normal ξ

        δ  = -lr (Q_G(∇loss) + λ θ)
        θ' = Q^vc(θ + δ, v)             rounding="corrected"    VC SGLDLP-L, Algorithms 1 and 4
             Q^s(θ + (δ + sqrt(v) ξ))   rounding="stochastic"   naive SGLDLP-L
             Q^d(θ + (δ + sqrt(v) ξ))   rounding="nearest"

    The drift δ is never added to θ in float32 before θ is rounded: there it would lose its digits, or all of itself.
    """
    check_shape(theta, gradient)
    dtype = operators.working_dtype(theta.dtype)
    theta, gradient = decoded(theta).to(dtype), gradient.to(dtype)
    g = quantize_for(random.GRADIENT, gradient, settings.gradients, "stochastic", key)
    g = -g if settings.maximize else g
    drift = -settings.lr * (g + settings.weight_decay * theta)
    variance = torch.full((), settings.variance, dtype=dtype, device=theta.device)
    if settings.rounding == "corrected" and format is not None:
        return operators.draw(Mean(theta, drift), variance, parse(format), key, settings.algorithm)
    if settings.variance > 0:
        xi = random.normal(key, theta.numel(), device=theta.device).to(dtype).view(theta.shape)
        drift = drift + random.root(variance) * xi
    if format is None or settings.rounding == "nearest":
        return quantize_for(random.ROUNDING, theta + drift, format, "nearest", key)
    return operators.draw(Mean(theta, drift), torch.zeros_like(variance), parse(format), key)


def step_tensors(tensors: Sequence[TensorStep], settings: StepSettings) -> None:
    """Step plain and packed tensors in place, all with an accumulator or all without."""
    plain = [t for t in tensors if not isinstance(t.theta, QTensor)]
    if plain:
        sgld_op(
            [t.theta for t in plain],
            [t.gradient for t in plain],
            [t.accumulator for t in plain if t.accumulator is not None],
            [number for t in plain for number in operators.key_bits(t.key)],
            settings.text,
        )
    if len(plain) < len(tensors):
        _step_each([t for t in tensors if isinstance(t.theta, QTensor)], settings)


@operators.operator("sgld_", mutates=("thetas", "accumulators"))
def sgld_op(
    thetas: list[Tensor], gradients: list[Tensor], accumulators: list[Tensor], keys: list[int], settings: str
) -> None:
    """Step plain tensors in place. There is an accumulator for each or for none; a key is three numbers.

    ``settings`` is the text of `StepSettings`: schemas know no records, and a step has a dozen settings.
    """
    tensors = []
    for i, (theta, gradient) in enumerate(zip(thetas, gradients, strict=True)):
        key = operators.key_of(*keys[3 * i : 3 * i + 3])
        tensors.append(TensorStep(theta, gradient, key, accumulators[i] if accumulators else None))
    _step_each(tensors, _from_text(settings))


@operators.fake("sgld_")
def _(thetas: list[Tensor], *_: Any) -> None:
    return None


def _step_each(tensors: Sequence[TensorStep], settings: StepSettings) -> None:
    """Step tensors in place: by the kernels where they can, by `update` elsewhere."""
    fused: dict[Kernels, list[TensorStep]] = {}
    for t in tensors:
        if has_no_numbers(t.theta):
            check_shape(t.theta, t.gradient)
            continue
        kernels = step_kernels(t.theta, t.gradient, settings)
        if kernels is not None:
            fused.setdefault(kernels, []).append(t)
        else:
            _step_by_pytorch(t, settings)
    for kernels, some in fused.items():
        step_by_kernels(kernels, some, settings)


def _step_by_pytorch(t: TensorStep, settings: StepSettings) -> None:
    """Step one tensor in place: θ, or with an accumulator a the update of a, and then θ = Q_W(a)."""
    format = settings.weights_format(t.theta)
    if t.accumulator is None:
        t.theta.copy_(update(t.theta, t.gradient, settings, format, t.key))
    else:
        t.accumulator.copy_(update(t.accumulator, t.gradient, settings, settings.accumulator, t.key))
        t.theta.copy_(quantize_for(random.WEIGHT, t.accumulator, format, settings.noise_free_rounding, t.key))
    if isinstance(t.theta, QTensor):
        torch.autograd.graph.increment_version(t.theta)  # a step on codes is a write of its own, on either path
