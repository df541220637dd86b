"""SGLD as a torch optimizer: its settings; `sampler` has the methods that users call, `update` the equation.

Every method of the paper is a choice of settings; ``temperature=0`` is SGD.
"""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from ..quantization.formats import Format
from ..quantization.operators import Algorithm, Rounding
from .given import Center, Given
from .preconditioner import RMS
from .sampler import Sampler

__all__ = ["SGLD"]


class SGLD(Sampler):
    """Low-precision stochastic gradient Langevin dynamics.

    A step takes the weights θ to

        θ' = Q(θ - lr G (Q_G(∇loss) + λ θ + (γ/N)(θ - w0)), v)    with noise of variance v = 2 lr T G / N,

    where Q is Q^vc, or rounds after the noise was added (see ``rounding``). With an accumulator a, that is what takes the
    step, and θ = Q_W(a). G is 1 without a preconditioner, γ is 0 without localization.

    Args:
        params: parameters, named parameters or groups; a group may override any setting. From here on they are on the
            grid of ``weights``.
        lr: the learning rate for the mean loss.
        num_data: N, the number of training examples: of whatever the loss is a mean over. If that is tokens, their number.
        temperature: T, scales the noise; 1 samples the posterior, 0 is SGD.
        weight_decay: λ, the precision of the Gaussian prior over N; 0 by default.
        prior_std: σ, the standard deviation of that prior, in the place of ``weight_decay``: λ = 1 / (σ² N).
        weights: Q_W, the format of the parameters; None leaves them in their dtype's own precision, or as they are packed:
            parameters of bfloat16 are on the grid ``"bf16"``, rounded with the same law as any other format.
        gradients: Q_G, the format gradients are rounded to, stochastically; None for full precision.
        accumulator: None keeps only the parameters (SGLDLP-L); ``"fp32"`` (SGLDLP-F) or any other format keeps a second
            copy that takes the updates; weights loaded into the model later begin a new one.
        rounding: ``"corrected"`` (Q^vc), ``"stochastic"`` (naive) or ``"nearest"``.
        algorithm: of ``"corrected"``; see `qlangevin.corrected`.
        maximize: climb instead of descend.
        seed: of all random bits; two samplers with the same seed and stream draw the same.
        stream: distinguishes chains that share a seed.
        step_in_backward: step each parameter as soon as ``backward`` has its gradient, and free the gradient: there is never
            more than one of them. ``step()`` or ``zero_grad()`` ends the step; one more gradient of a parameter before that
            raises RuntimeError. ``backward`` leaves no gradients, so `torch.nn.utils.clip_grad_norm_` has no effect and a
            `torch.amp.GradScaler` cannot be used; and if one is not finite, the parameters whose gradients came before it
            have stepped.
        accumulate: with ``step_in_backward``, step at the k-th backward pass, on the sum of k gradients (scale the loss by
            1/k for their mean), which takes the memory of one gradient for each parameter. ``step()`` after fewer passes
            steps on those.
        localization: γ, adds the energy γ/2 |θ - w0|² to U: the chain stays near the centre w0.
        center: w0: ``"initial"``, the weights as the chain begins with them, or tensors, as a sequence in the order of the
            parameters or a mapping by name or parameter. Tensors are not copied: chains can share them.
        center_format: keep the centre in this format, rounded to nearest; None: the initial weights in that of ``weights``,
            which holds them exactly, tensors as they are.
        mask: True where a weight moves, given like ``center``; the others have no drift and no noise, and are kept. A bit each.
        box: weights that a step takes further than this from w0 are moved back to the edge of the box.
        preconditioner: `qlangevin.RMS`, or ``"rms"``: a gain G for each weight from its squared gradients.
        max_grad_norm: with ``step_in_backward``, scale each parameter's own gradient down to this norm; not, as
            `torch.nn.utils.clip_grad_norm_` does, the gradients of all parameters together.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        num_data: int,
        *,
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
