"""Theorems 1, 2 and 3: their terms against numbers worked out by hand, and the bounds against what chains really do."""

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal

from qlangevin import theory
from qlangevin.quantization import random
from qlangevin.quantization.laws import nearest_integer, outcomes
from qlangevin.quantization.random import Key
from qlangevin.theory import Bound, Constants, Method, best_stepsize, bits_needed, bound, stationary, wasserstein2
from qlangevin.theory.bounds import ALGORITHMS, Algorithm, Theorem3

METHODS: dict[Algorithm, Method] = {"naive-sgldlp-l": "stochastic", "vc-sgldlp-l": "corrected"}
BY_HAND = Constants(convexity=0.5, smoothness=2.0, hessian=3.0, dimension=4, noise=0.3, gradient=5.0)


def without_bias_and_rounding(result: Bound) -> float:
    """Return the bound of Theorem 2 or 3 without bias and rounding, after infinitely many steps; see the module."""
    return result.discretization + result.noise


def test_theorem_1_by_hand() -> None:
    result = bound("sgldlp-f", BY_HAND, stepsize=0.16, weight_gap=0.25, gradient_gap=0.5, steps=3, start=2.0)
    assert result.contraction == pytest.approx(0.92**3 * 2)
    assert result.discretization == pytest.approx(1.65 * 4 * 0.8)
    assert result.bias == pytest.approx(3 * 0.0625 * 4 / (4 * 0.5))  # below 2 · 0.25 · 2 / (2 · 0.5) = 1
    assert result.noise == pytest.approx(math.sqrt(((0.25 + 4 * 0.0625) * 0.16 * 4 + 4 * 0.16 * 0.09) / (4 * 0.5)))
    assert result.rounding == 0
    assert result.total == pytest.approx(1.557376 + 5.28 + 0.375 + math.sqrt(0.1888))
    assert result.floor == pytest.approx(result.total - result.contraction)


def test_theorem_2_by_hand() -> None:
    result = bound("naive-sgldlp-l", BY_HAND, stepsize=0.16, weight_gap=0.25, gradient_gap=0.5, steps=3, start=2.0)
    left = 0.92**3
    assert result.discretization == pytest.approx(5.28)
    assert result.bias == pytest.approx(0.375)
    assert result.noise == pytest.approx(math.sqrt(((0.16 * 0.25 + 0.0625 / 0.16) * 4 + 4 * 0.16 * 0.09) / (4 * 0.5)))
    assert result.contraction + result.rounding == pytest.approx(left * 2 + (left + 1) * 0.25 * 2 / 2)
    assert result.floor == pytest.approx(5.28 + 0.375 + math.sqrt(0.89005) + 0.25)


@pytest.mark.parametrize(("alpha", "gap", "a"), [(0.16, 0.25, 5 * 0.015625 * 4), (0.01, 0.5, 0.16 + 0.025)])
def test_theorem_3_by_hand(alpha: float, gap: float, a: float) -> None:
    result = bound("vc-sgldlp-l", BY_HAND, alpha, gap, gradient_gap=0.5, steps=3, start=2.0)
    left = (1 - alpha / 2) ** 3
    assert result.discretization == pytest.approx(6.6 * math.sqrt(4 * alpha))
    assert result.bias == pytest.approx(min(3 * a / 0.5, 2 * math.sqrt(a) / 0.5))
    assert result.noise == pytest.approx(math.sqrt((alpha * 0.25 * 4 + 4 * alpha * 0.09) / 2 + a / (alpha * 0.5)))
    assert result.contraction + result.rounding == pytest.approx(left * 2 + (left + 1) * math.sqrt(a))
    printed = bound("vc-sgldlp-l", BY_HAND, alpha, gap, theorem3="printed")
    assert printed.rounding == pytest.approx(math.sqrt(max(2 * 0.5 * 0.01 * 5, 0.16) if alpha == 0.01 else a))


def test_the_smaller_bias_counts() -> None:
    coarse = bound("sgldlp-f", BY_HAND, 0.1, 4.0)
    assert coarse.bias == pytest.approx(2 * 4 * 2 / (2 * 0.5))  # the other is 3 · 16 · 4 / (4 · 0.5) = 96
    assert bound("sgldlp-f", replace(BY_HAND, hessian=0.0), 0.1, 4.0).bias == 0


