"""Q^d, Q^s and Q^vc: by enumeration where outcomes are finite, then properties, then seeded z-tests.

The z-tests draw tens of thousands of numbers with fixed seeds and fail beyond |z| = 5.5, which chance reaches with
probability 4e-8 a comparison: with fewer than 10^4 comparisons the false-alarm rate of the file is below 4e-4.
"""

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qlangevin import BlockFloat, FixedPoint, Float, Format, Key, corrected, parse, quantize
from qlangevin.quantization import laws
from qlangevin.quantization.operators import Algorithm
from tests.helpers.draws import draw_exactly
from tests.helpers.strategies import NAMES, formats

Z = 5.5
COUNT = 5000


def scores(drawn: Tensor, mean: Tensor) -> Tensor:
    """z-scores of the column means."""
    error = (drawn.double().var(0) / len(drawn)).sqrt()
    return (drawn.double().mean(0) - mean.double()) / error.clamp_min(1e-30)


def moments(r: Tensor, p_down: Tensor, p_up: Tensor, below: float, above: float) -> tuple[Tensor, Tensor]:
    mean = above * p_up - below * p_down
    return mean, above**2 * p_up + below**2 * p_down - mean**2


# ---- the law of three outcomes, enumerated


@pytest.mark.parametrize(("below", "above"), [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0)])
def test_three_outcomes_have_the_mean_and_variance_asked_for(below: float, above: float) -> None:
    r = torch.linspace(-0.5, 0.5, 1001, dtype=torch.float64).view(-1, 1)
    s = torch.linspace(0, 2.5, 501, dtype=torch.float64).view(1, -1).expand(1001, 501)
    p_down, p_up = laws.outcomes(r, s, below, above)
    assert ((p_down >= 0) & (p_up >= 0) & (p_down + p_up <= 1 + 1e-12)).all()
    mean, variance = moments(r, p_down, p_up, below, above)
    assert torch.allclose(mean, r.expand_as(mean), rtol=0, atol=1e-12)
    up, down = r.clamp_min(0), (-r).clamp_min(0)
    least, most = up * (above - up) + down * (below - down), (below + r) * (above - r)
    assert torch.allclose(variance, s.clamp(least, most), rtol=0, atol=1e-12)


def test_three_outcomes_are_the_papers_categorical() -> None:
    # Cat(|r|, v_0) of Algorithm 2, first case: the same probabilities as ours at s = v_0 = 1/4.
    r = torch.linspace(0, 0.5, 1001, dtype=torch.float64)
    p_down, p_up = laws.outcomes(r, torch.full_like(r, 0.25))
    assert torch.allclose(p_up, (0.25 + r * r + r) / 2, rtol=0, atol=1e-15)
    assert torch.allclose(p_down, (0.25 + r * r - r) / 2, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "name",
    [
        *["fixed8.3", "fixed4.1", "e4m3", "e2m1", "e3m0", "fp8_e5m2"],
        *[pytest.param(name, marks=pytest.mark.slow) for name in ("bfp8/1", "bfp4/1", "bfp2/1")],
    ],
)
def test_below_v0_enumerated_moments_are_exact_wherever_v_exceeds_v_s(name: str) -> None:
    # The uniform number runs through all of a fine grid, so means over it are exact to the grid: no chance is involved.
    format, steps = parse(name), 4096
    mu = torch.linspace(-1.95, 1.95, 157, dtype=torch.float64)
    h = (torch.arange(steps, dtype=torch.float64).view(-1, 1) + 0.5) / steps - 0.5
    xi = torch.zeros(steps, len(mu), dtype=torch.float64)
    rows = mu.expand(steps, -1)
    fixed = isinstance(format, FixedPoint)
    for c in (0.0, 0.05, 0.2, 0.5, 0.8, 1.0):
        v = c * format.gap(mu) ** 2 / 4
        drawn = draw_exactly(rows, v, format, h.expand_as(rows), xi)
        gap = format.gap(mu) * (1 if fixed else 4)  # the coarsest grid these laws use
        assert ((drawn.mean(0) - mu).abs() <= 3 * gap / steps).all()
        r = (mu / format.gap(mu)).frac().abs()
        least = r * (1 - r) * format.gap(mu) ** 2
        variance = (drawn - mu).square().mean(0)
        if fixed or isinstance(format, Float):
            assert torch.allclose(variance, torch.maximum(v, least), rtol=0, atol=float((20 * gap**2 / steps).max()))
        else:  # a block of one may need a coarser grid, where v_s is larger; never less than asked for
            assert (variance >= torch.maximum(v, least) - 20 * gap**2 / steps).all()


