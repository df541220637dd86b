"""Rounding onto the grid of any format: the paper's Q^d, Q^s and Q^vc, in plain PyTorch.

`nearest` (Q^d), `stochastic` (Q^s) and `exact` (Q^vc) are written to be read beside the paper, for any device and floating
dtype; kernels repeat them bit for bit. All random rounding follows one law on the integers, see `laws`; a format says on which
gap (`Format.law`), or draws blocks of elements that share one (`block_rounding`).

`as_printed` is Algorithm 2, and for block and floating formats Algorithm 5, as the paper prints them. Lines are counted from
the one that begins with "input"; lines that end a loop or a case count too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import random
from .format_base import Draws
from .formats import FP32, Format
from .laws import Mean, in_gaps, nearest_integer, settle
from .random import Key, root

__all__ = ["as_printed", "corrected_values", "exact", "nearest", "quantize_values", "stochastic"]


def nearest(x: Tensor, format: Format) -> Tensor:
    """Return Q^d(x), the nearest number of the format, half away from zero; a block's largest element sets its grid."""
    gap, limit = format.gap(x), format.largest_multiple
    return clip(nearest_integer((x / gap).clamp(-limit, limit)) * gap, format)


def stochastic(x: Tensor | Mean, format: Format, key: Key, purpose: int = random.ROUNDING) -> Tensor:
    """Return Q^s(x), up or down with probabilities that keep the mean."""
    mean = x if isinstance(x, Mean) else Mean(x)
    zero = mean.start.new_zeros(())
    return exact(mean, zero, format, Draws(_centered(key, mean.start, purpose), zero, _coins(key, mean.start)))


def exact(mu: Mean, v: Tensor, format: Format, draws: Draws) -> Tensor:
    """Return Q^vc with mean μ and variance max(v, v_s)."""
    shape = mu.start.shape
    if shape.numel() == 0:
        return mu.start.clone()
    if len(shape) == 0:
        return exact(mu.map(_flat), v, format, Draws(_flat(draws.h), _flat(draws.xi), draws.coins)).view(())
    drawn = clip(format.draw(mu, v, draws), format)
    return drawn if mu.move is None else torch.where(mu.total.isnan(), torch.nan, drawn)  # of two infinities, say


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1)


def as_printed(mu: Tensor, v: Tensor, format: Format, key: Key) -> Tensor:
    """Return Q^vc(μ, v) by Algorithm 2, and for block and floating formats by Algorithm 5, as the paper prints them.

    Algorithm 5 recomputes Δ after the Gaussian noise, so that the variance is wrong where x leaves the binade of μ. It may
    also leave a block that needs one bit more than it has; what is then off the grid is rounded stochastically.
    """
    mu = mu.nan_to_num(torch.nan, format.high, format.low)
    gap = format.gap(mu)
    v0 = gap * gap / 4  # line 2
    choice = _uniform(key, mu, random.CHOICE)
    with_noise = _printed_with_noise(mu, v, v0, format, choice, _normal(key, mu))
    on_the_grid = _printed_on_the_grid(mu, v, gap, choice, _centered(key, mu))
    theta = clip(torch.where(v > v0, with_noise, on_the_grid), format)  # lines 3 and 22 of Algorithm 2
    return stochastic(theta, format, key, random.LEFTOVER)


def _printed_with_noise(mu: Tensor, v: Tensor, v0: Tensor, format: Format, choice: Tensor, xi: Tensor) -> Tensor:
    """Return θ of lines 4-9 of Algorithm 2, lines 4-11 of Algorithm 5."""
    x = mu + root((v - v0).clamp_min(0)) * xi  # line 4
    gap = format.gap(x)  # line 6 of Algorithm 5; in fixed point it is the same gap
    qd = nearest_integer(x / gap) * gap
    r = x - qd  # line 5
    c = categorical(r.abs(), gap * gap / 4, gap, choice)  # line 7; lines 7 and 9 of Algorithm 5
    return qd + r.sign() * c  # line 9; line 11 of Algorithm 5


def _printed_on_the_grid(mu: Tensor, v: Tensor, gap: Tensor, choice: Tensor, h: Tensor) -> Tensor:
    """Return θ of lines 11-20 of Algorithm 2, line 13 of Algorithm 5."""
    zero, never = mu.new_zeros(()), torch.zeros((), dtype=torch.bool, device=mu.device)
    qs = settle(in_gaps(Mean(mu), zero, gap)[0], zero, never, h, zero) * gap
    r = mu - qs  # line 11
    vs = (1 - r.abs() / gap) * r * r + r.abs() / gap * (-r + r.sign() * gap) ** 2  # line 13
    c = categorical(torch.zeros_like(r), v - vs, gap, choice)  # line 15
    return qs + torch.where(v > vs, c, 0)  # lines 14 and 16-18


def categorical(mean: Tensor, v: Tensor, gap: Tensor, u: Tensor) -> Tensor:
    """Draw the paper's Cat(μ, v): Δ, -Δ or 0 with the probabilities of its Equation (categorical)."""
    p_up = (v + mean * mean + mean * gap) / (2 * gap * gap)
    p_down = (v + mean * mean - mean * gap) / (2 * gap * gap)
    return torch.where(u >= 1 - p_up, gap, 0) - torch.where(u < p_down, gap, 0)


def clip(x: Tensor, format: Format) -> Tensor:
    """Return x within the range of the format; -0 becomes 0, so that equal numbers have equal bits."""
    return x.clamp(format.low, format.high) + 0.0


def quantize_values(x: Tensor, format: Format, rounding: str, key: Key, purpose: int = random.ROUNDING) -> Tensor:
    """Return Q^d(x) or Q^s(x) of a float32 or float64 tensor, random bits from the key."""
    if format == FP32 and x.dtype == torch.float32:
        return x.clone()
    return nearest(x, format) if rounding == "nearest" else stochastic(x, format, key, purpose)


def corrected_values(mu: Tensor | Mean, v: Tensor, format: Format, algorithm: str, key: Key) -> Tensor:
    """Return Q^vc(μ, v) of a float32 or float64 tensor, random bits from the key."""
    mean = mu if isinstance(mu, Mean) else Mean(mu)
    start = mean.start
    if format == FP32:  # the arithmetic's own precision: nothing to correct
        noise = root(v) * _normal(key, start)
        return quantize_values(start + (noise if mean.move is None else mean.move + noise), format, "nearest", key)
    if algorithm == "paper":
        return as_printed(mean.total, v, format, key)
    return exact(mean, v, format, Draws(_centered(key, start), _normal(key, start), _coins(key, start)))


def _uniform(key: Key, like: Tensor, purpose: int = random.ROUNDING) -> Tensor:
    return random.uniform(key, like.numel(), purpose, like.device).to(like.dtype).view(like.shape)


def _centered(key: Key, like: Tensor, purpose: int = random.ROUNDING) -> Tensor:
    return random.centered(key, like.numel(), purpose, like.device).to(like.dtype).view(like.shape)


def _coins(key: Key, like: Tensor) -> Callable[[], Tensor]:
    return lambda: _centered(key, like, random.COIN)


def _normal(key: Key, like: Tensor) -> Tensor:
    return random.normal(key, like.numel(), device=like.device).to(like.dtype).view(like.shape)