def test_without_quantization_all_are_the_same() -> None:
    three = [replace(bound(name, BY_HAND, 0.1, 0.0), method="sgldlp-f") for name in ALGORITHMS]
    assert three[0] == three[1] == three[2]
    assert three[0].floor == pytest.approx(6.6 * math.sqrt(0.4) + math.sqrt(0.1 * 0.09 / 0.5))


def test_naive_diverges_with_the_stepsize_and_corrected_does_not() -> None:
    small, smaller = (bound("naive-sgldlp-l", BY_HAND, alpha, 0.25).floor for alpha in (1e-8, 1e-10))
    assert smaller / small == pytest.approx(10, rel=1e-3)
    corrected = [bound("vc-sgldlp-l", BY_HAND, alpha, 0.25).floor for alpha in (1e-8, 1e-10, 1e-12)]
    assert corrected == sorted(corrected, reverse=True)
    assert corrected[-1] == pytest.approx(math.sqrt((4 * 4 + 0.25 * 5) / 0.5), rel=1e-4)


sizes = st.floats(1e-3, 1e3)
shares = st.floats(1e-3, 1.0)
constants = st.builds(
    lambda m, ratio, hessian, d, noise, gradient: Constants(m, m * ratio, hessian, d, noise, gradient),
    sizes, st.floats(1, 100), sizes, st.integers(1, 1000), sizes, sizes,
)  # fmt: skip


@given(constants, shares, sizes, sizes, st.integers(0, 1000), st.sampled_from(ALGORITHMS), st.floats(1, 10))
def test_the_bound_grows_with_what_makes_it_harder(
    c: Constants, share: float, gap: float, start: float, steps: int, name: Algorithm, factor: float
) -> None:
    alpha = share * c.largest_stepsize
    arguments: dict[str, Any] = {
        "stepsize": alpha,
        "weight_gap": gap,
        "gradient_gap": gap,
        "steps": steps,
        "start": start,
    }
    here = bound(name, c, **arguments)
    assert here.total == pytest.approx(here.contraction + here.floor)
    harder = [
        bound(name, replace(c, hessian=c.hessian * factor), **arguments),
        bound(name, replace(c, noise=c.noise * factor), **arguments),
        bound(name, replace(c, dimension=math.ceil(c.dimension * factor)), **arguments),
        bound(name, c, **arguments | {"start": start * factor}),
        bound(name, c, **arguments | {"gradient_gap": gap * factor}),
        bound(name, c, **arguments | {"weight_gap": gap * factor}),
    ]
    if name == "vc-sgldlp-l":  # which falls from one case to the other as the gap widens
        harder.pop()
    for other in harder:
        assert other.total >= here.total * (1 - 1e-12)
    later = bound(name, c, **arguments | {"steps": steps + 1})
    assert here.total * (1 + 1e-12) >= later.total >= later.floor


@given(constants, sizes, st.floats(0, 10))
def test_no_stepsize_is_better_than_the_best(c: Constants, gap: float, gradient_gap: float) -> None:
    best = best_stepsize(c, gap, gradient_gap)
    floor = bound("naive-sgldlp-l", c, best, gap, gradient_gap).floor
    assert 0 < best <= c.largest_stepsize
    around = [best * (1 - 1e-3), best * (1 + 1e-3), *np.geomspace(c.largest_stepsize * 1e-6, c.largest_stepsize, 60)]
    for alpha in around:
        if alpha <= c.largest_stepsize:
            assert bound("naive-sgldlp-l", c, float(alpha), gap, gradient_gap).floor >= floor * (1 - 1e-12)


def test_best_stepsize_in_closed_form_and_by_brute_force() -> None:
    gap = 1 / 8
    assert best_stepsize(Constants(1.0, 1.0), gap) == pytest.approx(gap / 3.3)
    alphas = np.geomspace(1e-4, BY_HAND.largest_stepsize, 100_001)
    floors = [bound("naive-sgldlp-l", BY_HAND, float(alpha), gap, 0.5).floor for alpha in alphas]
    assert best_stepsize(BY_HAND, gap, 0.5) == pytest.approx(alphas[int(np.argmin(floors))], rel=2e-4)


