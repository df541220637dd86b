"""Q^vc on floats: the noise comes first, then a gap that the number has where the noise lands. Moments by integration."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qlangevin import Float, Key, corrected, parse
from qlangevin.quantization.laws import V0, Law, Mean, Point, outcomes, parts

XI = torch.linspace(-6.6, 6.6, 401, dtype=torch.float64)  # the trapezoidal rule is exact for smooth functions, to 1e-9
DENSITY = torch.exp(-XI * XI / 2) / torch.exp(-XI * XI / 2).sum()
FLOATS = ["e4m3", "fp8_e4m3", "fp8_e5m2", "e2m1", "e3m0", "bf16", "fp16", "e5m4"]


def float_format(name: str) -> Float:
    format = parse(name)
    assert isinstance(format, Float)
    return format


def enumerate_law(law: Law) -> tuple[Tensor, Tensor]:
    """Return outcomes (3, ξ, element) and their probabilities given ξ."""
    noise = torch.where(law.gaussian, (law.s - V0).clamp_min(0).sqrt(), 0) * XI[:, None]
    x = Point(law.point.whole, law.point.rest + noise)
    assert law.finest is not None
    n, r = x.nearest(parts(x, law.wide_at, law.finest))
    below, above = 1.0 + (n == -law.wide_at).double(), 1.0 + (n == law.wide_at).double()
    down, up = outcomes(r, torch.where(law.gaussian, V0, law.s), below, above)
    return torch.stack((n - below, n, n + above)) * law.gap, torch.stack((down, 1 - down - up, up))


def least_variance(mu: Tensor, format: Float) -> Tensor:
    gap = format.gap(mu)
    r = (mu / gap).frac().abs()
    return r * (1 - r) * gap**2


@pytest.mark.parametrize("name", FLOATS)
def test_mean_and_variance_are_exact_by_integration(name: str) -> None:
    format = float_format(name)
    unit = 2.0**-3 if name == "e2m1" else 1.0
    mu = torch.cat((torch.linspace(-1.99, 1.99, 99, dtype=torch.float64), torch.tensor([0.0, 1e-3, 1, -0.5]))) * unit
    # σ from a hundredth of a gap to a tenth of the range
    for sigma in torch.logspace(math.log10(2.0**-format.man / 100), math.log10(min(format.high / 10, 3.0)), 17):
        v = (sigma.double() * unit) ** 2
        law = format.law(Mean(mu), v)
        values, p = enumerate_law(law)
        assert bool((p > -1e-12).all())
        on_grid = format.is_representable(values.clamp(format.low, format.high))
        assert bool((on_grid | (p < 1e-12)).all())
        mean = (p * values).sum(0).mul(DENSITY[:, None]).sum(0)
        variance = (p * (values - mu) ** 2).sum(0).mul(DENSITY[:, None]).sum(0)
        assert float((mean - mu).abs().max()) < 1e-6 * float(v.sqrt())
        wanted = torch.maximum(v, least_variance(mu, format))
        assert float((variance / wanted - 1).abs().max()) < 1e-6


@pytest.mark.parametrize("name", FLOATS)
def test_all_outcomes_are_floats_wherever_noise_lands(name: str) -> None:
    # both sides of every binade's end, on every gap, at the ends of the noise
    format, generator = float_format(name), torch.Generator().manual_seed(0)
    ends = torch.exp2(torch.arange(max(format.emin - 2, -100), min(format.emax, 100), dtype=torch.float64))
    near = (1 + 2.0**-format.man * torch.randn(50, 1, generator=generator, dtype=torch.float64)) * ends
    for ratio in (0.01, 0.1, 0.4, 1.0, 3.0, 20.0, 1000.0):
        mu = near.flatten()
        law = format.law(Mean(mu), (ratio * format.gap(mu)) ** 2)
        for h in (-0.499, -0.2, -1e-9, 1e-9, 0.2, 0.499):
            for xi in (-6.66, -1.0, 0.0, 0.3, 6.66):
                drawn = law.draw(torch.full_like(mu, h), torch.full_like(mu, xi))
                assert bool(format.is_representable(drawn.clamp(format.low, format.high)).all())


def test_numbers_near_zero_keep_their_own_gap() -> None:
    # At σ = 0.14 noise from 0 reaches 0.94, where the gap is 1/16. Between -1/16 and 1/16 all multiples of 1/128 occur.
    drawn = corrected(torch.zeros(200_000), 0.02, "e4m3", Key(0))
    inside = drawn[drawn.abs() < 1 / 16]
    assert set((inside * 128).tolist()) == set(range(-7, 8))
    assert float(drawn.abs().max()) > 0.5


def test_a_drift_that_cancels_the_weight_leaves_a_float() -> None:
    # whole and rest are large numbers of opposite sign
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4000, generator=generator) * torch.exp2(torch.randint(-3, 20, (4000,), generator=generator))
    for name in FLOATS:
        format = float_format(name)
        on_grid = start.clamp(format.low, format.high).double()
        for v in (1e-12, 1e-6, 1e-2, 1.0):
            law = format.law(Mean(on_grid.float(), (-on_grid).float()), torch.tensor(v))
            drawn = law.draw(torch.full((4000,), 0.3), torch.full((4000,), 1.5)).clamp(format.low, format.high)
            assert bool(format.is_representable(drawn).all())


@given(st.integers(0, 7), st.floats(-255, 255), st.integers(0, 7))
def test_parts_leave_both_neighbours_on_the_grid(man: int, y: float, finest: int) -> None:
    top = float(2 ** (man + 1))
    point = Point(torch.tensor(y).trunc(), torch.tensor(y).frac())
    count = float(parts(point, top, torch.tensor(2.0 ** min(finest, man))))
    assert 1 <= count <= 2.0 ** min(finest, man)
    n = abs(float(point.nearest(torch.tensor(count))[0]))
    if n + 1 <= top:  # beyond, the gap is no float's
        assert (n + 1) * count <= top or count == 1
