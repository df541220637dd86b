"""Settings in devinterp's units, and the same dynamics in the units of our samplers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.slt.settings import read_sampler

SIZE = 200_000
FIVE = 5.0  # standard errors: one of the comparisons below fails once in 100 000 runs by chance


def one_step(settings: ql.slt.Settings, **more: Any) -> Tensor:
    """Displacements of weights 0.5 away from their centre, with gradient 0.3."""
    p = nn.Parameter(torch.full((SIZE,), 0.5))
    sampler = settings.make_sampler([p], center=[torch.zeros(SIZE)], **more)
    p.grad = torch.full((SIZE,), 0.3)
    sampler.step()
    return p.detach() - 0.5


def test_a_step_is_that_of_the_equation() -> None:
    s = ql.slt.Settings(lr=1e-2, nbeta=50.5, localization=7.0, num_data=321, weights=None)
    moved = one_step(s)
    drift, variance = -s.lr / 2 * (s.nbeta * 0.3 + s.localization * 0.5), s.lr
    assert abs(float(moved.mean()) - drift) < FIVE * math.sqrt(variance / SIZE)
    assert abs(float(moved.var()) / variance - 1) < FIVE * math.sqrt(2 / SIZE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("localization", [0.0, 7.0])
def test_a_step_is_that_of_devinterp(localization: float) -> None:
    optim = pytest.importorskip("devinterp.optim")
    s = ql.slt.Settings(lr=1e-2, nbeta=50.5, localization=localization, num_data=321, weights=None)
    p = nn.Parameter(torch.zeros(SIZE))
    theirs = optim.SGMCMC.sgld([p], lr=s.lr, nbeta=s.nbeta, localization=s.localization)
    p.data += 0.5
    p.grad = torch.full((SIZE,), 0.3)
    torch.manual_seed(0)
    theirs.step()
    a, b = one_step(s), p.detach() - 0.5
    assert abs(float(a.mean() - b.mean())) < FIVE * math.sqrt(2 * s.lr / SIZE)
    assert abs(float(a.var() / b.var()) - 1) < FIVE * math.sqrt(4 / SIZE)


def test_default_is_n_over_log_n() -> None:
    assert ql.slt.default_nbeta(1000) == 1000 / math.log(1000)
    with pytest.raises(ValueError, match=r"needs n >= 3 data, got n = 2"):
        ql.slt.default_nbeta(2)


def test_gains_are_frozen_after_the_burn_in() -> None:
    assert read_sampler("rms", 50)[1] == str(ql.RMS(decay=0.99, eps=0.1, freeze_after=50))
    assert read_sampler(ql.RMS(eps=0.5), 50) == ("rms", str(ql.RMS(eps=0.5)))
    assert read_sampler("sghmc", 50) == ("sghmc", None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"nbeta": -1.0}, "nbeta must be a finite number"),
        ({"localization": -1.0}, "localization must be"),
        ({"draws": 3}, "draws must be an integer, at least 4"),
        ({"sampler": "hmc"}, "sampler must be one of 'sgld'"),
    ],
)
def test_bad_settings_are_named(wrong: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"lr": 1e-3, "nbeta": 10.0, "localization": 1.0, "num_data": 100}
    with pytest.raises(ValueError, match=message):
        ql.slt.Settings(**(good | wrong))
