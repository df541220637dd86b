"""The stationary law of samplers on a Gaussian: closed forms, limits, simulation, and the published SGHMC."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from qlangevin.theory import GaussianLaw, gaussian

N, T, LR = 50.0, 0.7, 0.3


def spd(d: int = 4, seed: int = 0) -> Tensor:
    """A matrix with eigenvalues of about 0.1 to 2."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=generator)).Q
    matrix: Tensor = q @ torch.diag(torch.linspace(0.1, 2.0, d, dtype=torch.float64)) @ q.T
    return matrix


def one(h: float, lr: float = LR, **more: Any) -> GaussianLaw:
    return gaussian(torch.tensor([[h]], dtype=torch.float64), N, lr, **{"temperature": T, **more})


def test_sgld_in_one_dimension() -> None:
    for h in (0.01, 1.0, 6.0):
        law = one(h)
        assert float(law.covariance) == pytest.approx(T / (N * h * (1 - LR * h / 2)), rel=1e-12)
        assert float(law.target) == pytest.approx(T / (N * h), rel=1e-12)
        assert law.spectral_radius == pytest.approx(abs(1 - LR * h), rel=1e-12)
        time = law.autocorrelation_time(torch.ones(1))
        assert time == pytest.approx((2 - LR * h) / (LR * h), rel=1e-9)


def test_a_slow_chain_keeps_its_digits() -> None:
    assert float(one(1e-3, lr=1e-14).covariance) == pytest.approx(T / (N * 1e-3), rel=1e-9)


def test_prior_localization_and_preconditioner_in_one_dimension() -> None:
    law = one(1.0, weight_decay=0.1, localization=10.0, center=torch.tensor([3.0]), preconditioner=torch.tensor([0.5]))
    a = 1.0 + 0.1 + 10.0 / N
    assert float(law.covariance) == pytest.approx(T / (N * a * (1 - LR * 0.5 * a / 2)), rel=1e-12)
    assert float(law.mean) == pytest.approx(10.0 / N * 3.0 / a, rel=1e-12)


def test_gradient_noise_and_rounding_in_one_dimension() -> None:
    law = one(1.0, gradient_noise=torch.tensor([0.25]), rounding=torch.tensor([0.015625]))
    lost = 1 - (1 - LR) ** 2
    assert float(law.covariance) == pytest.approx((2 * LR * T / N + LR**2 * 0.25 + 0.015625) / lost, rel=1e-12)


@pytest.mark.parametrize("more", [{}, {"friction": 0.3}, {"friction": 0.3, "update": "published"}])
def test_covariance_solves_the_equation_of_one_step(more: dict[str, Any]) -> None:
    """One step, written out weight by weight, leaves mean and covariance of the law as they are."""
    d, g = 4, torch.tensor([1.0, 0.3, 2.0, 0.7], dtype=torch.float64)
    h, center = spd(d), torch.linspace(-1, 1, d, dtype=torch.float64)
    extra: dict[str, Any] = {"gradient_noise": 0.1 * spd(d, 1), "rounding": 0.01 * spd(d, 2)}
    law = gaussian(
        h, N, 0.1, temperature=T, weight_decay=0.05, localization=5.0, center=center, preconditioner=g, **extra, **more
    )
    step, q = written_out(h + (0.05 + 5.0 / N) * torch.eye(d, dtype=h.dtype), g, 0.1, extra, more)
    x = joint(law)
    torch.testing.assert_close(step @ x @ step.T + q, x, rtol=1e-10, atol=1e-14)


def joint(law: GaussianLaw) -> Tensor:
    """Covariance of (v, θ), or of θ."""
    if law.velocity is None or law.cross is None:
        return law.covariance
    return torch.cat((torch.cat((law.velocity, law.cross.T), 1), torch.cat((law.cross, law.covariance), 1)))


