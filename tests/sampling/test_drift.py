"""Small drifts: weights are large numbers of gaps and drifts can be millionths of one, and none of it is lost.

The random numbers h of a step are known, so that these tests are exact: a weight on the grid with a drift of r gaps and no noise
moves if h lies between 0 and r, which happens with probability |r|.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qlangevin as ql
from qlangevin import native
from qlangevin.quantization import random
from qlangevin.sampling.settings import parameter_key

COUNT = 1 << 16


def step_once(theta: Tensor, lr: float, seed: int, **settings: object) -> tuple[Tensor, Tensor]:
    """Take one step of SGD on U(θ) = θ²/2; return the weights and the random numbers h that were theirs."""
    p = torch.nn.Parameter(theta.clone())
    sampler = ql.SGLD([p], lr=lr, num_data=1, temperature=0, seed=seed, **settings)  # type: ignore[arg-type]
    assert torch.equal(p, theta)  # on the grid from the start
    p.grad = p.detach().clone()
    sampler.step()
    return p.detach(), random.centered(parameter_key(seed, 0, 0, 1), theta.numel())


@pytest.mark.parametrize("alpha", [1e-4, 1e-5, 1e-6, 1e-7, 1e-9])
@pytest.mark.parametrize("rounding", ["corrected", "stochastic"])
@pytest.mark.parametrize("kernels", [True, False])
def test_every_drift_moves_as_many_weights_as_it_should(alpha: float, rounding: str, kernels: bool) -> None:
    gap = 2.0**-3
    theta = torch.arange(-128, 128).repeat(COUNT // 256) * gap
    for seed in range(3):
        if kernels:
            after, h = step_once(theta, alpha, seed, weights="fixed8.3", rounding=rounding)
        else:
            with native.disabled():
                after, h = step_once(theta, alpha, seed, weights="fixed8.3", rounding=rounding)
        r = -alpha * theta.double() / gap
        between = (h.double() * (h.double() - r) < 0) & (h.abs() < 0.5)
        assert torch.equal((after - theta) / gap, torch.where(between, h.sign(), 0).float())


@pytest.mark.parametrize("format", ["bfp8", "bf16", "fp8_e4m3", "fixed16.12", "bfp16/tensor"])
def test_other_formats_keep_the_drift_too(format: str) -> None:
    theta = torch.full((2, COUNT), 1.25)
    theta[:, 0] = 1.5  # sets the exponent of a block
    gap = float(ql.parse(format).gap(theta)[0, 1])
    alpha = 3e-4 * gap
    after, h = step_once(theta, alpha, 1, weights=format)
    moved = (after != theta).view(-1)
    expected = (h < 0) & (-h.double() < alpha * theta.view(-1).double() / gap)
    assert torch.equal(moved, expected)
    assert 0 < int(expected.sum()) < 200


def test_a_packed_weight_at_the_top_of_its_block_keeps_its_drift() -> None:
    # Several weights at ±N and drifts that point out of the block; 5.5 standard errors, false alarms 4e-8 for each of four.
    gap, count = 2.0**-6, 1 << 17
    theta = torch.tensor([127.0, 3.0, -127.0, 0.0]) * gap
    p = torch.nn.Parameter(theta.expand(count, 4).contiguous())
    sampler = ql.SGLD([p], lr=1.0, num_data=10**6, temperature=0, weights="bfp8", seed=3)
    drift = torch.tensor([0.002, 0.001, -0.003, 0.001]) * gap
    p.grad = -drift.expand(count, 4).contiguous()
    sampler.step()
    moves = (p.detach() - theta).double()
    error = (moves.var(0) / count).sqrt()
    assert ((moves.mean(0) - drift).abs() < 5.5 * error).all()
    coarse = (p.detach()[:, 0] > 127 * gap) | (p.detach()[:, 2] < -127 * gap)
    assert float(coarse.double().mean()) == pytest.approx(0.005, rel=0.2)  # no more than the two drifts ask for
