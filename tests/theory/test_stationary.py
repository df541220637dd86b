"""The exact stationary law: its transition probabilities against enumeration, its solution, its distance to the target."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Laplace, Normal

from qlangevin.quantization import rounding
from qlangevin.quantization.formats import FixedPoint, Float, Format, parse
from qlangevin.theory import Method, grid, stationary, wasserstein2
from tests.helpers.draws import draw_exactly

METHODS: tuple[Method, ...] = ("corrected", "stochastic", "nearest")


def enumerated(format: Format, mu: Tensor, v: float, method: Method) -> Tensor:
    """Rows of P by brute force: the rounding itself, at the 28657 points (h, Φ(ξ)) of a Fibonacci lattice."""
    index = torch.arange(28657, dtype=torch.float64)
    h, xi = (index * 17711 % 28657 + 0.5) / 28657 - 0.5, torch.special.ndtri((index + 0.5) / 28657)
    points, rows = grid(format), []
    for m in mu.tolist():
        noisy = m + math.sqrt(v) * xi
        if method == "nearest":
            drawn = rounding.nearest(noisy, format)
        elif method == "stochastic":
            drawn = draw_exactly(noisy, torch.zeros((), dtype=torch.float64), format, h, xi)
        else:
            drawn = draw_exactly(torch.full_like(h, m), torch.tensor(v, dtype=torch.float64), format, h, xi)
        rows.append(torch.bincount(torch.searchsorted(points, drawn), minlength=len(points)) / len(h))
    return torch.stack(rows)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stepsize", [0.7, 0.1, 0.02])  # with gap 1/2: far above v_0, just above, below
@pytest.mark.parametrize("name", ["fixed4.1", "e2m1", "e3m2"])
def test_transition_is_what_rounding_does(name: str, stepsize: float, method: Method) -> None:
    format, points = parse(name), grid(name)

    def gradient(x: Tensor) -> Tensor:
        return 0.8 * x - 0.3

    matrix = stationary(name, stepsize, method, gradient).transition
    brute = enumerated(format, points - stepsize * gradient(points), 2 * stepsize, method)
    # The lattice misjudges the area of a simple region of the square by some 1e-4.
    torch.testing.assert_close(matrix, brute.double(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stepsize", [1.5, 0.3, 1e-2, 1e-4])
@pytest.mark.parametrize("name", ["fixed8.3", "fixed9.8", "e4m3", "fp8_e5m2"])
def test_rows_are_distributions(name: str, stepsize: float, method: Method) -> None:
    if method == "nearest" and not name.startswith("fixed"):
        stepsize = max(stepsize, 0.3)  # with less noise a float far from zero never moves
    matrix = stationary(name, stepsize, method).transition
    assert float(matrix.min()) >= 0
    torch.testing.assert_close(matrix.sum(1), torch.ones(len(matrix), dtype=torch.float64), atol=1e-14, rtol=0)


@pytest.mark.parametrize("stepsize", [0.1, 1e-2, 2.0**-9 * 1.0001, 1e-3, 1e-4])
def test_corrected_rows_have_mean_mu_and_variance_v(stepsize: float) -> None:
    law = stationary("fixed8.3", stepsize)
    inner = law.points.abs() < 8  # no clipping, and v > v_s there
    mu = ((1 - stepsize) * law.points)[inner]
    mean = law.transition[inner] @ law.points
    second = (law.transition[inner] * (law.points - mu[:, None]) ** 2).sum(1)
    gap = 1 / 8
    r = (mu / gap - (mu / gap).round()).abs()
    torch.testing.assert_close(mean, mu, atol=1e-12, rtol=0)
    expected = (gap**2 * r * (1 - r)).clamp_min(2 * stepsize)
    torch.testing.assert_close(second, expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("method", "stepsize", "variance"),
    [
        ("stochastic", 1e-2, 1.136),
        ("stochastic", 1e-3, 2.240),
        ("stochastic", 1e-4, 7.054),
        ("corrected", 1e-2, 1 / (1 - 1e-2 / 2)),
        ("corrected", 1e-3, 1 / (1 - 1e-3 / 2)),
        ("corrected", 1e-4, 1 / (1 - 1e-4 / 2)),
    ],
)
def test_figure_1(method: Method, stepsize: float, variance: float) -> None:
    law = stationary("fixed8.3", stepsize, method)
    assert law.variance == pytest.approx(variance, abs=5e-4)
    assert law.mean == pytest.approx(0, abs=1e-6)
    if method == "corrected":  # no law on the grid is nearer than Δ/√12, up to the tails
        assert law.w2 == pytest.approx(1 / 8 / math.sqrt(12), rel=2e-3)


@pytest.mark.parametrize("stepsize", [0.3, 0.1, 0.05, 1e-2, 1e-3])
@pytest.mark.parametrize("name", ["e4m3", "fp8_e5m2", "e3m4"])
def test_corrected_rows_on_floats_have_mean_mu_and_variance_v(name: str, stepsize: float) -> None:
    law, format = stationary(name, stepsize), parse(name)
    inner = law.points.abs() < 4  # where nothing is clipped
    mu = ((1 - stepsize) * law.points)[inner]
    gap = format.gap(mu)
    r = (mu / gap).frac().abs()
    wanted = (r * (1 - r) * gap**2).clamp_min(2 * stepsize)
    rows = law.transition[inner]
    torch.testing.assert_close(rows @ law.points, mu, atol=1e-9, rtol=0)
    torch.testing.assert_close((rows * (law.points - mu[:, None]) ** 2).sum(1), wanted, atol=1e-12, rtol=1e-8)


def least_w2(name: str) -> float:
    """The distance of N(0, 1) from the nearest law on a grid: every number goes to the nearest grid point."""
    points, half = grid(name), math.sqrt(0.5)
    below = (torch.erf((points[1:] + points[:-1]) / 2 * half) + 1) / 2
    one = torch.ones(1, dtype=torch.float64)
    return wasserstein2(points, torch.cat((0 * one, below, one)).diff(), Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("name", "least", "figures"),
    [
        ("e4m3", 0.0265, {0.1: 0.0419, 0.05: 0.0337, 0.02: 0.0308, 0.01: 0.0296, 1e-3: 0.0269, 1e-4: 0.0267}),
        ("fp8_e4m3", 0.0265, {0.05: 0.0337, 0.01: 0.0296}),
        ("fp8_e5m2", 0.0528, {0.05: 0.0707, 0.02: 0.0588, 0.01: 0.0588, 1e-3: 0.0540}),
        ("e3m5", 0.0066, {0.05: 0.0145, 0.01: 0.0073, 1e-3: 0.0068}),
    ],
)
def test_figures_of_floats(name: str, least: float, figures: dict[float, float]) -> None:
    assert least_w2(name) == pytest.approx(least, abs=1e-4)
    for stepsize, w2 in figures.items():
        found = stationary(name, stepsize)
        assert found.w2 == pytest.approx(w2, abs=1e-4)
        if stepsize <= 0.05:
            assert found.w2 < stationary(name, stepsize, "stochastic").w2


def test_slow_chain_is_solved_to_full_relative_accuracy() -> None:
    law = stationary("fixed8.3", 1e-5, "nearest")  # a move has probability 1e-44
    flow = law.probabilities[:, None] * law.transition
    up, down = flow.diagonal(1), flow.diagonal(-1)
    assert 0 < float(up.max()) < 1e-40
    torch.testing.assert_close(up, down, rtol=1e-9, atol=0)  # only neighbours: detailed balance


def test_points_that_are_never_reached_have_no_probability() -> None:
    law = stationary("fixed8.2", 1e-3)  # the drift at θ > 2/Δ = 8 leaves no variance for a step outwards
    outside = law.points.abs() > 8.5
    assert float(law.probabilities[outside].sum()) == 0
    assert float(law.probabilities.sum()) == pytest.approx(1, abs=1e-14)
    assert law.variance == pytest.approx(1 / (1 - 1e-3 / 2), rel=1e-9)


def test_other_targets_and_temperatures() -> None:
    target = Normal(1.0, 0.5)
    law = stationary("fixed8.5", 1e-3, gradient=lambda x: (x - 1) / 0.25, target=target)
    assert law.mean == pytest.approx(1, abs=1e-6)
    assert law.w2 < 0.011
    cold = stationary("fixed8.5", 1e-3, temperature=0.25)
    assert cold.variance == pytest.approx(0.25, rel=1e-3)
    assert cold.w2 < 0.011
    with pytest.raises(ValueError, match="target"):
        _ = stationary("fixed8.5", 1e-3, gradient=lambda x: x - 1).w2


@pytest.mark.parametrize("name", ["fixed3.1", "e2m1", "e4m3", "fp8_e4m3", "fp8_e5m2"])
def test_grid_has_every_number(name: str) -> None:
    format, points = parse(name), grid(name)
    assert bool(format.is_representable(points).all())
    assert bool((points.diff() > 0).all())
    assert (float(points[0]), float(points[-1])) == (format.low, format.high)
    if isinstance(format, Float) and format.dtype is not None:
        codes = torch.arange(256, dtype=torch.uint8).view(format.dtype).double()
        assert points.tolist() == sorted(set(codes[codes.isfinite()].tolist()))
    elif isinstance(format, FixedPoint):
        assert len(points) == 2**format.bits
    else:
        gap = format.gap(points).minimum(format.gap(points.roll(-1)))
        assert bool((points.diff() == gap[:-1]).all())


def test_wasserstein_distance() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert wasserstein2(3 * one, one, Normal(1.0, 2.0)) == pytest.approx(math.sqrt(4 + 4), rel=1e-12)
    points = torch.tensor([-2.0, -0.5, 0.0, 1.5], dtype=torch.float64)
    p = torch.tensor([0.1, 0.4, 0.0, 0.5], dtype=torch.float64)
    closed = wasserstein2(points, p, Normal(0.25, 1.5))
    assert closed == pytest.approx(wasserstein2(points, p, lambda u: 0.25 + 1.5 * torch.special.ndtri(u)), rel=1e-9)
    u = (torch.arange(10**6, dtype=torch.float64) + 0.5) / 10**6
    quantiles = torch.where(u < 0.5, (2 * u).log(), -(2 - 2 * u).log())
    brute = (points[torch.bucketize(u, p.cumsum(0))] - quantiles).square().mean().sqrt()
    assert wasserstein2(points, p, Laplace(0.0, 1.0)) == pytest.approx(float(brute), rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stepsize": 0.0}, "stepsize must be .* got 0.0"),
        ({"stepsize": math.nan}, "stepsize must be .* got nan"),
        ({"temperature": -1.0}, "temperature must be .* got -1.0"),
        ({"method": "exact"}, "method must be one of 'corrected', 'stochastic', 'nearest', got 'exact'"),
        ({"format": "bfp8"}, "fixed or floating point.* got bfp8"),
        ({"format": "bf16"}, "at most 5000 numbers, bf16 has"),
        ({"format": "fixed13.3"}, "at most 5000 numbers.* use at most 12 bits"),
        ({"gradient": lambda x: x[:3]}, "gradient must map 256 grid points"),
        ({"method": "nearest", "stepsize": 1e-7}, "stays near where it starts; use a larger stepsize"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stationary(**{"format": "fixed8.3", "stepsize": 1e-2, **arguments})
