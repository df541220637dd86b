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
    assert found.total.below is not None
    assert found.total.below > 0.5
    assert 1 <= found.total.inflation < 1.2
    assert math.isfinite(found.total.inflation)
    assert all(remedy.kind != "lr" for remedy in found.advice)
    assert p.shape == (64, 32)


CHAINS = 8192


def inflate(lr: float, friction: float, integrator: str, steps: int, **settings: Any) -> tuple[float, float]:
    """Return the variance of chains on N(0, 1) over the exact one, and the inflation that the diagnosis says they have."""
    law = ql.theory.gaussian(torch.eye(1), 1, lr, friction=friction, update=integrator)  # type: ignore[arg-type]
    p = nn.Parameter(torch.randn(CHAINS, generator=torch.Generator().manual_seed(0)) * math.sqrt(float(law.covariance)))
    sampler = ql.SGHMC([p], lr, 1, friction=friction, integrator=integrator, **settings)  # type: ignore[arg-type]
    said = []
    for step in range(steps):
        p.grad = p.detach().clone()
        if step >= steps // 2 and step % 20 == 0:
            found = sampler.diagnose(widths={"parameter 0": 1.0}).total.inflation
            assert found is not None
            said.append(found)
        sampler.step()
    return float(p.detach().var() / law.covariance), sum(said) / len(said)


@pytest.mark.parametrize("integrator", ["exact", "splitting"])
@pytest.mark.parametrize(
    ("lr", "friction", "settings"),
    [
        (0.5, 0.1, {"weights": "fixed8.1"}),  # 1.25, of which 0.04 are Δ²/6 over 2 lr T/N
        (0.5, 0.1, {"weights": "fixed8.0"}),
        (0.2, 0.5, {"weights": "fixed8.0"}),
        (1.0, 0.01, {"weights": "fixed16.8", "velocity": "fp8_e5m2"}),  # rounding the velocities
    ],
)
def test_inflation_is_that_of_the_variance(
    lr: float, friction: float, integrator: str, settings: dict[str, str]
) -> None:
    """Within 5 standard errors of the variance of 8192 chains: 8 cases, 5e-6 false alarms."""
    found, said = inflate(lr, friction, integrator, round(max(400, 12 / friction)), **settings)
    assert said > 1.02
    assert abs(found - said) < 5 * found * math.sqrt(2 / CHAINS)


def test_the_splitting_has_noise_though_its_weights_draw_none() -> None:
    _, sampler = sampler_of(ql.SGHMC, lr=1.0, integrator="splitting", weights="fixed10.6")
    found = sampler.diagnose()
    assert found.total.inflation > 1
    assert found.total.noise > 0
    assert "Temperature 0" not in found.summary


def test_weights_without_noise_of_their_own_are_not_compared_with_v0() -> None:
    """Given its velocity a position of the splitting has no noise: v < v_s says nothing of the grid."""
    for weights in ("fixed16.12", "fixed6.3"):
        _, sampler = sampler_of(ql.SGHMC, lr=1.0, integrator="splitting", weights=weights, temperature=1e-2)
        found = sampler.diagnose()
        for part in (*found.parameters, found.total):
            assert (part.above, part.between, part.below) == (None, None, None)
        row = next(line for line in str(found).splitlines() if line.startswith("all"))
        assert row.split()[3:6] == ["—"] * 3
        assert "limited by the grid" not in found.summary
    assert not found.sufficient


def test_one_group_by_velocity_alone_leaves_the_total_without_shares() -> None:
    a, b = (nn.Parameter(torch.randn(64, 32, generator=torch.Generator().manual_seed(i))) for i in range(2))
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "integrator": "splitting"}]
    sampler = ql.SGHMC(groups, lr=0.1, num_data=1000, weights="fixed8.6")
    for p in (a, b):
        p.grad = torch.zeros(64, 32)
    found = sampler.diagnose()
    assert [part.below is None for part in (*found.parameters, found.total)] == [False, True, True]


def test_without_temperature_shares_are_those_of_sgd() -> None:
    _, sampler = sampler_of(ql.SGHMC, lr=1.0, integrator="splitting", weights="fixed10.6", temperature=0.0)
    assert sampler.diagnose().total.below is not None


def test_velocities_that_are_too_coarse_get_16_bits() -> None:
    _, sampler = sampler_of(ql.SGHMC, lr=1.0, friction=1e-4, weights="fixed16.12", velocity="fixed8.4")
    found = sampler.diagnose()
    assert found.total.inflation > 1.5
    [remedy] = [r for r in found.advice if r.kind == "velocity"]
    assert remedy.settings == 'velocity="bf16"'
    _, repaired = sampler_of(ql.SGHMC, lr=1.0, friction=1e-4, weights="fixed16.12", velocity="bf16")
    assert repaired.diagnose().total.inflation == pytest.approx(remedy.inflation, rel=1e-3)


def test_the_resolution_of_sghmc_is_that_of_sgld() -> None:
    """Δ |∇U| / (2T) knows of no velocity."""
    p, sampler = sampler_of(ql.SGHMC, lr=0.1, weights="fixed8.5")
    q = nn.Parameter(p.detach().clone())
    q.grad = p.grad
    plain = ql.SGLD([q], lr=0.1, num_data=1000, weights="fixed8.5")
    assert sampler.diagnose().total.resolution == pytest.approx(plain.diagnose().total.resolution, rel=1e-6)


def test_velocities_tell_their_temperature() -> None:
    """Mean square of 2048 standard normal velocities, in fp32: within 5 standard errors of 1."""
    p, sampler = sampler_of(ql.SGHMC, lr=0.1, friction=50.0)
    found = sampler.diagnose()
    assert abs(found.total.kinetic - 1) < 5 * math.sqrt(2 / p.numel())
    assert f"Velocities are at {found.total.kinetic:.3g} times" in found.summary
    assert sampler_of(ql.SGLD, lr=0.1)[1].diagnose().total.kinetic is None


def test_groups_without_noise_do_not_count_in_the_total() -> None:
    a, b = (nn.Parameter(torch.randn(64, 32, generator=torch.Generator().manual_seed(i))) for i in range(2))
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "temperature": 0.0}]
    sampler = ql.SGLD(groups, lr=0.1, num_data=1000, weights="fixed6.3")
    for p in (a, b):
        p.grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    found = sampler.diagnose()
    assert found.parameters[1].inflation is None
    assert found.total.inflation == found.parameters[0].inflation
    assert found.total.size == 2 * 64 * 32
    assert found.advice
