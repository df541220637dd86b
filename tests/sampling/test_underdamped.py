"""Underdamped dynamics: coefficients, limits, and the moments of one step on the grid, by enumeration."""

import math
from typing import Any

import pytest
import torch

import qlangevin as ql
from qlangevin.quantization.formats import parse
from qlangevin.quantization.random import Key
from qlangevin.sampling.settings import StepSettings
from qlangevin.sampling.underdamped import solve, velocity_unit
from qlangevin.sampling.update import update_underdamped
from qlangevin.theory.stationary import grid
from qlangevin.theory.transition import transition_matrix


def exact(lr: float, c: float, heat: float) -> dict[str, float]:
    """Return the solution as the docstring of the module has it, in terms of stepsize and friction."""
    eta, gamma, a = math.sqrt(lr * c), math.sqrt(c / lr), math.exp(-c)
    return {
        "kick": -(1 - a) / gamma, "carry": (1 - a) / gamma, "push": -(gamma * eta + a - 1) / gamma**2,
        "v": heat * (1 - a * a), "x": heat * (2 * gamma * eta + 4 * a - a * a - 3) / gamma**2, "cov": heat * (1 - a) ** 2 / gamma,
    }  # fmt: skip


@pytest.mark.parametrize("c", [0.05, 0.1, 0.3, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("unit", [1.0, 2.0**-7])
def test_coefficients_are_those_of_the_exact_solution(c: float, unit: float) -> None:
    found, truth = solve(0.02, c, 1 / 5000, unit), exact(0.02, c, 1 / 5000)
    assert found.fade == pytest.approx(math.exp(-c) - 1, rel=1e-9)
    assert found.kick * unit == pytest.approx(truth["kick"], rel=1e-9)
    assert found.carry / unit == pytest.approx(truth["carry"], rel=1e-9)
    assert found.push == pytest.approx(truth["push"], rel=1e-9)
    assert found.velocity_variance * unit**2 == pytest.approx(truth["v"], rel=1e-9)
    kappa = found.follow / unit
    assert kappa * truth["v"] == pytest.approx(truth["cov"], rel=1e-9)
    assert found.variance + kappa**2 * truth["v"] == pytest.approx(truth["x"], rel=1e-6)


def test_series_and_closed_forms_meet() -> None:
    for c in (1e-3, 0.1):
        below, above = (solve(0.02, x, 1.0, 1.0) for x in (c * (1 - 1e-12), c))
        assert below == pytest.approx(above, rel=1e-10)
    tiny = solve(0.02, 1e-6, 1.0, 1.0)
    assert tiny.push == pytest.approx(-0.02 * 5e-7, rel=1e-6)
    assert tiny.variance == pytest.approx(0.02 * 1e-12 / 6, rel=1e-6)


def test_at_high_friction_it_is_sgld() -> None:
    found = solve(0.02, 1e6, 1 / 300, 1.0)
    assert found.push == pytest.approx(-0.02, rel=1e-5)
    assert found.variance == pytest.approx(2 * 0.02 / 300, rel=1e-5)
    assert found.carry == pytest.approx(0, abs=1e-3)


def test_without_noise_rounding_of_velocities_does_not_move_weights() -> None:
    found = solve(0.02, 0.1, 0.0, 1.0)
    assert found.follow == found.variance == found.velocity_variance == 0
    assert velocity_unit(0.0, 100) == 1
    assert velocity_unit(1.0, 60_000) == 2.0**-8


@pytest.mark.parametrize(
    ("u_format", "x_format"), [("fixed6.2", "fixed8.5"), ("fixed8.4", "fixed8.3"), ("fixed10.6", "fixed8.6")]
)
@pytest.mark.parametrize("c", [0.02, 0.1, 1.0])
def test_one_step_has_the_exact_moments_on_its_grids(u_format: str, x_format: str, c: float) -> None:
    """All outcomes with their probabilities: u' on its grid, then θ' on its own given u'. Nothing is sampled."""
    k, start, u, force = solve(0.05, c, 1 / 16, 0.25), 0.15625, 0.75, 0.3
    u_points, x_points = grid(u_format), grid(x_format)
    mean_u = u + (k.fade * u + k.kick * force)
    mean = torch.tensor([mean_u], dtype=torch.float64)
    row = transition_matrix(mean, k.velocity_variance, u_points, parse(u_format), "corrected")[0]
    means = start + k.carry * u + k.push * force + k.follow * (u_points - mean_u)
    rows = transition_matrix(means, k.variance, x_points, parse(x_format), "corrected")
    joint = row[:, None] * rows
    mean_x = start + k.carry * u + k.push * force
    dx, du = x_points - mean_x, u_points - mean_u
    assert float(joint.sum()) == pytest.approx(1, abs=1e-9)
    assert float((joint * dx).sum()) == pytest.approx(0, abs=1e-9)
    assert float((joint * du[:, None]).sum()) == pytest.approx(0, abs=1e-9)
    gaps = [2.0 ** -int(f.split(".")[1]) for f in (u_format, x_format)]
    if k.velocity_variance >= gaps[0] ** 2 / 4:
        total = k.variance + k.follow**2 * k.velocity_variance
        assert float((joint * du[:, None] ** 2).sum()) == pytest.approx(k.velocity_variance, rel=1e-6)
        assert float((joint * du[:, None] * dx).sum()) == pytest.approx(k.follow * k.velocity_variance, rel=1e-6)
        if k.variance >= gaps[1] ** 2 / 4:
            assert float((joint * dx**2).sum()) == pytest.approx(total, rel=1e-6)
        else:  # rounding has more variance than the noise has left: that is what the weights get
            assert float((joint * dx**2).sum()) >= total * (1 - 1e-6)


@pytest.mark.parametrize("rounding", ["corrected", "stochastic"])
def test_drawn_steps_have_these_moments(rounding: str) -> None:
    """Means, variances and covariance of 400 000 draws within 5 standard errors: 5 z-tests, 3e-6 false alarms in all."""
    n, lr, c, heat = 400_000, 0.05, 0.2, 1 / 16
    settings = StepSettings(lr, 16, friction=c, rounding=rounding)  # type: ignore[arg-type]
    k = solve(lr, c, heat, 0.25)
    theta, u, g = torch.full((n,), 0.15625), torch.full((n,), 0.75), torch.full((n,), 0.3)
    x, v = update_underdamped(theta, u, g, settings, k, ("fixed12.8", "fixed12.8"), (Key(1), Key(2)))
    dx = x.double() - (0.15625 + k.carry * 0.75 + k.push * 0.3)
    du = v.double() - (0.75 + k.fade * 0.75 + k.kick * 0.3)
    var_u, cov = k.velocity_variance, k.follow * k.velocity_variance
    var_x = k.variance + k.follow * cov
    extra = 0.0 if rounding == "corrected" else 2.0**-16 / 4  # rounding after the noise adds at most Δ²/4 to a variance
    for found, truth, slack in (
        (dx, 0.0, 0),
        (du, 0.0, 0),
        (dx * dx, var_x, extra),
        (du * du, var_u, extra),
        (dx * du, cov, 0),
    ):
        error = float(found.std()) / math.sqrt(n)
        assert truth - 5 * error <= float(found.mean()) <= truth + slack + 5 * error


def test_a_chain_with_high_friction_has_the_stationary_law_of_sgld() -> None:
    """The variance of 8192 chains on N(0, 1/(N h)) within 5 standard errors of SGLD's exact one: 6e-7 false alarms."""
    n, lr, h, data = 8192, 0.2, 1.0, 100
    p = torch.nn.Parameter(torch.zeros(n))
    sampler = ql.SGHMC([p], lr=lr, num_data=data, friction=1e5)
    for _ in range(60):
        p.grad = h * p.detach()
        sampler.step()
    truth = 1 / (data * h * (1 - lr * h / 2))
    assert abs(float(p.detach().var()) - truth) < 5 * truth * math.sqrt(2 / n)


@pytest.mark.parametrize("c", [0.01, 0.1, 1.0, 10.0])
def test_the_splitting_is_its_three_parts_in_a_row(c: float) -> None:
    lr, heat, unit = 0.05, 1 / 16, 0.25
    k, eta, a = solve(lr, c, heat, unit, "splitting"), math.sqrt(2 * lr * math.tanh(c / 2)), math.exp(-c)
    theta, v, f, noise = 0.3, 0.7, -0.2, 0.11
    kicked = v - eta * f
    new = a * kicked + noise
    moved = theta + eta / 2 * kicked + eta / 2 * new
    u, e = v / unit, noise / unit
    assert u + k.fade * u + k.kick * f + e == pytest.approx(new / unit, rel=1e-12)
    assert theta + k.carry * u + k.push * f + k.follow * e == pytest.approx(moved, rel=1e-12)
    assert k.velocity_variance * unit**2 == pytest.approx(heat * (1 - a * a), rel=1e-12)


@pytest.mark.parametrize("integrator", ["exact", "splitting"])
@pytest.mark.parametrize("c", [0.01, 0.3, 5.0])
def test_a_constant_force_moves_weights_by_lr_a_step_in_the_long_run(integrator: Any, c: float) -> None:
    k = solve(0.05, c, 1.0, 0.5, integrator)
    velocity = -k.kick / k.fade  # at which friction and force balance
    assert k.carry * velocity + k.push == pytest.approx(-0.05, rel=1e-9)