def test_bits_of_sgld_are_half_of_those_of_sgd() -> None:
    ratios = []
    for accuracy in (1e-1, 1e-3, 1e-10, 1e-100, 1e-300):
        bits = bits_needed(BY_HAND, accuracy)
        assert bound("sgldlp-f", BY_HAND, 1e-9, 2.0**-bits.sgld).bias / accuracy == pytest.approx(1)
        assert 2 * 2 * 2.0**-bits.sgd / (2 * 0.5) / accuracy == pytest.approx(1)
        ratios.append(bits.sgld / bits.sgd)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == pytest.approx(0.5, abs=1e-3)
    assert bits_needed(BY_HAND, 1e-3, sgd_rate=8.0).sgd == pytest.approx(math.log2(8000))


def test_bits_are_whole_and_say_of_what() -> None:
    bits = bits_needed(BY_HAND, 1e-3)  # SGLD: 6 Δ² ≤ 1e-3, Δ ≤ 1/77.5; SGD: 4 Δ ≤ 1e-3, Δ ≤ 1/4000
    assert bits.whole == (7, 12)
    assert str(bits) == "7 fractional bits for SGLD, 12 for SGD, to come within 0.001"
    assert bits_needed(BY_HAND, 100.0).whole == (0, 0)
    assert bits_needed(Constants(1.0, 1.0), 1e-3).whole == (0, 9)  # a quadratic U has no bias


GAUSSIAN = Constants(1.0, 1.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["fixed6.0", "fixed8.2", "fixed8.3", "fixed8.4"])
def test_bounds_hold_for_a_gaussian(name: str, method: Algorithm) -> None:
    gap = 2.0 ** -int(name[-1])
    for alpha in (1.0, 0.3, 0.1, 0.01, 1e-3, 1e-4, 1e-5):
        law = stationary(name, alpha, METHODS[method])
        mean_gradient = float(law.probabilities @ law.points.abs())
        for d in (1, 10):  # in a product of Gaussians the squares of the distances add up
            c = replace(GAUSSIAN, dimension=d, gradient=d * mean_gradient)
            assert law.w2 * math.sqrt(d) <= without_bias_and_rounding(bound(method, c, alpha, gap))
            assert law.w2 * math.sqrt(d) <= bound(method, c, alpha, gap).floor


def test_bound_holds_for_a_gaussian_with_a_full_precision_accumulator() -> None:
    for gap in (1 / 2, 1 / 8, 1 / 64):
        for alpha in (1.0, 0.1, 1e-2, 1e-4):
            variance = (2 + alpha * gap**2 / 6) / (2 - alpha)  # see gaussian.accumulator_variance
            assert math.sqrt(variance) - 1 <= bound("sgldlp-f", GAUSSIAN, alpha, gap).floor


@pytest.mark.parametrize("method", METHODS)
def test_bounds_hold_from_the_first_step_on(method: Algorithm) -> None:
    law = stationary("fixed7.2", 0.02, METHODS[method])
    p = (law.points == 6).double()
    for steps in range(200):
        c = Constants(1.0, 1.0, gradient=6.0)
        allowed = bound(method, c, 0.02, 0.25, steps=steps, start=math.sqrt(36 + 1))
        assert wasserstein2(law.points, p, Normal(0.0, 1.0)) <= allowed.total
        p = p @ law.transition


def test_the_printed_error_of_theorem_3_is_too_small() -> None:
    alpha, gap = 1e-3, 2.0
    law = stationary("fixed6.-1", alpha)
    r = alpha * law.points.abs() / gap
    error = float(law.probabilities @ (gap**2 * r * (1 - r)).clamp_min(2 * alpha)) + 2 * alpha  # E‖ψ - θ‖²
    c = Constants(1.0, 1.0, gradient=float(law.probabilities @ law.points.abs()))
    assert error > 1.1 * bound("vc-sgldlp-l", c, alpha, gap, theorem3="printed").rounding ** 2
    assert error <= bound("vc-sgldlp-l", c, alpha, gap).rounding ** 2


