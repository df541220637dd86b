"""The variance of a step on its grid, against transition probabilities, enumeration and draws."""

import math

import pytest
import torch
from torch import Tensor

from qlangevin.quantization import operators
from qlangevin.quantization.formats import parse
from qlangevin.quantization.laws import Mean
from qlangevin.quantization.operators import Rounding
from qlangevin.quantization.random import Key
from qlangevin.sampling.step_variance import Proposal, measure_step
from qlangevin.theory import grid, stationary

ROUNDINGS: tuple[Rounding, ...] = ("corrected", "stochastic", "nearest")


def gradient(x: Tensor) -> Tensor:
    return 0.8 * x - 0.3


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    "stepsize", [1.0, 0.3, 0.1, 0.02, 1e-3]
)  # with gap 1/8: v from 128 to 0.128 gaps²; r up to 1/2
def test_variance_is_that_of_the_transition(stepsize: float, rounding: Rounding) -> None:
    """P(θ, θ') of the exact theory has this variance wherever a step does not reach the ends of the grid."""
    points, v = grid("fixed9.3"), 2 * stepsize
    matrix = stationary("fixed9.3", stepsize, rounding, gradient).transition
    inside = points.abs() < points[-1] - 9 * math.sqrt(v) - 1 - stepsize * gradient(points).abs()
    mean = matrix @ points
    variance = matrix @ points.square() - mean.square()
    found = measure_step(Proposal(points, -stepsize * gradient(points), torch.tensor(v).double()), "fixed9.3", rounding)
    assert int(inside.sum()) > 20
    torch.testing.assert_close(found.variance[inside] / 64, variance[inside], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("s", [1e-12, 1e-4, 0.009, 0.011, 0.1, 0.249, 0.251, 0.9, 1.1, 30.0])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_variance_is_that_of_the_integral(s: float, rounding: Rounding) -> None:
    """E over a fine lattice of the noise, for noise on either side of every case distinction."""
    r = torch.linspace(-0.5, 0.5, 21, dtype=torch.float64)
    found = measure_step(Proposal(torch.zeros_like(r), r, torch.tensor(s).double()), "fixed16.0", rounding)
    z = torch.special.ndtri((torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000)
    x = r[:, None] + math.sqrt(s) * z
    if rounding == "corrected":
        expected = torch.maximum(torch.tensor(s).double(), r.abs() * (1 - r.abs()))
    elif rounding == "stochastic":
        below = x - x.floor()
        expected = x.var(1, correction=0) + (below * (1 - below)).mean(1)
    else:
        expected = torch.where(x < 0, -(0.5 - x).floor(), (x + 0.5).floor()).var(1, correction=0)
    far = (r.abs() < 0.49) | (s > 1e-3)  # at a midpoint and without noise Q^d is a matter of the last digit
    torch.testing.assert_close(found.variance[far], expected[far], rtol=1e-3, atol=2e-5)


def test_regimes_by_hand() -> None:
    """Gap 1: v_s = 0.1 · 0.9 = 0.09 at a drift of 0.1."""
    for v, above, below in ((0.3, True, False), (0.25, False, False), (0.1, False, False), (0.08, False, True)):
        found = measure_step(Proposal(torch.zeros(1), torch.tensor([0.1]), torch.tensor(v)), "fixed8.0", "corrected")
        assert (bool(found.above), bool(found.below)) == (above, below)
        assert float(found.variance) == pytest.approx(max(v, 0.09), rel=1e-6)
        assert float(found.v_s) == pytest.approx(0.09, rel=1e-6)


def test_a_tiny_drift_keeps_its_digits() -> None:
    found = measure_step(
        Proposal(torch.tensor([100.0]), torch.tensor([1e-12]), torch.tensor(1e-13)), "fixed8.0", "corrected"
    )
    assert float(found.v_s) == pytest.approx(1e-12, rel=1e-6)
    assert bool(found.below)


def drawn(theta: Tensor, drift: Tensor, v: float, name: str, count: int) -> Tensor:
    """Deviations of draws from their mean, draw by draw."""
    steps = [operators.draw(Mean(theta, drift), torch.tensor(v), parse(name), Key(1, 0, k)) for k in range(count)]
    return (torch.stack(steps) - theta).double() - drift


@pytest.mark.parametrize("name", ["bfp8", "bfp6/4", "bfp5/tensor", "e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("v", [3e-2, 3e-4, 1e-6])
def test_variance_is_that_of_draws(name: str, v: float) -> None:
    """The mean of drawn / estimated is normal about 1: beyond 5 standard errors once in 100 000 of these 15 tests.

    The largest element of a block is 1.25, so that none crosses a power of two.
    """
    torch.manual_seed(0)
    theta = parse(name).gap(torch.full((8, 16), 1.25)) * torch.randint(-2, 3, (8, 16))
    theta[:, ::4] = 1.25
    drift = torch.randn(8, 16) * 1e-3
    found = measure_step(Proposal(theta, drift, torch.tensor(v)), name, "corrected")
    ratio = drawn(theta, drift, v, name, 2000).square() / (found.variance * found.gap.square())
    error = ratio.var(0).sum().sqrt() / ratio[0].numel() / math.sqrt(len(ratio))
    assert abs(float((ratio.mean() - 1) / error)) < 5


@pytest.mark.parametrize("v", [1e-8, 1e-6, 1e-4])
def test_estimate_is_close_where_blocks_cross_powers_of_two(v: float) -> None:
    """A block of which one element lands beyond its grid becomes coarse, which the estimate leaves out: some percent."""
    torch.manual_seed(0)
    theta, drift = operators.quantize(torch.randn(64, 64) * 0.1, "bfp8"), torch.randn(64, 64) * 1e-3
    found = measure_step(Proposal(theta, drift, torch.tensor(v)), "bfp8", "corrected")
    ratio = drawn(theta, drift, v, "bfp8", 300).square().mean() / (found.variance * found.gap.square()).mean()
    assert 0.98 < float(ratio) < 1.06


def test_without_a_format_there_is_no_inflation() -> None:
    found = measure_step(Proposal(torch.ones(3), torch.ones(3), torch.tensor(1e-9)), None, "corrected")
    assert bool(found.above.all())
    assert bool((found.variance == found.s).all())


@pytest.mark.parametrize("rounding", ["corrected", "stochastic"])
@pytest.mark.parametrize("width", [4.0, 1.0, 0.5, 0.2])  # of the posterior, in gaps
def test_inflation_is_that_of_the_stationary_variance(width: float, rounding: Rounding) -> None:
    """On a Gaussian the variance of an unbiased chain is exact times the mean inflation over its stationary law.

    E[θ²] = (1 - a)² E[θ²] + E[variance of a step], with a = α/σ².
    """
    gap, a = 0.125, 0.01
    sigma = width * gap
    law = stationary("fixed10.3", a * sigma**2, rounding, gradient=lambda x: x / sigma**2)
    v = torch.tensor(2 * a * sigma**2, dtype=torch.float64)
    found = measure_step(Proposal(law.points, -a * law.points, v), "fixed10.3", rounding)
    inflation = float(law.probabilities @ (found.variance / found.s))
    assert law.variance / sigma**2 == pytest.approx(inflation / (1 - a / 2), rel=1e-6)
