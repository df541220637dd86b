"""Chains of low precision on Gaussians in two dimensions, condition number 100, against their exact discrete-time covariance."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.quantization.qtensor import decoded
from qlangevin.sampling.underdamped import solve

CHAINS = 16384
ANGLE = 0.6
TURN = torch.tensor([[math.cos(ANGLE), -math.sin(ANGLE)], [math.sin(ANGLE), math.cos(ANGLE)]], dtype=torch.float64)
HESSIAN = TURN @ torch.diag(torch.tensor([1.0, 0.01], dtype=torch.float64)) @ TURN.T  # of widths 1 and 10


def covariance_of_chains(kind: type[Any], weights: str | None, start: Tensor, steps: int, **settings: Any) -> Tensor:
    """Return the covariance over many chains, one in each column, that begin with this covariance."""
    draw = torch.randn(2, CHAINS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter((torch.linalg.cholesky(start) @ draw).float())
    sampler = kind([p], num_data=1, weights=weights, **settings)
    for _ in range(steps):
        p.grad = (HESSIAN @ p.detach().double()).float()
        sampler.step()
    return torch.cov(decoded(p.detach()).double())


def z_scores(found: Tensor, truth: Tensor) -> Tensor:
    """Return the distance of a sample covariance in standard errors: Var S_ij = (Σ_ij² + Σ_ii Σ_jj)/n."""
    scale = (truth.square() + torch.outer(truth.diag(), truth.diag())) / CHAINS
    return (found - truth).abs() / scale.sqrt()


@pytest.mark.parametrize("weights", ["fixed8.1", "fixed8.2", "bfp8", "bf16", None])
@pytest.mark.parametrize(
    ("integrator", "friction", "lr"),
    [("exact", 2.0, 0.6), ("exact", 0.5, 1.0), ("exact", 0.2, 1.0), ("splitting", 2.0, 0.6), ("splitting", 0.2, 6.0)],
)
def test_sghmc_has_its_exact_covariance(weights: str | None, integrator: Any, friction: float, lr: float) -> None:
    """Within 4 standard errors: three numbers in each of 25 cases, 75 · 6e-5 = 0.5 % false alarms in all.

    The variance that is left for the weights is above v_0, between v_s and v_0, or below v_s; there the grid adds at most
    Δ²/4 to the heat of a step, and that is the tolerance.
    """
    law = ql.theory.gaussian(HESSIAN, 1, lr, friction=friction, update=integrator)
    found = covariance_of_chains(
        ql.SGHMC, weights, law.covariance, 400, lr=lr, friction=friction, integrator=integrator
    )
    gap = {None: 0.0, "bf16": 2.0**-3, "bfp8": 0.5, "fixed8.1": 0.5, "fixed8.2": 0.25}[
        weights
    ]  # bfp8: of rows up to 60
    left, added = solve(lr, friction, 1.0, 1.0, integrator).variance, gap**2 / 4
    slack = 0.0 if left > added else added / (2 * lr)
    assert (z_scores(found, law.covariance) - slack * math.sqrt(CHAINS)).max() < 4


def test_the_published_update_would_be_found_out() -> None:
    """The sign as published is off by the factor that theory has for it, many standard errors away."""
    exact = ql.theory.gaussian(HESSIAN, 1, 0.1, friction=0.75)
    published = ql.theory.gaussian(HESSIAN, 1, 0.1, friction=0.75, update="published")
    assert z_scores(published.covariance, exact.covariance).max() > 20


@pytest.mark.parametrize("weights", ["fixed8.2", "bfp8", None])
def test_sgld_with_frozen_gains_has_its_exact_covariance(weights: str | None) -> None:
    """Gains of both coordinates from 50 steps, then frozen: within 4 standard errors of the law with these gains.

    All chains share a gain here: moments are set by hand. 3 cases of three numbers: 6e-4 false alarms.
    """
    gain, lr = torch.tensor([0.7, 2.0], dtype=torch.float64), 0.3
    law = ql.theory.gaussian(HESSIAN, 1, lr, preconditioner=gain)
    draw = torch.randn(2, CHAINS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter((torch.linalg.cholesky(law.covariance) @ draw).float())
    rms = ql.RMS(decay=0.5, eps=1e-3, format="fp32", freeze_after=1)
    sampler = ql.SGLD([p], lr=lr, num_data=1, weights=weights, preconditioner=rms)
    p.grad = torch.zeros(2, CHAINS)
    sampler.param_groups[0]["lr"] = 0.0  # a step that only makes the moments
    sampler.step()
    sampler.param_groups[0]["lr"] = lr
    sampler.state[p]["moments"].copy_(((1 / gain - 1e-3) * sampler.state[p]["moments_scale"]).square()[:, None].float())
    for _ in range(200):
        p.grad = (HESSIAN @ p.detach().double()).float()
        sampler.step()
    assert z_scores(torch.cov(decoded(p.detach()).double()), law.covariance).max() < 4


def test_localization_has_its_exact_law() -> None:
    """Mean and covariance around a centre in bf16, chains in bfp8: within 4 standard errors; 5 numbers, 3e-4 false alarms."""
    center = torch.tensor([3.0, -2.0], dtype=torch.float64)
    law = ql.theory.gaussian(HESSIAN, 1, 0.5, localization=0.2, center=center)
    draw = torch.randn(2, CHAINS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter((law.mean[:, None] + torch.linalg.cholesky(law.covariance) @ draw).float())
    given = center[:, None].expand(2, CHAINS).bfloat16().contiguous()
    sampler = ql.SGLD([p], lr=0.5, num_data=1, weights="bfp8", localization=0.2, center=[given])
    for _ in range(100):
        p.grad = (HESSIAN @ p.detach().double()).float()
        sampler.step()
    assert z_scores(torch.cov(p.detach().double()), law.covariance).max() < 4
    assert ((p.detach().double().mean(1) - law.mean).abs() / (law.covariance.diag() / CHAINS).sqrt()).max() < 4