# ---- Theorem 3, sharp


def exact_error(mu: Tensor, alpha: float, gap: float) -> Tensor:
    """Return E(ψ - θ)² of θ = Q^vc(μ, 2α) and ψ = μ + √(2α) ξ, over the three outcomes and, by quadrature, over ξ.

    Where Q^vc adds Gaussian noise it is the same ξ; elsewhere ξ is independent of θ.
    """
    v, v0 = 2 * alpha, gap * gap / 4
    noisy = v > v0
    xi = torch.linspace(-9, 9, 1001, dtype=torch.float64) if noisy else torch.zeros(1, dtype=torch.float64)
    density = Normal(0.0, 1.0).log_prob(xi).exp()
    x = mu[:, None] + math.sqrt(max(0.0, v - v0)) * xi
    n = nearest_integer(x / gap)
    down, up = outcomes(x / gap - n, torch.tensor((v0 if noisy else v) / gap**2, dtype=torch.float64))
    psi = mu[:, None] + math.sqrt(v) * xi if noisy else x
    each = torch.stack([p * (psi - (n + k) * gap) ** 2 for k, p in ((-1, down), (0, 1 - down - up), (1, up))]).sum(0)
    mean: Tensor = (each * density).sum(1) / density.sum()
    return mean + (0 if noisy else v)


def sharp_error(alpha: float, gap: float, gradient: float | None, dimension: int = 1) -> float:
    """Return the A of the sharp theorem."""
    c = Constants(1.0, 1.0, gradient=gradient, dimension=dimension)
    return bound("vc-sgldlp-l", c, alpha, gap, theorem3="sharp").rounding ** 2


ALPHAS = (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 2e-3, 1e-3, 1e-4, 1e-5)


@pytest.mark.parametrize("gap", [2.0, 0.25, 1 / 8])
def test_the_sharp_error_is_that_of_the_quantizer(gap: float) -> None:
    mu = torch.linspace(-0.5, 0.5, 201, dtype=torch.float64) * gap
    for alpha in ALPHAS:
        found, v0 = exact_error(mu, alpha, gap), gap * gap / 4
        if 2 * alpha > v0:  # the error is the same wherever μ is, and exactly A
            s = math.sqrt(2 * alpha) - math.sqrt(2 * alpha - v0)
            assert sharp_error(alpha, gap, None) == pytest.approx(s * s + v0)
            assert found.numpy() == pytest.approx(s * s + v0, rel=1e-9)
            assert s * s + v0 <= 2 * v0
        else:  # A without G is reached halfway between two numbers; with G it bounds the error of every drift from the grid
            assert float(found.max()) == pytest.approx(sharp_error(alpha, gap, None)) == pytest.approx(2 * alpha + v0)
            for drift, error in zip(mu.abs().tolist(), found.tolist(), strict=True):
                assert error <= sharp_error(alpha, gap, drift / alpha) * (1 + 1e-12)


@given(constants, shares, sizes)
def test_sharp_is_at_most_corrected(c: Constants, share: float, gap: float) -> None:
    alpha = share * c.largest_stepsize
    sharp = bound("vc-sgldlp-l", c, alpha, gap, theorem3="sharp")
    corrected = bound("vc-sgldlp-l", c, alpha, gap)
    printed = bound("vc-sgldlp-l", c, alpha, gap, theorem3="printed")
    for name, value in sharp.terms.items():
        assert value <= corrected.terms[name] * (1 + 1e-12)
    if 2 * alpha > gap * gap / 4:  # elsewhere the printed one is no bound
        assert corrected == printed
        assert sharp.rounding <= math.sqrt(2 / 5) * printed.rounding * (1 + 1e-12)


