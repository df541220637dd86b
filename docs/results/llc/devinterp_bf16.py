"""SGMCMC.sgld on bfloat16 parameters: the sampled variance against the exact one.

A quadratic loss L(w) = |w - w*|²/2, whose posterior is known: each weight is normal with variance 1/K, K = nβ + γ (and
1/(K (1 - εK/4)) with the effect of the stepsize). Chains start at w* and run for many relaxation times 2/(εK).

    pip install devinterp==2.0.1
    python devinterp_bf16.py

It takes seconds, and prints

    lr 1e-05: float32 0.999, bfloat16 8.349
    lr 3e-05: float32 0.994, bfloat16 1.751
    lr 0.0001: float32 0.994, bfloat16 1.015
    lr 0.0004: float32 1.003, bfloat16 1.004

In float32 the ratio is 1. In bfloat16 it grows as the stepsize falls: the drift ε/2 (nβ ∇L + γ (w - w*)) and the noise are two
additions in the parameter's dtype, each rounded to nearest, and a drift below half the distance of neighbouring bfloat16
numbers changes nothing. Learning coefficients, which are sums of such variances, come out too large by the same factor.
Possible remedies: keep the weights that are stepped in float32 and compute with a bfloat16 copy; or add drift and noise in
float32, and round the sum stochastically, which repairs most of it.
"""

import warnings

import torch
from devinterp.optim import SGMCMC

warnings.simplefilter("ignore")
NBETA, GAMMA, SIZE = 1000.0, 100.0, 2048


def variance_ratio(dtype: torch.dtype, lr: float) -> float:
    torch.manual_seed(0)
    center = (torch.randn(SIZE) * 0.3).to(dtype)
    w = torch.nn.Parameter(center.clone())
    optimizer = SGMCMC.sgld([w], lr=lr, nbeta=NBETA, localization=GAMMA)
    k, total, count = NBETA + GAMMA, 0.0, 0
    relaxation = int(2 / (lr * k)) + 1
    for step in range(25 * relaxation):
        w.grad = w.detach() - center
        optimizer.step()
        if step >= 5 * relaxation and step % relaxation == 0:
            total += float((w.detach().double() - center.double()).square().mean())
            count += 1
    return total / count * k * (1 - lr * k / 4)


for lr in (1e-5, 3e-5, 1e-4, 4e-4):
    print(
        f"lr {lr:g}: float32 {variance_ratio(torch.float32, lr):.3f}, bfloat16 {variance_ratio(torch.bfloat16, lr):.3f}"
    )
