"""Linear regression, of which the posterior predictive is known exactly."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import diagnostics

Posterior = ql.Posterior


NOISE, PRIOR, DATA, COPIES = 0.25, 4.0, 40, 40  # σ², the precision of the weights' prior, N, and independent chains
LR, APART, DRAWS = 0.03, 40, 150


class Regression(nn.Module):
    """Chains side by side: f_c(x) = w_c·x, (example, chain)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(COPIES, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def regression_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(DATA, 3, generator=generator)
    return x, x @ torch.tensor([1.0, -2.0, 0.5]) + math.sqrt(NOISE) * torch.randn(DATA, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "bfp16"])
def test_linear_regression_has_its_exact_posterior_predictive(tmp_path: Path, weights: str | None) -> None:
    """w | data ~ N(m, A⁻¹), A = XᵀX/σ² + λI, m = A⁻¹Xᵀy/σ²; so f(x) ~ N(x·m, xᵀA⁻¹x), and y has the variance σ² more.

    SGLD with h = lr/N on this Gaussian has the stationary covariance (A - hA²/2)⁻¹, here at most 12 % above A⁻¹: that is
    what is compared with. Means: 3 x 40 z-scores by the Monte Carlo error (which knows of autocorrelation); one beyond 4.8 has
    probability 2e-4. Variances: their mean over 40 chains, in units of its standard error, t with 39 degrees of freedom, 3 of
    them; one beyond 5 has probability 4e-5, and a variance 15 % off is found. A variance has a bias of 1/ESS, which is corrected.
    """
    x, y = regression_data()
    model = Regression()
    sampler = ql.SGLD(model.parameters(), lr=LR, num_data=DATA, weight_decay=PRIOR / DATA, weights=weights, seed=1)
    with ql.SampleStore.create(tmp_path / "run", model, sampler) as store:
        for step in range(1, APART * (DRAWS + 2) + 1):
            sampler.zero_grad()
            loss = ((model(x) - y[:, None]).square() / (2 * NOISE)).mean(0).sum()  # mean over data, a sum of chains
            loss.backward()
            sampler.step()
            if step > 2 * APART and step % APART == 0:
                store.append(model)

    exact = (x.T @ x).double() / NOISE + PRIOR * torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(exact, (x.T @ y).double() / NOISE)
    h = LR / DATA
    assert h * float(torch.linalg.eigvalsh(exact).max()) < 0.2
    points = torch.tensor([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [1.0, -1.0, 2.0]])
    variances = [
        (points.double() @ torch.linalg.inv(a) * points.double()).sum(1) for a in (exact, exact - h / 2 * exact @ exact)
    ]
    assert float((variances[1] / variances[0]).max()) < 1.12

    u = Posterior.open(store, model, link="identity", noise=NOISE).uncertainty(points)
    summary = diagnostics.summarize(Posterior.open(store, model, link="identity").samples(points)[None])
    z = (u.mean.numpy() - (points.double() @ mean).numpy()[:, None]) / summary.mcse_mean
    assert np.abs(z).max() < 4.8
    assert 0.6 < (z**2).mean() < 1.5  # χ²(120)/120 has a standard deviation of 0.13
    unbiased = u.epistemic.double().numpy() / (1 - 1 / summary.ess_bulk.mean())
    t = (unbiased.mean(1) - variances[1].numpy()) / (unbiased.std(1, ddof=1) / math.sqrt(COPIES))
    assert np.abs(t).max() < 5
    assert unbiased.mean(1) == pytest.approx(variances[0].numpy(), rel=0.15)
    torch.testing.assert_close(u.total, u.epistemic + NOISE)