def written_out(
    a: Tensor, g: Tensor, lr: float, extra: dict[str, Tensor], more: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """F and Q, from the equations of the module."""
    one, noise, rounding = torch.eye(len(a), dtype=a.dtype), extra["gradient_noise"], extra["rounding"]
    if "friction" not in more:
        drift = lr * torch.diag(g)
        return one - drift @ a, 2 * lr * T / N * torch.diag(g) + drift @ noise @ drift + rounding
    c, root = more["friction"], torch.diag(g.sqrt())
    gamma, decay, sign = math.sqrt(c / lr), math.exp(-c), -1.0 if "update" in more else 1.0
    push, kick = (1 - decay) / gamma, (c + decay - 1) / gamma**2
    on_v, on_theta = push * root, sign * kick * root @ root
    step = torch.cat((torch.cat((decay * one, -on_v @ a), 1), torch.cat((push * root, one - on_theta @ a), 1)))
    mixed = (1 - decay) ** 2 / gamma * root
    spread = (2 * c + 4 * decay - decay**2 - 3) / gamma**2 * root @ root
    heat = T / N * torch.cat((torch.cat(((1 - decay**2) * one, mixed), 1), torch.cat((mixed, spread), 1)))
    gradient = torch.cat((on_v, on_theta)) @ noise @ torch.cat((on_v, on_theta)).T
    return step, heat + gradient + torch.block_diag(torch.zeros_like(rounding), rounding)


def test_high_friction_becomes_sgld() -> None:
    kept: dict[str, Any] = {"temperature": T, "weight_decay": 0.1, "preconditioner": torch.tensor([1.0, 0.3, 2.0, 0.7])}
    exact = gaussian(spd(), N, 0.1, **kept)
    near = gaussian(spd(), N, 0.1, friction=1e7, **kept)
    torch.testing.assert_close(near.covariance, exact.covariance, rtol=1e-5, atol=0)
    assert near.autocorrelation_time(torch.ones(4)) == pytest.approx(
        exact.autocorrelation_time(torch.ones(4)), rel=1e-5
    )


@pytest.mark.parametrize("friction", [None, 1e-4, 9.9e-3, 1.01e-2, 1.0])
def test_short_steps_reach_the_target(friction: float | None) -> None:
    law = gaussian(spd(), N, 1e-9, temperature=T, friction=friction)
    torch.testing.assert_close(law.covariance, law.target, rtol=1e-5, atol=1e-9)
    if law.velocity is not None and law.cross is not None:
        torch.testing.assert_close(law.velocity, T / N * torch.eye(4, dtype=torch.float64), rtol=1e-5, atol=1e-9)
        assert float(law.cross.abs().max()) < 1e-5


def test_published_sghmc_on_a_unit_gaussian() -> None:
    """Inverse mass u = 5 and γ = 5, η = 0.15 of arXiv 2310.16320 are G = 5, friction γη and lr η/γ here."""
    u = gamma = 5.0
    given: dict[str, Any] = {"friction": gamma * 0.15, "preconditioner": torch.tensor([u])}

    def variance(**more: Any) -> float:
        return float(gaussian(torch.eye(1), 1, 0.15 / gamma, **given, **more).covariance)

    assert variance() == pytest.approx(1.0803, abs=1e-4)
    assert variance(update="published") == pytest.approx(2.8851, abs=1e-4)
    assert variance(noise="independent") == pytest.approx(0.7129, abs=1e-4)
    assert variance(update="published", noise="independent") == pytest.approx(1.8493, abs=1e-4)


@pytest.mark.parametrize("friction", [None, 0.5])
def test_long_chains_have_this_law(friction: float | None) -> None:
    """Independent chains started in the law keep it: z-scores of 4 variances, beyond 4.5 once in 37 000 such tests."""
    d, chains, h = 4, 4000, spd()
    law = gaussian(h, N, 0.4, temperature=T, friction=friction)
    extra = {"gradient_noise": torch.zeros(d, d, dtype=h.dtype), "rounding": torch.zeros(d, d, dtype=h.dtype)}
    more = {} if friction is None else {"friction": friction}
    step, q = written_out(h, torch.ones(d, dtype=h.dtype), 0.4, extra, more)
    generator = torch.Generator().manual_seed(3)
    root = torch.linalg.cholesky(q)
    state = torch.zeros(chains, len(step), dtype=h.dtype)
    for _ in range(300):  # the slowest mode shrinks to 1e-5
        state = state @ step.T + torch.randn(state.shape, dtype=h.dtype, generator=generator) @ root.T
    theta = state[:, -d:]
    z = (theta.square().mean(0) / law.covariance.diagonal() - 1) * math.sqrt(chains / 2)
    assert float(z.abs().max()) < 4.5


def test_autocorrelation_time_of_sghmc_is_the_sum_of_autocorrelations() -> None:
    law = gaussian(spd(), N, 0.3, temperature=T, friction=0.4)
    zero = torch.zeros(4, 4, dtype=torch.float64)
    extra = {"gradient_noise": zero, "rounding": zero}
    step, _ = written_out(spd(), torch.ones(4, dtype=torch.float64), 0.3, extra, {"friction": 0.4})
    u, x, lag = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64), joint(law), torch.eye(8, dtype=torch.float64)
    total = 1.0
    for _ in range(3000):
        lag = step @ lag
        total += 2 * float(u @ (lag @ x)[4:, 4:] @ u) / float(u @ law.covariance @ u)
    assert law.autocorrelation_time(u) == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("friction", [None, 0.01, 0.5, 5.0])
