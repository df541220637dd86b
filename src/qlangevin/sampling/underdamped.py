"""Coefficients of one step of underdamped Langevin dynamics (SGHMC), by either of two integrators.

**Exact**: the dynamics are solved exactly while the gradient is held.

In continuous time, with unit mass, friction γ and temperature T/N, dθ = v dt and dv = -(γ v + f) dt + sqrt(2 γ T/N) dW. A step of
length η with a constant force f is, for a = exp(-γη),

    v' = a v - (1 - a)/γ f + ξ_v                  Var ξ_v = (T/N) (1 - a²)
    θ' = θ + (1 - a)/γ v - (γη + a - 1)/γ² f + ξ_θ    Var ξ_θ = (T/N) (2γη + 4a - a² - 3)/γ²,  Cov = (T/N) (1 - a)²/γ.

The user gives the learning rate ``lr`` of the SGLD that this becomes at high friction, and the dimensionless ``friction``
c = γη, the part of the velocity that a step loses:

    lr = η/γ      η = sqrt(lr c)      γ = sqrt(c/lr)      a = exp(-c).

The two noises are dependent. Given v', θ' has the mean above plus κ (v' - mean of v') and less variance:

    κ = Cov / Var ξ_v = tanh(c/2) sqrt(lr/c)      Var (ξ_θ | ξ_v) = (T/N) (lr/c) (2c - 4 tanh(c/2)).

**Splitting** (BAOAB, Leimkuhler and Matthews 2013, with one gradient a step): kick, half a move, friction and noise, half a move,

    w = v - η f      v' = a w + ξ_v      θ' = θ + (η/2) (w + v')      η² = 2 lr tanh(c/2).

Its noise is the velocity's alone, κ = η/2. Holding the gradient puts energy into a fast oscillation, which friction must take out
again: the exact integrator needs lr · curvature < 2, about as SGLD does, at any friction. The splitting needs η² · curvature < 4,
which is lr < 2/(tanh(c/2) · curvature): with little friction it takes far longer steps, and on a Gaussian its θ has the exact
covariance. With both integrators a constant force moves the weights by lr f a step in the long run, as with SGLD.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias, get_args

__all__ = ["INTEGRATORS", "Integrator", "Underdamped", "solve", "velocity_unit"]

Integrator: TypeAlias = Literal["exact", "splitting"]
INTEGRATORS: tuple[str, ...] = get_args(Integrator)


class Underdamped(NamedTuple):
    """Coefficients for a velocity u in units s, v = s u, and a force f that is preconditioned by √G if at all:

    u' = u + (fade u + kick f) + noise of variance ``velocity_variance``
    θ' = θ + √G (carry u + push √G f + follow (u' - mean of u')) + noise of variance G ``variance``.
    """

    fade: float  # a - 1
    kick: float  # of the exact integrator -(1 - a)/(γ s)
    carry: float  # s (1 - a)/γ
    push: float  # -(γη + a - 1)/γ²
    follow: float  # s κ; 0 without noise, when the velocity's rounding has nothing to do with the weights
    velocity_variance: float  # Var ξ_v / s²
    variance: float  # Var (ξ_θ | ξ_v); the splitting leaves none


def velocity_unit(temperature: float, num_data: float) -> float:
    """Return s: the power of two next to the velocity's standard deviation sqrt(T/N); 1 without noise."""
    heat = temperature / num_data
    return 2.0 ** round(math.log2(heat) / 2) if heat > 0 else 1.0


@lru_cache(maxsize=256)
def solve(lr: float, friction: float, heat: float, unit: float, integrator: Integrator = "exact") -> Underdamped:
    """Return the coefficients of a step; ``heat`` is T/N, ``unit`` is s."""
    return (_solve_exact if integrator == "exact" else _split)(lr, friction, heat, unit)


def _split(lr: float, c: float, heat: float, unit: float) -> Underdamped:
    a, eta = math.exp(-c), math.sqrt(2 * lr * math.tanh(c / 2))
    return Underdamped(
        fade=math.expm1(-c),
        kick=-a * eta / unit,
        carry=(1 + a) / 2 * eta * unit,
        push=-(1 + a) / 2 * eta**2,
        follow=eta / 2 * unit if heat > 0 else 0.0,
        velocity_variance=heat * -math.expm1(-2 * c) / unit**2,
        variance=0.0,
    )


def _solve_exact(lr: float, friction: float, heat: float, unit: float) -> Underdamped:
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
