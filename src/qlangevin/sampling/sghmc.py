"""SGHMC as a torch optimizer: underdamped Langevin dynamics, exact in low precision; `underdamped` has its coefficients."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from ..quantization.formats import Format
from ..quantization.operators import Algorithm, Rounding
from .given import Center, Given
from .preconditioner import RMS
from .sampler import Sampler

__all__ = ["SGHMC"]


class SGHMC(Sampler):
    """Low-precision stochastic gradient Hamiltonian Monte Carlo, that is underdamped Langevin dynamics with velocities v.

    A step solves the dynamics exactly for a force f = Q_G(∇loss) + λ θ + (γ/N)(θ - w0) that is held; see `underdamped`:

        v' = a v - (1 - a)/Γ f + ξ_v
        θ' = θ + (1 - a)/Γ v - (Γη + a - 1)/Γ² f + ξ_θ        a = exp(-Γη), ξ_v and ξ_θ dependent

    with friction Γ and stepsize η such that lr = η/Γ and friction = Γη. Q^vc draws v' first, then θ' given v': mean,
    variances and covariance are those of the exact solution on the grids, as long as each variance exceeds the v_s of its grid.

    **From SGLD.** At high friction (10, say) this is SGLD with the same ``lr``. With less friction a velocity lasts 1/friction
    steps, and a chain gets as far in that many steps as SGLD does in the square of them. What must not exceed about 1 for a chain
    to be stable is lr · friction · (the largest curvature of the mean loss); SGLD's is lr · curvature / 2. So take
    SGLD's lr, divide it by the friction, and begin with friction 0.1. `torch.optim.SGD` with momentum a and learning rate
    lr · friction is the same without noise, nearly.

    Args:
        lr: the learning rate of the SGLD that this is at high friction.
        friction: the part of the velocity that one step loses, 1 - a for small ones; positive.
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
        num_data: float,
        *,
        friction: float = 0.1,
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