def test_the_sharp_cases_meet() -> None:
    gap = 0.25
    alpha = gap * gap / 8
    for factor in (1 - 1e-9, 1, 1 + 1e-9):  # the root of 2α - v_0 makes it steep from above
        assert sharp_error(alpha * factor, gap, None) == pytest.approx(2 * gap * gap / 4, rel=1e-4)
        assert sharp_error(alpha * factor, gap, 1e9) == pytest.approx(2 * gap * gap / 4, rel=1e-4)
    assert sharp_error(1e-4, gap, 0.5, dimension=3) == pytest.approx(12e-4 + 1e-4 * gap * 0.5)
    assert sharp_error(1e-4, gap, 0.0, dimension=3) == pytest.approx(12e-4)


@pytest.mark.parametrize("name", ["fixed6.-1", "fixed6.0", "fixed8.2", "fixed8.3", "fixed8.4"])
def test_the_sharp_bound_holds_for_a_gaussian(name: str) -> None:
    gap = float(theory.grid(name).diff()[0])
    for alpha in ALPHAS:
        law = stationary(name, alpha)
        mean_gradient = float(law.probabilities @ law.points.abs())
        error = float(law.probabilities @ exact_error((1 - alpha) * law.points, alpha, gap))
        for gradient in (None, mean_gradient):
            allowed = bound("vc-sgldlp-l", replace(GAUSSIAN, gradient=gradient), alpha, gap, theorem3="sharp")
            assert error <= allowed.rounding**2 * (1 + 1e-9)
            assert law.w2 <= without_bias_and_rounding(allowed) < allowed.floor


class Logistic:
    """Bayesian logistic regression on one weight: U(θ) = θ²/2 + Σ log(1 + exp(-y x θ))."""

    def __init__(self) -> None:
        x = random.normal(Key(5), 12).double()
        self.signed = torch.where(random.uniform(Key(6), 12) < torch.sigmoid(1.5 * x), x, -x)
        smoothness = 1 + float(x.square().sum()) / 4  # σ' is at most 1/4
        self.constants = Constants(
            1.0, smoothness, float((x.abs() ** 3).sum()) / (6 * math.sqrt(3))
        )  # and |σ''| 1/(6√3)
        t = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
        energy = t.square() / 2 + torch.nn.functional.softplus(-t[:, None] * self.signed).sum(1)
        mass = torch.cumulative_trapezoid((energy.min() - energy).exp(), t)
        self.t, self.cdf = t[1:].numpy(), (mass / mass[-1]).numpy()

    def gradient(self, t: Tensor) -> Tensor:
        return t - (torch.sigmoid(-t[:, None] * self.signed) * self.signed).sum(1)

    def quantile(self, u: Tensor) -> Tensor:
        return torch.from_numpy(np.interp(u.numpy(), self.cdf, self.t))


@pytest.fixture(scope="module")
def logistic() -> Logistic:
    return Logistic()


def test_constants_of_the_regression(logistic: Logistic) -> None:
    t = torch.linspace(-4, 4, 8001, dtype=torch.float64)
    second = logistic.gradient(t).diff() / t.diff()
    third = second.diff().abs() / t.diff()[1:]
    c = logistic.constants
    assert c.convexity <= float(second.min()) <= float(second.max()) <= c.smoothness
    assert 0.3 * c.hessian < float(third.max()) <= c.hessian


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["fixed6.2", "fixed8.4"])
def test_bounds_hold_for_logistic_regression(logistic: Logistic, name: str, method: Algorithm) -> None:
    for alpha in (0.3, 0.03, 3e-3, 3e-4):
        law = stationary(name, alpha, METHODS[method], logistic.gradient, target=logistic.quantile)
        c = replace(logistic.constants, gradient=float(law.probabilities @ logistic.gradient(law.points).abs()))
        for version in get_args(Theorem3)[:2]:
            allowed = bound(method, c, alpha, 2.0 ** -int(name[-1]), theorem3=version)
            assert law.w2 <= without_bias_and_rounding(allowed) < allowed.floor


