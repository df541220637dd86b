"""Blocks with several coordinates at ±N: mean and variance by sampling, coarse blocks no more often than they must be.

z-tests with fixed seeds fail beyond 5.5 standard errors, which chance reaches with probability 4e-8: with fewer than 200
comparisons the false-alarm rate of the file is below 1e-5.
"""

import pytest
import torch
from torch import Tensor

from qlangevin import Key, corrected, parse
from qlangevin.quantization import operators
from qlangevin.quantization.laws import Mean

Z = 5.5
DELTA = 2.0**-6
COUNT = 1 << 19


def draw(start: list[float], move: list[float], s: float) -> Tensor:
    """Many draws of one block, in gaps."""
    mean = Mean(*(torch.tensor(x).expand(COUNT, -1).contiguous() * DELTA for x in (start, move)))
    drawn = operators.draw(mean, torch.tensor(s * DELTA**2), parse("bfp8"), Key(11))
    assert parse("bfp8").is_representable(drawn).all()
    return (drawn / DELTA).double()


def z_scores(x: Tensor, mean: Tensor | float) -> Tensor:
    return (x.mean(0) - mean) / (x.var(0) / len(x)).sqrt().clamp_min(1e-30)


def is_coarse(drawn: Tensor) -> Tensor:
    return (drawn % 2 == 0).all(1)


@pytest.mark.parametrize("c", [1e-3, 0.05, 0.4, 1.0])
def test_two_at_the_top_have_the_variance_asked_for(c: float) -> None:
    s, start = c / 4, [127.0, 0.0, -127.0, 5.0, 8.0]
    drawn = draw(start, [0.0] * 5, s)
    error = drawn - torch.tensor(start)
    assert z_scores(error, 0.0).abs().max() < Z
    assert z_scores(error.square(), s).abs().max() < Z
    share = is_coarse(drawn).double()  # a block is coarse with probability s, and looks it whenever it is
    assert abs(float(z_scores(share[:, None], s))) < Z


def test_the_example_of_a_block_that_used_to_be_coarse_half_the_time() -> None:
    mu = torch.tensor([127 * DELTA, 0, -127 * DELTA, 0.37, DELTA / 2])
    v = 1e-3 * DELTA**2 / 4
    drawn = corrected(mu.expand(COUNT, -1), v, "bfp8", Key(1)).double()
    assert z_scores((drawn - mu)[:, :3].square(), v).abs().max() < Z
    assert float((drawn[:, 0] != mu[0]).double().mean()) < 4e-4
    with_none = corrected(mu.expand(1000, -1), 0.0, "bfp8", Key(1))
    assert torch.equal(with_none[:, 0], mu[0].expand(1000))


@pytest.mark.parametrize("c", [0.01, 0.1, 0.9])
def test_drifts_out_of_the_block_keep_mean_and_variance(c: float) -> None:
    s, start = c / 4, [127.0, 0.0, -127.0, 6.0]
    move = [0.2 * s, 0.0, -0.3 * s, 0.0]
    error = draw(start, move, s) - (torch.tensor(start) + torch.tensor(move)).double()
    assert z_scores(error, 0.0).abs().max() < Z
    # The two need coarse blocks with probability s + b² each; the larger decides, the other has at most b² more.
    excess = error.square().mean(0) - s
    noise = Z * (error.square().var(0) / COUNT).sqrt()
    assert (excess > -noise).all()
    assert (excess < noise + torch.tensor([1.0, 0.0, 1.0, 0.0]) * (0.3 * s) ** 2).all()
    assert abs(float(z_scores(error[:, :1] * error[:, 2:3], 0.0))) < Z  # and no correlation


def test_one_alone_makes_a_block_coarse_half_as_often() -> None:
    s, start = 0.1, [127.0, 0.0, -5.0, 7.0]
    drawn = draw(start, [0.0] * 4, s)
    error = drawn - torch.tensor(start)
    assert (
        z_scores(error.square(), s).abs().max() < Z
    )  # those beside it too: what coarse blocks add is left out elsewhere
    assert abs(float(z_scores((drawn[:, :1] > 127).double(), s / 2))) < Z


def test_near_the_top_the_mean_is_exact_and_no_variance_is_lost() -> None:
    start = [127.0, 126.97, -126.6, 31.5, -127.4, 12.0]
    for s in (0.001, 0.05, 0.25, 0.3):
        error = draw(start, [0.0] * 6, s) - torch.tensor(start).double()
        assert z_scores(error, 0.0).abs().max() < Z
        assert (z_scores(error.square(), s) > -Z).all()
