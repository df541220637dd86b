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


def rounding_variance(theta: Tensor, weights: str | None, left: float) -> Tensor:
    """Return the mean of max(v_s - left, 0) of each coordinate, what rounding adds where a step moves weights by about a gap."""
    if weights is None:
        return torch.zeros(len(theta), dtype=torch.float64)
    r = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    squares = ql.parse(weights).gap(theta).double().square()
    sizes, counts = zip(*(row.unique(return_counts=True) for row in squares), strict=True)
    added = [
        ((r * (1 - r) * s[:, None] - left).clamp_min(0).mean(1) * n).sum() for s, n in zip(sizes, counts, strict=True)
    ]
    return torch.stack(added) / theta.shape[1]


@pytest.mark.parametrize("weights", ["fixed8.1", "fixed8.2", "bfp8", "bf16", None])
@pytest.mark.parametrize(
    ("integrator", "friction", "lr"),
    [("exact", 2.0, 0.6), ("exact", 0.5, 1.0), ("exact", 0.2, 1.0), ("splitting", 2.0, 0.6), ("splitting", 0.2, 6.0)],
)
def test_sghmc_has_its_exact_covariance(weights: str | None, integrator: Any, friction: float, lr: float) -> None:
    """Within 4 standard errors: three numbers in each of 25 cases, 75 · 6e-5 = 0.5 % false alarms in all.

    The variance that is left for the weights is above v_0, between v_s and v_0, or below v_s: there the law has
    what the grid adds.
    """
    law = ql.theory.gaussian(HESSIAN, 1, lr, friction=friction, update=integrator)
    left = solve(lr, friction, 1.0, 1.0, integrator).variance
    draw = torch.randn(2, CHAINS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    added = rounding_variance((torch.linalg.cholesky(law.covariance) @ draw).float(), weights, left)
    law = ql.theory.gaussian(HESSIAN, 1, lr, friction=friction, update=integrator, rounding=added)
    found = covariance_of_chains(
        ql.SGHMC, weights, law.covariance, 400, lr=lr, friction=friction, integrator=integrator
    )
    assert z_scores(found, law.covariance).max() < 4


@pytest.mark.parametrize("noise", ["correlated", "independent"])
def test_the_published_update_is_wrong_by_the_factor_of_the_theory(noise: Any) -> None:
    """The step as printed in arXiv 2310.16320, written out: within 4 standard errors of its own law, not of the exact one."""
    lr, c = 0.1, 0.75
    exact = ql.theory.gaussian(HESSIAN, 1, lr, friction=c)
    published = ql.theory.gaussian(HESSIAN, 1, lr, friction=c, update="published", noise=noise)
    gamma, a, draw = math.sqrt(c / lr), math.exp(-c), torch.Generator().manual_seed(0)
    var_v, var_x, cov = 1 - a * a, (2 * c + 4 * a - a * a - 3) / gamma**2, (1 - a) ** 2 / gamma
    root = torch.linalg.cholesky(torch.tensor([[var_v, cov], [cov, var_x]], dtype=torch.float64))
    root = root if noise == "correlated" else torch.tensor([var_v, var_x], dtype=torch.float64).sqrt().diag()
    x = torch.linalg.cholesky(published.covariance) @ torch.randn(2, CHAINS, dtype=torch.float64, generator=draw)
    v = torch.zeros_like(x)
    for _ in range(600):
        xi = torch.einsum("ij,jkn->ikn", root, torch.randn(2, 2, CHAINS, dtype=torch.float64, generator=draw))
        f = HESSIAN @ x
        x = x + (1 - a) / gamma * v + (c + a - 1) / gamma**2 * f + xi[1]
        v = a * v - (1 - a) / gamma * f + xi[0]
    assert z_scores(torch.cov(x), published.covariance).max() < 4
    assert z_scores(torch.cov(x), exact.covariance).max() > 20


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
