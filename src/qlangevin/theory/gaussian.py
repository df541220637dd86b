"""The exact stationary law of Langevin samplers in discrete time on a Gaussian target, in any dimension.

The mean loss is θᵀHθ/2, its gradient Hθ. With N data, temperature T, weight decay λ and localization γ_loc around w_0 a step sees

    f = Aθ - (γ_loc/N) w_0,    A = H + (λ + γ_loc/N) I,

and in continuous time θ would have the mean m = A⁻¹ (γ_loc/N) w_0 and the covariance (T/N) A⁻¹. Steps of finite length have the
same mean and another covariance. With a fixed diagonal G (the preconditioner; the inverse mass of SGHMC) the samplers are

    SGLD    θ' = θ - lr G f + √(2 lr T G/N) ξ
    SGHMC   v' = a v - (1-a)/γ √G f + ξ_v
            θ' = θ + √G [(1-a)/γ v - (γη + a - 1)/γ² √G f + ξ_θ]

with η = √(lr c), γ = √(c/lr), a = e^-c for the dimensionless friction c = γη, and noise of

    Var ξ_v = (T/N)(1 - a²)    Var ξ_θ = (T/N)(2c + 4a - a² - 3)/γ²    Cov(ξ_v, ξ_θ) = (T/N)(1 - a)²/γ.

That integrates friction and noise exactly while f stands still; as c grows it becomes SGLD with the same lr. The splitting
``update="splitting"`` has, with η² = 2 lr tanh(c/2) and u = v - η √G f, v' = a u + ξ_v and θ' = θ + √G (η/2)(u + v'). All are
linear: the state z minus its mean goes to F z + noise of covariance Q, and the stationary covariance X solves X = F X Fᵀ + Q.

The low-precision SGHMC of Wang et al. (arXiv 2310.16320) is printed with a plus before the gradient in θ', and its
variance-corrected form draws ξ_v and ξ_θ independently. ``update="published"`` and ``noise="independent"`` are these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from .._validate import check_choice, check_number

__all__ = ["GaussianLaw", "NoiseLaw", "Update", "gaussian"]

Update: TypeAlias = Literal["exact", "splitting", "published"]
NoiseLaw: TypeAlias = Literal["correlated", "independent"]
MOST_DOUBLINGS = 200


@dataclass(frozen=True, eq=False)
class GaussianLaw:
    """Stationary law of a sampler on a Gaussian: moments of θ and, for SGHMC, of the velocity v. All float64."""

    mean: Tensor
    covariance: Tensor
    target: Tensor
    """(T/N) A⁻¹: the covariance in continuous time, without gradient noise or rounding."""
    velocity: Tensor | None
    """Covariance of v; None for SGLD."""
    cross: Tensor | None
    """Cov(θ, v); None for SGLD."""
    spectral_radius: float
    """Of F: below 1, and the slowest mode shrinks by this factor in each step."""
    long_run: Tensor
    """Sum of the autocovariances of θ over all lags, positive and negative."""

    def autocorrelation_time(self, direction: Tensor) -> float:
        """Return the integrated autocorrelation time of uᵀθ in steps: 1 + 2 Σ_k ρ_k. An effective sample takes that many."""
        u = _vector("direction", direction, len(self.mean))
        if not bool(u.any()):
            raise ValueError("direction must not be zero everywhere")
        return float((u @ self.long_run @ u) / (u @ self.covariance @ u))


class _Scheme(NamedTuple):
    """Coefficients of SGHMC for one friction: see the equations of this module."""

    decay: float  # a
    slow: float  # (1 - a)/γ, of the force on v
    carry: float  # (1 - a)/γ, of v on θ
    kick: float  # (γη + a - 1)/γ²
    noise: tuple[float, float, float]  # Var ξ_v, Cov, Var ξ_θ, without T/N

    @classmethod
    def of(cls, lr: float, c: float, update: Update) -> _Scheme:
        """Return the coefficients of an update."""
        return cls.splitting(lr, c) if update == "splitting" else cls.exact(lr, c)

    @classmethod
    def splitting(cls, lr: float, c: float) -> _Scheme:
        """Return the coefficients of kick, half a move, friction and noise, half a move."""
        a, var = math.exp(-c), -math.expm1(-2 * c)
        eta = math.sqrt(2 * lr * math.tanh(c / 2))
        middle = (1 + a) / 2
        return cls(a, a * eta, middle * eta, middle * eta**2, (var, eta / 2 * var, eta**2 / 4 * var))

    @classmethod
    def exact(cls, lr: float, c: float) -> _Scheme:
        """Return the coefficients; differences of nearly equal numbers are taken by expm1 or by their series."""
        gamma, lost = math.sqrt(c / lr), -math.expm1(-c)  # lost: 1 - a
        kick = c - lost if c > 1e-2 else c * c / 2 * (1 - c / 3 * (1 - c / 4 * (1 - c / 5 * (1 - c / 6))))
        spread = (
            2 * c - 2 * lost - lost**2
            if c > 1e-2
            else c**3 * (2 / 3 - c / 2 + 7 * c**2 / 30 - c**3 / 12 + 31 * c**4 / 1260)
        )
        variances = (-math.expm1(-2 * c), lost**2 / gamma, spread / gamma**2)
        return cls(math.exp(-c), lost / gamma, lost / gamma, kick / gamma**2, variances)


def gaussian(
    hessian: Tensor,
    num_data: float,
    lr: float,
    *,
    temperature: float = 1.0,
    weight_decay: float = 0.0,
    localization: float = 0.0,
    center: Tensor | None = None,
    preconditioner: Tensor | None = None,
    friction: float | None = None,
    gradient_noise: Tensor | None = None,
    rounding: Tensor | None = None,
    update: Update = "exact",
    noise: NoiseLaw = "correlated",
) -> GaussianLaw:
    """Return the stationary law of SGLD, or with a ``friction`` of SGHMC, on the Gaussian of energy N θᵀHθ/2.

    Args:
        hessian: H, the symmetric matrix of second derivatives of the MEAN loss.
        num_data: N.
        lr: the learning rate for the mean loss; of SGHMC that of the SGLD it becomes at high friction.
        temperature: T.
        weight_decay: λ, the precision of the Gaussian prior over N.
        localization: γ_loc, adds the energy γ_loc |θ - w_0|²/2.
        center: w_0 of the localization; 0 by default.
        preconditioner: G, a positive number for each weight.
        friction: c = γη of SGHMC; None is SGLD.
        gradient_noise: covariance of the gradient of the mean loss, from minibatches say: a matrix, or a vector of variances.
        rounding: covariance that rounding the weights adds in each step: a matrix, or a vector of variances.
        update: of SGHMC; ``"exact"`` and ``"splitting"`` are its integrators, ``"published"`` is the exact one with the sign
            as printed in arXiv 2310.16320.
        noise: ``"independent"`` is SGHMC without the correlation of its two noises.

    Raises ValueError if there is no stationary law: if A is not positive definite, or lr too large.
    """
    _check_settings(num_data, lr, temperature, friction, update, noise)
    for name, value in (("weight_decay", weight_decay), ("localization", localization)):
        check_number(name, value)
    heat, loc = temperature / num_data, localization / num_data
    a = _precision(hessian, weight_decay + loc)
    d = len(a)
    g = _vector("preconditioner", torch.ones(d) if preconditioner is None else preconditioner, d)
    if not bool((g > 0).all()):
        raise ValueError(f"preconditioner must be positive everywhere, its least element is {float(g.min()):g}")
    w0 = _vector("center", torch.zeros(d) if center is None else center, d)
    root = g.sqrt()
    scale = root[:, None] * root  # in the coordinates θ/√G the preconditioner is 1
    s = a * scale
    inputs = (_covariance("gradient_noise", gradient_noise, d) * scale, _covariance("rounding", rounding, d) / scale)
    if friction is None:
        lost, q = lr * s, 2 * lr * heat * torch.eye(d, dtype=s.dtype) + lr**2 * inputs[0] + inputs[1]
    else:
        lost, q = _sghmc(s, _Scheme.of(lr, friction, update), heat, inputs, update, noise)
    radius = _check_stable(lost, s, lr, friction, update)
    x = solve_lyapunov(lost, q)
    summed = torch.linalg.solve(lost, x)
    here = slice(-d, None)  # θ comes last in the state of SGHMC
    return GaussianLaw(
        mean=torch.linalg.solve(a, loc * w0),
        covariance=x[here, here] * scale,
        target=heat * torch.linalg.inv(a),
        velocity=None if friction is None else x[:d, :d],
        cross=None if friction is None else root[:, None] * x[here, :d],
        spectral_radius=radius,
        long_run=(summed + summed.T - x)[here, here] * scale,
    )


def _sghmc(
    s: Tensor, scheme: _Scheme, heat: float, inputs: tuple[Tensor, Tensor], update: Update, noise: NoiseLaw
) -> tuple[Tensor, Tensor]:
    """Return I - F and Q of SGHMC for the state (v, θ/√G); ``inputs`` are the covariances of gradients and of rounding."""
    one, sign = torch.eye(len(s), dtype=s.dtype), -1 if update == "published" else 1
    pull = (scheme.slow, sign * scheme.kick)  # of the gradient on v and on θ
    lost = torch.cat(
        (torch.cat(((1 - scheme.decay) * one, pull[0] * s), 1), torch.cat((-scheme.carry * one, pull[1] * s), 1))
    )
    var_v, cov, var_theta = (heat * x for x in scheme.noise)
    cov = cov if noise == "correlated" else 0.0
    heat_q = torch.kron(torch.tensor([[var_v, cov], [cov, var_theta]], dtype=s.dtype), one)
    along = torch.tensor(pull, dtype=s.dtype)
    q = heat_q + torch.kron(along[:, None] * along, inputs[0])
    q[len(s) :, len(s) :] += inputs[1]
    return lost, q


def solve_lyapunov(lost: Tensor, q: Tensor) -> Tensor:
    """Solve X = F X Fᵀ + Q for F = I - ``lost`` by doubling: X is the sum of F^k Q F^kᵀ over k, and 2, 4, 8, ... terms are added.

    F itself is never formed: of a slow chain it is almost the identity, and I - F would have no digits left.
    """
    x, e = q, lost
    for _ in range(MOST_DOUBLINGS):
        term = x - e @ x - x @ e.T + e @ x @ e.T
        x = x + (term + term.T) / 2
        if float(term.abs().max()) <= 1e-17 * float(x.abs().max()):
            return x
        e = 2 * e - e @ e
    raise ArithmeticError("the stationary covariance did not converge: the chain is hardly stable; take a smaller lr")


def _check_stable(lost: Tensor, s: Tensor, lr: float, friction: float | None, update: Update) -> float:
    """Return the spectral radius of F; raise ValueError with the largest lr if it is not below 1."""
    e = torch.linalg.eigvals(lost)
    excess = e.abs().square() - 2 * e.real  # |1 - e|² - 1, with all its digits
    if bool((excess < 0).all()):
        return math.sqrt(1 + float(excess.max()))
    stiffest = float(torch.linalg.eigvalsh(s)[-1])
    radius = math.sqrt(max(1.0, 1 + float(excess.max())))
    remedy = 'use update="exact"'
    if update != "published":
        remedy = f"lr must be below {_largest_step(friction, update) / stiffest:.6g}"
    raise ValueError(f"at lr={lr:g} the chain diverges (spectral radius {radius:.6g}); {remedy}")


def _largest_step(c: float | None, update: Update) -> float:
    """Return the bound of lr times the largest eigenvalue: where a root of F's characteristic polynomial is -1 or a pair leaves
    the unit circle (the criterion of Jury).
    """
    if c is None:
        return 2.0
    a, slow, carry, kick, _ = _Scheme.of(1.0, c, update)
    flips = (1 + a) * kick - slow * carry
    spirals = slow * carry - a * kick
    return min([2 * (1 + a) / flips] * (flips > 0) + [(1 - a) / spirals] * (spirals > 1e-12 * kick))


# ---- arguments


def _check_settings(
    num_data: float, lr: float, temperature: float, friction: float | None, update: str, noise: str
) -> None:
    """Raise ValueError for numbers that must be positive and are not, and for words that are none of the choices."""
    named = {
        "num_data": num_data,
        "lr": lr,
        "temperature": temperature,
        "friction": 1.0 if friction is None else friction,
    }
    for name, value in named.items():
        if check_number(name, value) == 0:
            raise ValueError(f"{name} must be above 0, got {value!r}")
    check_choice("update", update, get_args(Update))
    check_choice("noise", noise, get_args(NoiseLaw))
    if friction is None and (update, noise) != ("exact", "correlated"):
        raise ValueError("update and noise are settings of SGHMC; give its friction, or leave them out")


def _precision(hessian: Tensor, added: float) -> Tensor:
    """Return A = H + ``added`` I in float64; raise ValueError if it is not symmetric and positive definite."""
    h = torch.as_tensor(hessian, dtype=torch.float64)
    if h.dim() != 2 or h.shape[0] != h.shape[1] or len(h) == 0:
        raise ValueError(f"hessian must be a square matrix, got the shape {tuple(h.shape)}; of one weight it is [[h]]")
    a = _symmetric("hessian", h) + added * torch.eye(len(h), dtype=h.dtype)
    if (least := float(torch.linalg.eigvalsh(a)[0])) <= 0:
        raise ValueError(
            f"the least eigenvalue of the hessian with weight decay and localization is {least:g}: the posterior has no "
            f"finite variance; raise weight_decay or localization / num_data by more than {-least:g}"
        )
    return a


def _symmetric(name: str, matrix: Tensor) -> Tensor:
    """Return a matrix made exactly symmetric; raise ValueError if it is not finite or not symmetric up to rounding."""
    if not bool(matrix.isfinite().all()):
        raise ValueError(f"{name} must be finite everywhere")
    odd = float((matrix - matrix.T).abs().max())
    if odd > 1e-6 * float(matrix.abs().max()):
        raise ValueError(
            f"{name} must be symmetric, but differs from its transpose by {odd:g}; take ({name} + {name}.T)/2"
        )
    return (matrix + matrix.T) / 2


def _vector(name: str, x: Tensor, size: int) -> Tensor:
    x = torch.as_tensor(x, dtype=torch.float64)
    if x.shape != (size,) or not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be {size} finite numbers, one for each weight, got the shape {tuple(x.shape)}")
    return x


def _covariance(name: str, x: Tensor | None, size: int) -> Tensor:
    """Return a covariance as a matrix: zero for None, diagonal for a vector of variances."""
    if x is None:
        return torch.zeros(size, size, dtype=torch.float64)
    x = torch.as_tensor(x, dtype=torch.float64)
    x = torch.diag(_vector(name, x, size)) if x.dim() == 1 else x
    if x.shape != (size, size):
        raise ValueError(
            f"{name} must be a matrix of {size} x {size}, or {size} variances, got the shape {tuple(x.shape)}"
        )
    x = _symmetric(name, x)
    if float(torch.linalg.eigvalsh(x)[0]) < -1e-9 * float(x.abs().max()):
        raise ValueError(f"{name} must be a covariance, without negative eigenvalues")
    return x