def test_largest_lr_is_the_one_the_error_names(friction: float | None) -> None:
    with pytest.raises(ValueError, match="lr must be below") as caught:
        gaussian(spd(), N, 1e5, friction=friction)
    limit = float(str(caught.value).rpartition("below ")[2])
    assert gaussian(spd(), N, limit * 0.999, friction=friction).spectral_radius < 1
    with pytest.raises(ValueError, match="spectral radius"):
        gaussian(spd(), N, limit * 1.001, friction=friction)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"hessian": torch.tensor([[1.0, 0.5], [0.0, 1.0]])}, r"hessian must be symmetric.*take \(hessian"),
    ({"hessian": torch.ones(3)}, "hessian must be a square matrix"),
    ({"hessian": torch.tensor([[1.0, 0.0], [0.0, -0.5]])}, "raise weight_decay or localization .* more than 0.5"),
    ({"hessian": torch.full((2, 2), math.nan)}, "hessian must be finite"),
    ({"lr": 0.0}, "lr must be above 0"),
    ({"temperature": -1.0}, "temperature must be a finite number"),
    ({"friction": 0.0}, "friction must be above 0"),
    ({"weight_decay": -1.0}, "weight_decay must be"),
    ({"preconditioner": torch.tensor([1.0, 0.0])}, "preconditioner must be positive"),
    ({"preconditioner": torch.ones(3)}, r"preconditioner must be 2 finite numbers.*\(3,\)"),
    ({"center": torch.ones(1)}, "center must be 2"),
    ({"rounding": torch.eye(3)}, "rounding must be a matrix of 2 x 2"),
    ({"gradient_noise": -torch.ones(2)}, "gradient_noise must be a covariance"),
    ({"update": "printed"}, "update must be one of"),
    ({"noise": "independent"}, "give its friction"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD)
def test_mistakes_are_named(wrong: dict[str, Any], message: str) -> None:
    given = {"hessian": torch.eye(2), "num_data": N, "lr": 0.1, **wrong}
    with pytest.raises(ValueError, match=message):
        gaussian(**given)


def test_published_update_that_diverges_says_so() -> None:
    with pytest.raises(ValueError, match='use update="exact"'):
        gaussian(torch.eye(2), 1, 1.0, friction=5.0, update="published")


def test_direction_must_not_vanish() -> None:
    with pytest.raises(ValueError, match="direction must not be zero"):
        one(1.0).autocorrelation_time(torch.zeros(1))
