"""One step of Langevin dynamics: the update as a pure function of tensors, and in place for many of them at once.

With accumulated weights θ, learning rate lr, weight decay λ and noise variance v,

    μ  = θ - lr (Q_G(∇loss) + λ θ)
    θ' = Q^vc(μ, v)             rounding="corrected"    VC SGLDLP-L, Algorithms 1 and 4
         Q^s(μ + sqrt(v) ξ)     rounding="stochastic"   naive SGLDLP-L
         Q^d(μ + sqrt(v) ξ)     rounding="nearest"

With an accumulator θ is kept in its format and the parameters are Q_W(θ): SGLDLP-F if that is float32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from .. import native
from ..quantization import operators, random
from ..quantization.formats import BF16, FP16, FP32, parse
from ..quantization.operators import Algorithm, Rounding
from ..quantization.qtensor import QTensor, decoded
from ..quantization.random import Key

__all__ = ["Update", "parameter_key", "quantized", "sgld_op", "update", "update_codes_"]


@dataclass(frozen=True)
class Update:
    """The settings of one step; formats as names, None for full precision (or, for the accumulator, none)."""

    lr: float
    weight_decay: float
    variance: float
    weights: str | None = None
    gradients: str | None = None
    accumulator: str | None = None
    rounding: Rounding = "corrected"
    algorithm: Algorithm = "exact"
    maximize: bool = False

    def grid(self, theta: Tensor) -> str | None:
        """The format a parameter is kept in: unless given, that of its codes or of its dtype. None for float64."""
        if isinstance(theta, QTensor):
            return str(theta.format)
        own = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}.get(theta.dtype)
        return self.weights or (str(own) if own else None)

    def arguments(self) -> tuple[Any, ...]:
        """The fields as `sgld_op` takes them: in the same order."""
        return tuple(getattr(self, f.name) for f in fields(self))

    @property
    def onto(self) -> Rounding:
        """How a number that is given, not drawn, gets onto a grid."""
        return "nearest" if self.rounding == "nearest" else "stochastic"


@lru_cache(maxsize=65536)
def _stream(seed: int, stream: int, index: int, shard: tuple[int, ...]) -> int:
    key = Key(seed, stream)
    for place in (index, *shard):
        key = key.fold(place)
    return key.stream


def parameter_key(seed: int, stream: int, index: int, step: int, shard: tuple[int, ...] = ()) -> Key:
    """The random bits of one parameter of a chain at one step: each has a stream of its own, derived from the chain's.

    So has each shard of it, derived from the parameter's.
    """
    return Key(seed, _stream(seed, stream, index, shard), step)


def quantized(x: Tensor, format: str | None, rounding: str, key: Key, purpose: int) -> Tensor:
    """x on the grid of a format, for one of the purposes of `random`; x itself without a format."""
    if format is None:
        return x
    return cast(Tensor, operators.quantize_op(x, format, rounding, *operators.key_bits(key), purpose))


def update(theta: Tensor, gradient: Tensor, settings: Update, format: str | None, key: Key) -> Tensor:
    """θ', on the grid of ``format`` (None: float64, no grid), as a new float32 or float64 tensor."""
    dtype = operators.working_dtype(theta.dtype)
    theta = decoded(theta)
    theta, gradient = theta.to(dtype), gradient.to(dtype)
    g = quantized(gradient, settings.gradients, "stochastic", key, random.GRADIENT)
    g = -g if settings.maximize else g
    mu = theta - settings.lr * (g + settings.weight_decay * theta)
    if settings.rounding == "corrected" and format is not None:
        return operators.corrected(mu, settings.variance, format, key, settings.algorithm)
    if settings.variance > 0:
        variance = torch.full((), settings.variance, dtype=dtype, device=mu.device)
        xi = random.normal(key, mu.numel(), device=mu.device).to(dtype).view(mu.shape)
        mu = mu + random.root(variance) * xi
    return quantized(mu, format, settings.onto, key, random.ROUNDING)


def update_codes_(
    thetas: list[QTensor], accumulators: list[Tensor], gradients: list[Tensor], s: Update, keys: list[Key]
) -> None:
    """The same in place on codes of one format; no float copy of them outlives the call. accumulators may be empty."""
    exact = s.algorithm == "exact" or s.rounding != "corrected"
    jobs: list[native.Job] = []
    for i, (theta, gradient, key) in enumerate(zip(thetas, gradients, keys, strict=True)):
        if gradient.shape != theta.shape:
            raise ValueError(f"the gradient must have theta's shape, {tuple(theta.shape)}, got {tuple(gradient.shape)}")
        held = accumulators[i] if accumulators else None
        fast = exact and native.enabled_for(theta.codes, gradient) and theta.dtype != torch.float64
        if fast and theta.format.storage_bits > 4:
            plain = gradient.to(torch.float32).contiguous()
            jobs.append(native.Job(None, theta.unpacked(), theta.exponents, held, plain, key))
        else:
            _step_one(theta, held, gradient, s, key)
    if jobs:
        _run_native(jobs, s, str(thetas[0].format))
    for theta in thetas:
        torch.autograd.graph.increment_version(theta)


@operators.operator("sgld_", mutates=("thetas", "accumulators"))
def sgld_op(
    thetas: list[Tensor], accumulators: list[Tensor], gradients: list[Tensor], lr: float, weight_decay: float,
    variance: float, weights: str | None, gradients_: str | None, accumulator: str | None, rounding: str, algorithm: str,
    maximize: bool, seed: int, streams: list[int], steps: list[int],
) -> None:  # fmt: skip
    """One step of many tensors in place; accumulators is empty if there are none."""
    formats = (weights, gradients_, accumulator)
    s = Update(lr, weight_decay, variance, *formats, cast(Rounding, rounding), cast(Algorithm, algorithm), maximize)
    jobs: list[tuple[Tensor, native.Job]] = []
    for i, (theta, gradient) in enumerate(zip(thetas, gradients, strict=True)):
        key, held = operators.key_of(seed, streams[i], steps[i]), accumulators[i] if accumulators else None
        exact = algorithm == "exact" or rounding != "corrected"
        if exact and theta.dtype == torch.float32 and native.enabled_for(theta, gradient):
            plain = gradient.to(torch.float32).contiguous()
            jobs.append((theta, native.Job(theta.contiguous(), None, None, held, plain, key)))
        else:
            _step_one(theta, held, gradient, s, key)
    if jobs:
        _run_native([job for _, job in jobs], s, weights)
    for theta, job in jobs:
        if job.values is not None and job.values.data_ptr() != theta.data_ptr():
            theta.copy_(job.values)
        torch.autograd.graph.increment_version(theta)  # autograd does not see what the kernels write


@operators.fake("sgld_")
def _(thetas: list[Tensor], accumulators: list[Tensor], gradients: list[Tensor], *_: Any) -> None:
    return None


def _step_one(theta: Tensor, accumulator: Tensor | None, gradient: Tensor, s: Update, key: Key) -> None:
    """One step of one tensor in place, on the PyTorch path."""
    if accumulator is None:
        theta.copy_(update(theta, gradient, s, s.grid(theta), key))
        return
    accumulator.copy_(update(accumulator, gradient, s, s.accumulator, key))
    theta.copy_(quantized(accumulator, s.grid(theta), s.onto, key, random.WEIGHT))


def _run_native(jobs: list[native.Job], s: Update, weights: str | None) -> None:
    to, gradients, accumulator = (parse(f) if f else None for f in (weights, s.gradients, s.accumulator))
    native.sgld(jobs, to, gradients, accumulator, s.rounding, s.lr, s.weight_decay, s.variance, s.maximize)
