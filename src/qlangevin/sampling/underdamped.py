"""Coefficients of one step of underdamped Langevin dynamics (SGHMC), solved exactly while the gradient is held.

In continuous time, with unit mass, friction γ and temperature T/N, dθ = v dt and dv = -(γ v + f) dt + sqrt(2 γ T/N) dW. A step of
length η with a constant force f is, for a = exp(-γη),

    v' = a v - (1 - a)/γ f + ξ_v                  Var ξ_v = (T/N) (1 - a²)
    θ' = θ + (1 - a)/γ v - (γη + a - 1)/γ² f + ξ_θ    Var ξ_θ = (T/N) (2γη + 4a - a² - 3)/γ²,  Cov = (T/N) (1 - a)²/γ.

The user gives the learning rate ``lr`` of the SGLD that this becomes at high friction, and the dimensionless ``friction``
c = γη, the part of the velocity that a step loses:

    lr = η/γ      η = sqrt(lr c)      γ = sqrt(c/lr)      a = exp(-c).

The two noises are dependent. Given v', θ' has the mean above plus κ (v' - mean of v') and less variance:

    κ = Cov / Var ξ_v = tanh(c/2) sqrt(lr/c)      Var (ξ_θ | ξ_v) = (T/N) (lr/c) (2c - 4 tanh(c/2)).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Underdamped", "solve", "velocity_unit"]


class Underdamped(NamedTuple):
    """Coefficients for a velocity u in units s, v = s u, and a force f that is preconditioned by √G if at all:

    u' = u + (fade u + kick f) + noise of variance ``velocity_variance``
    θ' = θ + √G (carry u + push √G f + follow (u' - mean of u')) + noise of variance G ``variance``.
    """

    fade: float  # a - 1
    kick: float  # -(1 - a)/(γ s)
    carry: float  # s (1 - a)/γ
    push: float  # -(γη + a - 1)/γ²
    follow: float  # s κ; 0 without noise, when the velocity's rounding has nothing to do with the weights
    velocity_variance: float  # Var ξ_v / s²
    variance: float  # Var (ξ_θ | ξ_v)


def velocity_unit(temperature: float, num_data: float) -> float:
    """Return s: the power of two next to the velocity's standard deviation sqrt(T/N); 1 without noise."""
    heat = temperature / num_data
    return 2.0 ** round(math.log2(heat) / 2) if heat > 0 else 1.0


@lru_cache(maxsize=256)
def solve(lr: float, friction: float, heat: float, unit: float) -> Underdamped:
    """Return the coefficients of a step; ``heat`` is T/N, ``unit`` is s."""
    c, slow = friction, math.sqrt(lr / friction)  # slow = 1/γ
    lost = -math.expm1(-c)  # 1 - a
    return Underdamped(
        fade=-lost,
        kick=-lost * slow / unit,
        carry=lost * slow * unit,
        push=-lr * _late_push(c) / c,
        follow=math.tanh(c / 2) * slow * unit if heat > 0 else 0.0,
        velocity_variance=heat * -math.expm1(-2 * c) / unit**2,
        variance=heat * (lr / c) * _late_noise(c),
    )


def _late_push(c: float) -> float:
    """Return c + a - 1 without cancellation."""
    return c * c / 2 - c**3 / 6 + c**4 / 24 if c < 1e-3 else c + math.expm1(-c)


def _late_noise(c: float) -> float:
    """Return 2c - 4 tanh(c/2) without cancellation."""
    return c**3 / 6 - c**5 / 60 + 17 * c**7 / 10080 - 31 * c**9 / 181440 if c < 0.1 else 2 * c - 4 * math.tanh(c / 2)