@pytest.mark.parametrize(
    "name", ["fixed8.3", "e4m3", "fp8_e5m2", "bf16", pytest.param("bfp8/1", marks=pytest.mark.slow)]
)
def test_above_v0_moments_are_exact_by_quadrature(name: str) -> None:
    # The product of a grid of uniforms and one of normal quantiles, of unit variance: no chance is involved.
    format, nodes, levels = parse(name), 256, 1024
    quantiles = torch.special.ndtri((torch.arange(nodes, dtype=torch.float64) + 0.5) / nodes)
    quantiles *= quantiles.square().mean().rsqrt()
    h = (torch.arange(levels, dtype=torch.float64) + 0.5) / levels - 0.5
    h, xi = h.repeat(nodes).view(-1, 1), quantiles.repeat_interleave(levels).view(-1, 1)
    for value in (0.0, 0.31, 0.96, 1.003, -1.7):
        mu = torch.full_like(h, value)
        for c in (1.001, 1.5, 6.0, 100.0):
            v = c * format.gap(mu[:1])[0, 0] ** 2 / 4
            drawn = draw_exactly(mu, v, format, h, xi)
            assert abs(float(drawn.mean()) - value) < 0.01 * float(v.sqrt())
            assert float((drawn - value).square().mean() / v) == pytest.approx(1, abs=0.01)


# ---- properties


@given(formats(), st.integers(0, 2**32), st.floats(-40, 40))
def test_results_are_on_the_grid_and_quantizing_twice_is_quantizing_once(
    f: Format, seed: int, magnitude: float
) -> None:
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude
    key = Key(seed)
    results = [quantize(x, f), quantize(x, f, "stochastic", key)]
    results += [corrected(x, v, f, key) for v in (0.0, 2.0 ** (2 * magnitude - 6), 2.0 ** (2 * magnitude))]
    for result in results:
        assert f.is_representable(result).all()
        assert torch.equal(quantize(result, f), result)
        assert torch.equal(quantize(result, f, "stochastic", key.at(1)), result)