def test_bias_of_full_precision_accumulators_is_of_second_order(logistic: Logistic) -> None:
    # A fine grid stands for the accumulator. The gradient is the mean of those at the two coarse neighbours.
    def law(gap: float) -> theory.Stationary:
        def gradient(t: Tensor) -> Tensor:
            below = torch.floor(t / gap) * gap
            up = (t - below) / gap
            return (1 - up) * logistic.gradient(below) + up * logistic.gradient(below + gap)

        return stationary("fixed9.5", 3e-3, gradient=gradient, target=logistic.quantile)

    unbiased, half, quarter = (law(gap) for gap in (1 / 32, 1 / 2, 1 / 4))
    assert (half.mean - unbiased.mean) / (quarter.mean - unbiased.mean) == pytest.approx(4, rel=0.02)
    for biased, gap in ((half, 1 / 2), (quarter, 1 / 4)):
        allowed = bound("sgldlp-f", logistic.constants, 3e-3, gap)
        assert abs(biased.mean - unbiased.mean) <= allowed.bias
        assert biased.w2 <= allowed.floor


def test_methods_have_the_names_that_pictures_use() -> None:
    assert bound("Naïve SGLDLP-L", BY_HAND, 0.1, 0.25) == bound("naive-sgldlp-l", BY_HAND, 0.1, 0.25)
    assert str(bound("VC SGLDLP-L", GAUSSIAN, 0.01, 0.25, steps=100, start=1.0)).splitlines() == [
        "Theorem 3, vc-sgldlp-l: W2 is at most 3.708",
        "  contraction    0.4683",
        "  discretization 0.165",
        "  bias           0",
        "  noise          2.795",
        "  rounding       0.2795",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"convexity": 0.0}, "convexity must be above 0, got 0.0"),
        ({"smoothness": math.inf}, "smoothness must be a finite number"),
        ({"convexity": 3.0}, "convexity must be at most smoothness.* got 3.0 and 2.0"),
        ({"hessian": -1.0}, "hessian must be a finite number that is not negative, got -1.0"),
        ({"noise": math.nan}, "noise must be .* got nan"),
        ({"gradient": "5"}, "gradient must be .* got '5'"),
        ({"dimension": 0}, "dimension must be an integer, at least 1, got 0"),
    ],
)
def test_bad_constants(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BY_HAND, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stepsize": 0.0}, "stepsize must be above 0 and at most 2/\\(m \\+ M\\) = 0.8, as the theorems ask, got 0.0"),
        ({"stepsize": 0.81}, "at most 2/\\(m \\+ M\\) = 0.8.* got 0.81"),
        ({"stepsize": math.nan}, "stepsize must be .* got nan"),
        ({"method": "sgld"}, "method must be one of sgldlp-f, naive-sgldlp-l, vc-sgldlp-l, got 'sgld'"),
        ({"weight_gap": -0.5}, "weight_gap must be .* got -0.5"),
        ({"gradient_gap": math.inf}, "gradient_gap must be .* got inf"),
        ({"steps": -1}, "steps must be an integer, at least 0, got -1"),
        ({"start": -1.0}, "start must be .* got -1.0"),
        ({"weight_gap": 1e300, "method": "sgldlp-f"}, "beyond the range of float64; give smaller constants"),
        (
            {"constants": GAUSSIAN},
            "stepsize=0.001 .* needs a bound on the gradient; give the constants gradient=G, or theor",
        ),
        ({"theorem3": "blunt"}, "theorem3 must be one of 'corrected', 'sharp', 'printed', got 'blunt'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    good = {"method": "vc-sgldlp-l", "constants": BY_HAND, "stepsize": 1e-3, "weight_gap": 0.25}
    with pytest.raises(ValueError, match=message):
        bound(**{**good, **arguments})


def test_bad_gaps_and_accuracies() -> None:
    with pytest.raises(ValueError, match=r"weight_gap must be above 0, got 0.0"):
        best_stepsize(BY_HAND, 0.0)
    with pytest.raises(ValueError, match=r"best stepsize is beyond the range of float64; give smaller constants"):
        best_stepsize(replace(BY_HAND, noise=1e200), 0.25)
    with pytest.raises(ValueError, match=r"accuracy must be above 0, got 0.0"):
        bits_needed(BY_HAND, 0.0)
    with pytest.raises(ValueError, match=r"sgd_rate must be a finite number that is not negative, got -1.0"):
        bits_needed(BY_HAND, 0.1, sgd_rate=-1.0)
