"""Diagnoses of chains with a centre, a mask, gains and velocities."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import qlangevin as ql
from qlangevin.sampling.diagnose import Rows, propose_step
from qlangevin.sampling.settings import StepSettings
from qlangevin.sampling.update import Beside


def sampler_of(kind: type[Any], **settings: Any) -> tuple[nn.Parameter, Any]:
    p = nn.Parameter(torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 0.3)
    sampler = kind([p], num_data=1000, **settings)
    for _ in range(3):
        p.grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) * 0.1
        sampler.step()
    return p, sampler


def test_a_proposal_is_what_a_step_without_noise_does() -> None:
    """At T = 0 and in full precision a step is its drift."""
    for settings in (
        {"localization": 50.0},
        {"preconditioner": "rms"},
        {"localization": 50.0, "preconditioner": "rms"},
    ):
        p, sampler = sampler_of(ql.SGLD, lr=0.01, temperature=0.0, **settings)
        state, group = sampler.state[p], StepSettings.from_group(sampler.param_groups[0])
        from qlangevin.sampling.diagnose import read_rows

        assert p.grad is not None
        found = propose_step(p.detach(), p.grad, group, read_rows(p, state, group, slice(None)))
        before = p.detach().clone()
        sampler.step()
        assert torch.allclose(p.detach() - before, found.drift, atol=1e-7)


def test_gains_multiply_variance_and_drift() -> None:
    theta, g, gain = torch.zeros(4), torch.ones(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    settings = StepSettings(0.1, 100, preconditioner="rms")
    found = propose_step(theta, g, settings, Rows(Beside(gain=gain)))
    assert torch.allclose(found.drift, -0.1 * gain)
    assert torch.allclose(found.variance, settings.variance * gain)


@pytest.mark.parametrize("settings", [{"preconditioner": "rms", "lr": 1e-3}, {"localization": 10.0, "lr": 0.1}])
def test_advice_for_steps_with_more_than_a_gradient_repairs_them(settings: dict[str, Any]) -> None:
    _, sampler = sampler_of(ql.SGLD, weights="fixed6.3", temperature=1e-3, **settings)
    found = sampler.diagnose()
    assert found.total.inflation > 1.5
    [bits] = [remedy for remedy in found.advice if remedy.kind == "bits"]
    weights = bits.settings.split('"')[1]
    _, repaired = sampler_of(ql.SGLD, weights=weights, temperature=1e-3, **settings)
    assert repaired.diagnose().total.inflation < 1.15


def test_weights_that_do_not_move_count_as_right() -> None:
    mask = torch.zeros(64, 32, dtype=torch.bool)
    _, still = sampler_of(ql.SGLD, lr=0.1, weights="fixed6.3", temperature=1e-3, mask=[mask])
    assert still.diagnose().total.inflation == pytest.approx(1)


def test_velocities_heat_the_weights_so_that_grids_that_are_too_coarse_for_a_step_may_do() -> None:
    """Most of the noise of SGHMC reaches the weights by way of the velocity: inflation is over 2 lr T / N, not over the rest."""
    p, sampler = sampler_of(ql.SGHMC, lr=1.0, friction=0.1, weights="fixed10.6", temperature=1.0)
    found = sampler.diagnose()
    assert found.total.below > 0.5
    assert 1 <= found.total.inflation < 1.2
    assert math.isfinite(found.total.inflation)
    assert all(remedy.kind != "lr" for remedy in found.advice)
    assert p.shape == (64, 32)