@given(formats(), st.integers(0, 2**32))
def test_stochastic_rounding_is_q_vc_without_variance(f: Format, seed: int) -> None:
    x = torch.randn(7, 11, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(quantize(x, f, "stochastic", Key(seed)), corrected(x, 0.0, f, Key(seed)))


@given(formats(), st.integers(0, 2**32), st.floats(-6, 6))
def test_nearest_is_nearest_and_stochastic_is_next_to_it(f: Format, seed: int, magnitude: float) -> None:
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.0**magnitude
    gap = f.gap(x)
    top = f.top * gap if isinstance(f, BlockFloat) else torch.full_like(gap, f.high)
    inside = (x.abs() <= top) & (x.abs() <= f.high)
    assert ((quantize(x, f) - x).abs() <= gap / 2)[inside].all()
    assert ((quantize(x, f, "stochastic", Key(seed)) - x).abs() < 2 * gap)[inside].all()


def test_halves_round_away_from_zero() -> None:
    x = torch.tensor([0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997, 8388607.5])
    assert laws.nearest_integer(x).tolist() == [1, -1, 2, 3, -3, 0, 8388608]
    assert quantize(torch.tensor([0.0625, -0.1875]), "fixed8.3").tolist() == [0.125, -0.25]
    assert quantize(torch.tensor([1.0625]), "e4m3").tolist() == [1.125]


def test_numbers_outside_the_range_are_clipped() -> None:
    x = torch.tensor([100.0, -100.0, torch.inf, -torch.inf, 15.93, -0.0])
    assert quantize(x, "fixed8.3").tolist() == [15.875, -16, 15.875, -16, 15.875, 0]
    assert corrected(x, 1.0, "fixed8.3", Key(0))[:4].tolist() == [15.875, -16, 15.875, -16]
    assert quantize(x, "e4m3")[2:4].tolist() == [240, -240]
    assert quantize(x, "fp8_e4m3")[2:4].tolist() == [448, -448]
    assert quantize(torch.tensor([127.6, 1.0]) / 64, "bfp8").tolist() == [127 / 64, 1 / 64]


def test_a_nan_stays_visible_and_spoils_its_block_alone() -> None:
    x = torch.tensor([[1.0, torch.nan, 3.0], [1.0, 2.0, 3.0]])
    for result in (quantize(x, "bfp8"), quantize(x, "bfp8", "stochastic", Key(0)), corrected(x, 0.1, "bfp8", Key(0))):
        assert result.isnan().tolist() == [[True] * 3, [False] * 3]
    assert quantize(x, "fixed8.3").isnan().sum() == 1
    assert corrected(x, 0.1, "e4m3", Key(0)).isnan().sum() == 1


# ---- blocks


DELTA = 2.0**-6  # the gap of a bfp8 block whose largest element is in [1, 2)
NEAR_THE_TOP = torch.tensor([127.8, -50.3, 0.1, 126.4, -127.1, 3.3]) * DELTA


def draw_blocks(mu: Tensor, v: float, name: str, algorithm: str = "exact", count: int = 60_000) -> Tensor:
    return corrected(mu.expand(count, -1), v, name, Key(11), algorithm)  # type: ignore[arg-type]


def test_a_block_below_a_power_of_two_has_the_variance_asked_for() -> None:
    v = 6 * DELTA**2 / 4
    drawn = draw_blocks(NEAR_THE_TOP, v, "bfp8")
    assert parse("bfp8").is_representable(drawn).all()
    assert scores(drawn, NEAR_THE_TOP).abs().max() < Z
    assert scores((drawn - NEAR_THE_TOP).square(), torch.full_like(NEAR_THE_TOP, v)).abs().max() < Z


def test_algorithm_5_as_printed_has_another_variance_where_the_block_crosses() -> None:
    v = 6 * DELTA**2 / 4
    mu = torch.tensor([127.99, -50.3, 0.1, 3.3]) * DELTA
    crossed = draw_blocks(mu, v, "bfp8", "paper")
    assert parse("bfp8").is_representable(crossed).all()
    # v - v_0 + v_0' = 5/4 + 1 of 6/4 in gaps where it crosses, 1 where it does not; it crosses half the time
    ratios = (crossed - mu).square().double().mean(0)[1:] / v
    assert ((ratios > 1.2) & (ratios < 1.35)).all()
    far_up = torch.tensor([129.9, -50.3, 0.1, 3.3]) * DELTA  # beyond: Δ(μ) is already that of the upper binade
    assert (draw_blocks(far_up, v * 4, "bfp8", "paper") - far_up).square().double().mean(0)[1:] / (
        v * 4
    ) == pytest.approx(torch.ones(3, dtype=torch.float64), abs=0.05)


@pytest.mark.slow
def test_where_every_block_crosses_algorithm_5_is_half_as_much_again() -> None:
    # 400 coordinates just below the power of two: one of them crosses in practically every draw.
    mu = torch.cat((torch.full((400,), 127.9), torch.tensor([10.3]))) * DELTA
    v = 6 * DELTA**2 / 4
    wrong = draw_blocks(mu, v, "bfp8", "paper", 8000)[:, -1]
    right = draw_blocks(mu, v, "bfp8", "exact", 8000)[:, -1]
    assert float((wrong - mu[-1]).square().mean() / v) == pytest.approx(1.5, abs=0.1)
    assert float((right - mu[-1]).square().mean() / v) == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("name", ["bfp8", "bfp4", "bfp3", "bfp2"])
@pytest.mark.parametrize("c", [0.0, 0.3, 1.0, 2.5, 6.0])
def test_blocks_keep_their_mean_and_never_lose_variance(name: str, c: float) -> None:
    top = BlockFloat(int(name[3:])).top
    mu = torch.tensor([top + 0.8, -(top + 0.2), top - 0.4, top / 3, 0.1, 0.0])
    drawn = draw_blocks(mu, c / 4, name)
    assert scores(drawn, mu).abs().max() < Z
    assert (scores((drawn - mu).square(), torch.full_like(mu, c / 4)) > -Z).all()


def test_a_block_is_coarsened_only_if_something_lands_outside() -> None:
    # One coordinate at 127.3: without variance it becomes 128 in three draws of ten, and only then the gap doubles.
    mu = torch.tensor([127.3, 0.5]) * DELTA
    drawn = draw_blocks(mu, 0.0, "bfp8", count=20_000)
    coarse = drawn[:, 0] > 127 * DELTA
    assert abs(float(coarse.double().mean()) - 0.3) < Z * (0.21 / 20_000) ** 0.5
    assert set((drawn[coarse, 1] / DELTA).tolist()) == {0.0, 2.0}
    assert set((drawn[~coarse, 1] / DELTA).tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fp32"])
def test_the_mean_is_right_in_every_format(name: str) -> None:
    format = parse(name)
    generator = torch.Generator().manual_seed(1)
    mu = (torch.rand(12, generator=generator) - 0.5) * min(format.high, 1e3) * 0.7
    v = float(format.gap(mu).max()) ** 2 * (0.2 if isinstance(format, FixedPoint) else 0.6)
    shape = (20_000, 12)
    for drawn in (quantize(mu.expand(shape), name, "stochastic", Key(3)), corrected(mu.expand(shape), v, name, Key(3))):
        gap = format.gap(mu)
        moves = (drawn.double() - mu).abs().max(0).values > 1e-6 * gap
        assert (scores(drawn, mu)[moves].abs() < Z).all()


@pytest.mark.parametrize(
    "name", ["fixed25.20", "fixed20.16", "bfp20/tensor", "bfp24e7/tensor", "e8m21", "e8m18", "bfp16"]
)
def test_wide_formats_have_room_for_noise_far_above_their_gap(name: str) -> None:
    # the relative standard error of the variance of n normals is sqrt(2/n): five of them
    n = 100_000
    drawn = corrected(torch.zeros(n), 1.0, name, Key(0))
    assert float(drawn.double().square().mean()) == pytest.approx(1, abs=5 * (2 / n) ** 0.5)


@pytest.mark.parametrize("name", ["bfp2", "bfp3", "bfp4", "bfp8", "e3m0", "e4m3", "fixed4.1"])
def test_without_much_variance_the_law_is_that_of_stochastic_rounding(name: str) -> None:
    # However small v is, nothing may jump between v = 0 and v > 0, in particular not the grid.
    mu = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) * 2
    for v in (1e-30, 1e-12):
        assert torch.equal(corrected(mu, v, name, Key(1)), quantize(mu, name, "stochastic", Key(1)))


# ---- Algorithm 2 as printed


def test_algorithm_2_as_printed_has_the_same_moments() -> None:
    mu = torch.linspace(-1, 1, 23)
    for v in (1e-5, 1e-3, 3e-3, 1e-2, 0.1):
        ours, printed = (corrected(mu.expand(COUNT, -1), v, "fixed8.3", Key(4), a) for a in get_args(Algorithm))
        for drawn in (ours, printed):
            assert scores(drawn, mu)[(drawn != drawn[0]).any(0)].abs().max() < Z  # on a grid point it may not move
        spread = [((d - mu).square()).double() for d in (ours, printed)]
        error = ((spread[0].var(0) + spread[1].var(0)) / COUNT).sqrt().clamp_min(1e-12)
        assert ((spread[0].mean(0) - spread[1].mean(0)) / error).abs().max() < Z
