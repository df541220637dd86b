"""One step of Langevin dynamics as a pure function of tensors: the specification of all kernels.

`update` is SGLD, `update_underdamped` is SGHMC. Both move weights by a force,

    f = Q_G(∇loss) + λ θ + (γ/N)(θ - w0),

the gradient of the mean loss, that of the prior and that of a localization around w0; a gain G for each weight preconditions
it, and weights that a mask excludes have neither drift nor noise.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..quantization import operators, random
from ..quantization.formats import parse
from ..quantization.laws import Mean
from ..quantization.operators import Rounding
from ..quantization.qtensor import decoded_as
from ..quantization.random import Key, root
from .kernel_step import check_shape
from .settings import StepSettings
from .underdamped import Underdamped

__all__ = ["Beside", "Drawn", "quantize_for", "round_gradient", "update", "update_underdamped"]


class Beside(NamedTuple):
    """Numbers that a step reads beside weights and gradient, in the dtype it computes in. What is absent is None."""

    center: Tensor | None = None  # w0
    gain: Tensor | None = None  # G
    moving: Tensor | None = None  # bool; False where a weight does not move


class Drawn(NamedTuple):
    """A draw of Q(start + move, v), and the part of it that has mean zero and belongs to the noise."""

    values: Tensor
    noise: Tensor


def quantize_for(purpose: int, x: Tensor, format: str | None, rounding: Rounding, key: Key) -> Tensor:
    """Round x to a format with the bits that `random` has for a purpose; without a format return x itself."""
    if format is None:
        return x
    return cast(Tensor, operators.quantize_op(x, format, rounding, *operators.key_bits(key), purpose))


def round_gradient(theta: Tensor, gradient: Tensor, settings: StepSettings, key: Key) -> Tensor:
    """Return Q_G(∇loss) in the dtype that a step computes in, its sign changed if the step climbs."""
    check_shape(theta, gradient)
    g = gradient.to(operators.working_dtype(theta.dtype))
    g = quantize_for(random.GRADIENT, g, settings.gradients, "stochastic", key)
    return -g if settings.maximize else g


def update(
    theta: Tensor, gradient: Tensor, settings: StepSettings, format: str | None, key: Key, beside: Beside | None = None
) -> Tensor:
    """Return θ' on the grid of ``format`` (None: float64, no grid), as a new float32 or float64 tensor.

    With learning rate lr, force f, noise variance v = 2 lr T / N, gain G (or 1) and standard normal ξ

        δ  = -lr f G
        θ' = Q^vc(θ + δ, v G)                 rounding="corrected"    VC SGLDLP-L, Algorithms 1 and 4
             Q^s(θ + (δ + sqrt(v G) ξ))       rounding="stochastic"   naive SGLDLP-L
             Q^d(θ + (δ + sqrt(v G) ξ))       rounding="nearest"

    The drift δ is never added to θ in float32 before θ is rounded: there it would lose its digits, or all of itself.
    """
    beside = beside or Beside()
    g = round_gradient(theta, gradient, settings, key)
    theta = decoded_as(theta, g.dtype)
    drift = -settings.lr * force(theta, g, settings, beside)
    variance = torch.full((), settings.variance, dtype=g.dtype, device=theta.device)
    if beside.gain is not None:
        drift, variance = drift * beside.gain, variance * beside.gain
    noisy = settings.variance > 0
    return draw(theta, drift, variance, settings, format, key, beside.moving, noisy=noisy).values


def update_underdamped(
    theta: Tensor, velocity: Tensor, gradient: Tensor, settings: StepSettings, c: Underdamped,
    formats: tuple[str | None, str | None], keys: tuple[Key, Key], beside: Beside | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (θ', u'): weights, and velocities in their unit; ``formats`` and ``keys`` are of the weights and of the velocities.

    With the coefficients c of `underdamped`, √G f in the place of f, and Q^vc for Q (or rounding after the noise)

        u' = Q(u + c.fade u + c.kick √G f, c.velocity_variance)
        e  = u' - mean of u'                  the velocity's noise, rounding included; without it if rounding comes after
        θ' = Q(θ + √G (c.carry u + c.push √G f + c.follow e), G c.variance).

    All first and second moments of (θ', u') are those of the exact solution as long as each variance exceeds the v_s of its grid.
    """
    beside = beside or Beside()
    g = round_gradient(theta, gradient, settings, keys[0])
    theta, u = decoded_as(theta, g.dtype), decoded_as(velocity, g.dtype)
    f, one = force(theta, g, settings, beside), torch.ones((), dtype=g.dtype, device=theta.device)
    scale = None if beside.gain is None else root(beside.gain)
    f = f if scale is None else f * scale
    kick, noisy = c.fade * u + c.kick * f, c.velocity_variance > 0
    kicked = draw(u, kick, c.velocity_variance * one, settings, formats[1], keys[1], beside.moving, noisy=noisy)
    drift = (c.carry * u + c.push * f) + c.follow * kicked.noise
    variance = c.variance * one
    if scale is not None:
        drift, variance = drift * scale, variance * cast(Tensor, beside.gain)
    moved = draw(theta, drift, variance, settings, formats[0], keys[0], beside.moving, noisy=c.variance > 0)
    return moved.values, kicked.values


def force(theta: Tensor, g: Tensor, settings: StepSettings, beside: Beside) -> Tensor:
    """Return f = g + λ θ + (γ/N)(θ - w0)."""
    f = g + settings.weight_decay * theta
    return f if beside.center is None or not settings.pull else f + settings.pull * (theta - beside.center)


def draw(
    start: Tensor, move: Tensor, variance: Tensor, settings: StepSettings, format: str | None, key: Key,
    moving: Tensor | None, *, noisy: bool,
) -> Drawn:  # fmt: skip
    """Return a draw of mean start + move by the rounding of the settings, and its noise; what does not move stays.

    If it is not ``noisy``, the variance is zero throughout.
    """
    if moving is not None:
        move, variance = torch.where(moving, move, 0), torch.where(moving, variance, 0)
    if settings.rounding == "corrected" and format is not None:
        values = operators.draw(Mean(start, move), variance, parse(format), key, settings.algorithm)
        return Drawn(values, (values - start) - move)
    noise = torch.zeros_like(start)
    if noisy:
        noise = root(variance) * random.normal(key, start.numel(), device=start.device).to(start.dtype).view(
            start.shape
        )
        move = move + noise
    if format is None or settings.rounding == "nearest":
        return Drawn(quantize_for(random.ROUNDING, start + move, format, "nearest", key), noise)
    return Drawn(operators.draw(Mean(start, move), variance.new_zeros(()), parse(format), key), noise)
