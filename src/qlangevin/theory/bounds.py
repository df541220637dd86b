"""Theorems 1, 2 and 3: how far a low-precision chain can be from its target π, in 2-Wasserstein distance.

U is m-strongly convex and M-smooth in d dimensions, its Hessian is Ψ-Lipschitz, a stochastic gradient is unbiased with
variance κ², rounding is stochastic and clips nothing, and the stepsize α is at most 2/(m + M). Then after K steps

    W_2(μ_K, π) ≤ (1-αm)^K (W_2(μ_0, π) + r)            contraction
                  + 1.65 (M/m) √(αd)                    discretization
                  + min(ΨA, M√A)/m                      bias
                  + √(α(Δ_G²d/4 + κ²)/m + αL²A/m)       noise: of gradients and of weights
                  + r                                   rounding

where A is at least E‖e‖², e the error that a step makes by rounding the weights, and E‖Q_G(∇Ũ)‖_1 ≤ G:

    1  SGLDLP-F          A = Δ_W²d/4                    L = M      r = 0
    2  naive SGLDLP-L    A = Δ_W²d/4                    L = 1/α    r = √A
    3  VC SGLDLP-L       A = 5Δ_W²d/4 if 2α > Δ_W²/4    L = 1/α    r = √A
                         A = 4αd + αΔ_W G otherwise

These are the paper's bounds, but for the last line. There the paper has A = max(4αd, 2αΔ_W G), because its proof takes
the larger of two sums for the sum of what is larger. The error of Q^vc is e = ψ - θ, where ψ = μ + √(2α) ξ has Gaussian
noise. If 2α ≤ Δ_W²/4 then a weight has variance 2α, or v_s where that is more, and contributes max(2α, v_s) + 2α, which
is at most 4α + v_s. The E[v_s] of all weights together are at most αΔ_W G.

``theorem3="sharp"`` takes less. With v_0 = Δ_W²/4 and s = √(2α) - √(2α - v_0),

    3  VC SGLDLP-L       A = (s² + v_0) d ≤ 2 v_0 d             if 2α > v_0
                         A = min(4αd + αΔ_W G, (2α + v_0) d)    otherwise; without G the second

If 2α > v_0 then θ = μ + √(2α - v_0) ξ + η, where η, the error of the three outcomes, has mean 0 and variance v_0 whatever ξ
is. So e = sξ - η, the two parts are uncorrelated, and E‖e‖² is not only at most but equal to (s² + v_0) d; the paper bounds
|η| and the parts one by one and arrives at 5 v_0 d. As s ≤ v_0/√(2α) < √v_0, it is below 2 v_0 d. Otherwise a weight
contributes max(2α, v_s) + 2α as above, and v_s ≤ v_0 where nothing is known of the gradient. Both cases are 2 v_0 d where
they meet, at 2α = v_0.

The proof of Theorem 3 also takes e for centred given ψ, which it is only given the step before. The theorem holds all
the same, and so do Theorems 2 and 3 without bias and rounding. Let the diffusion L_t start in π and share the noise ξ.
In one step θ - L shrinks by 1 - αm, and V - e is added, where V = ∫ ∇U(L_t) - ∇U(L_0) dt is what discretization costs.
Only a part sξ of e, with s ≥ 0, is correlated with V, and E⟨V, ξ⟩ ≥ 0: hence e adds no more than its variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .._validate import check_choice, check_integer, check_number

__all__ = ["Algorithm", "Bits", "Bound", "Constants", "Theorem3", "best_stepsize", "bits_needed", "bound"]

Algorithm: TypeAlias = Literal["sgldlp-f", "naive-sgldlp-l", "vc-sgldlp-l"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)  # of Theorems 1, 2 and 3
Theorem3: TypeAlias = Literal["corrected", "sharp", "printed"]


@dataclass(frozen=True)
class Constants:
    """Constants of the target and of its gradients that the theorems need."""

    convexity: float
    """m: no eigenvalue of the Hessian of U is below it."""
    smoothness: float
    """M: no eigenvalue of the Hessian of U is above it."""
    hessian: float = 0.0
    """Ψ: Lipschitz constant of the Hessian, ‖∇²U(x) - ∇²U(y)‖ ≤ Ψ‖x - y‖; 0 if U is quadratic."""
    dimension: int = 1
    """d: the number of weights."""
    noise: float = 0.0
    """κ: standard deviation of a stochastic gradient, E‖∇Ũ - ∇U‖² ≤ κ²; 0 for the gradient of all data."""
    gradient: float | None = None
    """G: E‖Q_G(∇Ũ)‖_1 at most; needed for VC SGLDLP-L where 2α ≤ Δ_W²/4."""

    def __post_init__(self) -> None:
        for name in ("convexity", "smoothness"):
            _positive(name, getattr(self, name))
        for name in ("hessian", "noise"):
            check_number(name, getattr(self, name))
        check_integer("dimension", self.dimension, 1)
        if self.gradient is not None:
            check_number("gradient", self.gradient)
        if self.convexity > self.smoothness:
            raise ValueError(
                f"convexity must be at most smoothness, the largest eigenvalue of the Hessian, got {self.convexity} "
                f"and {self.smoothness}"
            )

    @property
    def largest_stepsize(self) -> float:
        """2/(m + M): up to here a step of gradient descent brings any two points nearer, by a factor of at most 1 - αm."""
        return 2 / (self.convexity + self.smoothness)


@dataclass(frozen=True)
class Bound:
    """An upper bound of W_2(μ_K, π): ``total``, the sum of `terms`. ``noise`` is √(gradient_noise² + weight_noise²)."""

    method: Algorithm
    contraction: float
    discretization: float
    bias: float
    gradient_noise: float
    weight_noise: float
    rounding: float

    @property
    def noise(self) -> float:
        return math.hypot(self.gradient_noise, self.weight_noise)

    @property
    def terms(self) -> dict[str, float]:
        """The terms by name."""
        return {
            "contraction": self.contraction,
            "discretization": self.discretization,
            "bias": self.bias,
            "noise": self.noise,
            "rounding": self.rounding,
        }

    @property
    def total(self) -> float:
        return math.fsum(self.terms.values())

    @property
    def floor(self) -> float:
        """The bound after infinitely many steps."""
        return math.fsum(value for name, value in self.terms.items() if name != "contraction")

    def __str__(self) -> str:
        theorem = ALGORITHMS.index(self.method) + 1
        lines = [f"Theorem {theorem}, {self.method}: W2 is at most {self.total:.4g}"]
        return "\n".join(lines + [f"  {name:15}{value:.4g}" for name, value in self.terms.items()])


def bound(
    method: Algorithm | str,
    constants: Constants,
    stepsize: float,
    weight_gap: float,
    gradient_gap: float = 0.0,
    steps: int | None = None,
    start: float = 0.0,
    theorem3: Theorem3 = "corrected",
) -> Bound:
    """Return the bound for one of the three methods.

    Args:
        method: sgldlp-f, naive-sgldlp-l or vc-sgldlp-l; "VC SGLDLP-L" is the same.
        constants: of the target.
        stepsize: α, above 0 and at most 2/(m + M).
        weight_gap: Δ_W, 2^-F for a fixed point format with F fractional bits; 0 is full precision.
        gradient_gap: Δ_G.
        steps: K; None is infinity.
        start: W_2(μ_0, π).
        theorem3: A of VC SGLDLP-L: "corrected" is the paper's, but for the case 2α ≤ Δ_W²/4; "sharp" is at most that, and
            needs no G; "printed" is the paper's own, which is too small in that case. See the module for all three.
    """
    check_choice("theorem3", theorem3, get_args(Theorem3))
    name, c = _algorithm(method), constants
    alpha, m = _stepsize(stepsize, c), c.convexity
    variance = _rounding_variance(name, c, alpha, check_number("weight_gap", weight_gap), theorem3)
    gradient = check_number("gradient_gap", gradient_gap) * math.sqrt(c.dimension) / 2
    check_number("start", start)
    error = math.sqrt(variance)
    rounding = 0.0 if name == "sgldlp-f" else error
    left = 0.0 if steps is None else max(0.0, 1 - alpha * m) ** check_integer("steps", steps, 0)
    result = Bound(
        method=name,
        contraction=left * (start + rounding),
        discretization=1.65 * c.smoothness / m * math.sqrt(alpha * c.dimension),
        bias=min(c.hessian * variance, c.smoothness * error) / m,
        gradient_noise=math.sqrt(alpha / m) * math.hypot(gradient, c.noise),
        weight_noise=math.sqrt(alpha / m) * error * (c.smoothness if name == "sgldlp-f" else 1 / alpha),
        rounding=rounding,
    )
    if not math.isfinite(result.total):
        raise ValueError(f"the bound is beyond the range of float64; give smaller constants than {c}")
    return result


def best_stepsize(constants: Constants, weight_gap: float, gradient_gap: float = 0.0) -> float:
    """Return the stepsize at which Theorem 2 leaves the lowest floor for naive SGLDLP-L.

    The floor is a√α + √(bα + c/α) and terms without α, where a = 1.65 (M/m) √d, b = (Δ_G²d/4 + κ²)/m, c = Δ_W²d/(4m).
    Its derivative vanishes where (a²b - b²) α⁴ + (a² + 2b) c α² = c², and that is at one α only:
    α² = 2c / (a² + 2b + a√(a² + 8b)). If this is beyond 2/(m + M), the best is 2/(m + M).
    """
    d, m = constants.dimension, constants.convexity
    quantization, noise = check_number("gradient_gap", gradient_gap), constants.noise
    a = 1.65 * constants.smoothness / m * math.sqrt(d)
    b = (quantization * quantization * d / 4 + noise * noise) / m
    c = math.sqrt(d / m) / 2 * _positive("weight_gap", weight_gap)  # its root
    alpha = c * math.sqrt(2 / (a * a + 2 * b + a * math.sqrt(a * a + 8 * b)))
    if not alpha > 0:
        raise ValueError(f"the best stepsize is beyond the range of float64; give smaller constants than {constants}")
    return min(alpha, constants.largest_stepsize)


@dataclass(frozen=True)
class Bits:
    """Fractional bits F, gap 2^-F, at which a bound equals ``accuracy``; a format needs the next integer."""

    accuracy: float
    sgld: float
    sgd: float

    @property
    def whole(self) -> tuple[int, int]:
        """(of SGLD, of SGD) as formats have them: integers, not below zero."""
        return math.ceil(max(0.0, self.sgld)), math.ceil(max(0.0, self.sgd))

    def __str__(self) -> str:
        sgld, sgd = self.whole
        return f"{sgld} fractional bits for SGLD, {sgd} for SGD, to come within {self.accuracy:g}"


def bits_needed(constants: Constants, accuracy: float, sgd_rate: float | None = None) -> Bits:
    """Return the bits that SGLD and SGD with full-precision accumulators need, with many steps of a small stepsize.

        SGLD    min(ΨΔ²d/4, MΔ√d/2)/m ≤ accuracy        Theorem 1, its bias
        SGD     rate · Δ ≤ accuracy                     Yang et al. (2019)

    Asymptotically SGLD needs half as many bits as SGD, because Δ is squared. The paper says of SGD only that its error
    is proportional to Δ. The rate taken by default, M√d/(2m), is that of Theorem 1 for a U of which only m and M are
    known. This compares two bounds: it does not say that SGD could not be better than its own.
    """
    m, d = constants.convexity, constants.dimension
    accuracy = _positive("accuracy", accuracy)
    linear = constants.smoothness * math.sqrt(d) / (2 * m)
    square = constants.hessian * d / (4 * m)
    rate = linear if sgd_rate is None else _positive("sgd_rate", sgd_rate)
    if square == 0:  # a quadratic U has no bias, however coarse the grid
        return Bits(accuracy, -math.inf, _log2(rate, accuracy))
    return Bits(accuracy, min(_log2(square, accuracy) / 2, _log2(linear, accuracy)), _log2(rate, accuracy))


def _rounding_variance(method: Algorithm, c: Constants, alpha: float, gap: float, theorem3: Theorem3) -> float:
    """Return A, for all weights together."""
    most, d = gap * gap / 4, c.dimension
    if method != "vc-sgldlp-l":
        return most * d
    if 2 * alpha > most:
        shift = most / (math.sqrt(2 * alpha) + math.sqrt(2 * alpha - most))  # s, without cancellation
        return (shift * shift + most) * d if theorem3 == "sharp" else 5 * most * d
    if theorem3 == "sharp":
        by_gradient = math.inf if c.gradient is None else 4 * alpha * d + gap * alpha * c.gradient
        return min(by_gradient, (2 * alpha + most) * d)
    if c.gradient is None:
        raise ValueError(
            f"with stepsize={alpha} and weight_gap={gap}, where 2α is at most Δ²/4, Theorem 3 needs "
            'a bound on the gradient; give the constants gradient=G, or theorem3="sharp"'
        )
    if theorem3 == "printed":
        return max(2 * gap * alpha * c.gradient, 4 * alpha * d)
    return 4 * alpha * d + gap * alpha * c.gradient


def _algorithm(name: str) -> Algorithm:
    for known in ALGORITHMS:
        if str(name).lower().replace("ï", "i").replace(" ", "-") == known:
            return known
    raise ValueError(f"method must be one of {', '.join(ALGORITHMS)}, got {name!r}")


def _stepsize(value: float, constants: Constants) -> float:
    limit = constants.largest_stepsize
    if not 0 < check_number("stepsize", value) <= limit:
        raise ValueError(
            f"stepsize must be above 0 and at most 2/(m + M) = {limit:g}, as the theorems ask, got {value!r}"
        )
    return float(value)


def _positive(name: str, value: float) -> float:
    if check_number(name, value) == 0:
        raise ValueError(f"{name} must be above 0, got {value!r}")
    return float(value)


def _log2(a: float, b: float) -> float:
    """Return log2(a/b), also where the quotient is out of range."""
    return math.log2(a) - math.log2(b)
