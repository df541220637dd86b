"""SGHMC as a torch optimizer: underdamped Langevin dynamics, exact in low precision; `underdamped` has its coefficients."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import ParamsT

from ..quantization.formats import Format
from ..quantization.operators import Algorithm, Rounding
from .given import Center, Given
from .preconditioner import RMS
from .sampler import Sampler
from .settings import StepSettings
from .underdamped import Integrator

__all__ = ["SGHMC"]


class SGHMC(Sampler):
    """Low-precision stochastic gradient Hamiltonian Monte Carlo, that is underdamped Langevin dynamics with velocities v.

    A step solves the dynamics exactly for a force f = Q_G(∇loss) + λ θ + (γ/N)(θ - w0) that is held; see `underdamped`:

        v' = a v - (1 - a)/Γ f + ξ_v
        θ' = θ + (1 - a)/Γ v - (Γη + a - 1)/Γ² f + ξ_θ        a = exp(-Γη), ξ_v and ξ_θ dependent

    with friction Γ and stepsize η such that lr = η/Γ and friction = Γη; ``integrator="splitting"`` takes another step of the same
    dynamics. Q^vc draws v' first, then θ' given v': mean, variances and covariance are those of the integrator, on the grids,
    as long as each variance exceeds the v_s of its grid. If less is left for θ', it is rounded with v_s: that adds ρ <= Δ²/4 to
    its variance, and raises that of a posterior of width σ by the factor 1 + ρ/(2 lr T/N) + ρ/(2 friction σ²).

    **From SGLD.** ``lr`` is that of the SGLD with the same long-run drift and diffusion; at high friction this is SGLD. With less
    friction a velocity lasts 1/friction steps. The exact integrator is stable for lr · curvature < 2, as SGLD is: take SGLD's
    lr. The splitting allows lr · curvature < 4/friction: begin with friction 0.1 and 0.5/friction times SGLD's lr. It is
    the one that mixes faster. `torch.optim.SGD` with momentum exp(-friction) and learning rate lr · friction is nearly the
    same without noise.

    Args:
        lr: the learning rate of the SGLD that this is at high friction.
        friction: the part of the velocity that one step loses, 1 - a for small ones; positive.
        integrator: ``"exact"``, or ``"splitting"``, which is stable at much larger lr if there is little friction.
        velocity: format of the velocities, in units of about sqrt(T/N), their standard deviation. None: that of the accumulator
            if there is one, that of the weights if it is a dtype's own; else ``"fp8_e4m3"`` for weights of up to 8 bits, so
            that both take 2 bytes, and ``"bf16"`` for wider ones. ``"fixed8.4"`` is faster, and ends at 8 units.
        preconditioner: gains as of SGLD, here one over the mass of each weight; exact once they are frozen.

    All other arguments are those of `SGLD`; with ``temperature=0`` this is SGD with momentum.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        num_data: int,
        *,
        friction: float = 0.1,
        integrator: Integrator = "exact",
        velocity: str | Format | None = None,
        temperature: float = 1.0,
        weight_decay: float | None = None,
        weights: str | Format | None = None,
        gradients: str | Format | None = None,
        accumulator: str | Format | None = None,
        rounding: Rounding = "corrected",
        algorithm: Algorithm = "exact",
        maximize: bool = False,
        seed: int = 0,
        stream: int = 0,
        step_in_backward: bool = False,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        prior_std: float | None = None,
        localization: float = 0.0,
        center: Center = "initial",
        center_format: str | Format | None = None,
        mask: Given | None = None,
        box: float | None = None,
        preconditioner: str | RMS | None = None,
    ) -> None:
        super().__init__(params, locals())

    def _settings_of(self, group: dict[str, Any], defaults: dict[str, Any]) -> StepSettings:
        settings = super()._settings_of(group, defaults)
        if settings.friction is None:
            raise ValueError("friction must be positive, got None; without velocities the sampler is SGLD")
        return settings
