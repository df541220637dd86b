"""Cost of adapting gains: variances of chains with RMS gains that go on adapting, whose law lacks the term of ∂G/∂θ.

    python -m benchmarks.adapting_gains [--steps 10000] [--weights 1024]

Independent weights, each with the posterior exp(-U) of `ENERGIES`, and gradients of U with Gaussian noise of the standard
deviations `NOISES`, the width of the posterior being about 1: a minibatch. Weights are float32, so nothing is rounded but the
running means. Chains whose gains are frozen after `FROZEN` steps have the same stepsize and the same noise, so the ratio of the
two variances is what adapting does. Its standard error is over the weights, which are independent.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

import qlangevin as ql

DATA = 1000
FROZEN = 2000
LR = 0.02  # of a posterior of width 1 and gradients without noise: correlations halve in about 35 steps
DECAYS = (0.9, 0.99, 0.999)
NOISES = {"θ²/2": (0.0, 1.0, 3.0), "θ⁴/4": (0.0, 1.0)}  # with more noise the steepest of the second is unstable
ENERGIES: dict[str, Callable[[Tensor], Tensor]] = {"θ²/2": lambda w: w, "θ⁴/4": lambda w: w**3}  # their gradients


def variances(
    gradient: Callable[[Tensor], Tensor], decay: float, noise: float, adapts: bool, steps: int, count: int
) -> Tensor:
    """Return the variance of each weight of a chain, over the steps after burn-in."""
    generator = torch.Generator().manual_seed(1)
    weights = nn.Parameter(torch.randn(count, generator=generator))
    # Gains fall as gradients get noisier, so the lr makes up for it: chains of all noises move as far in a step.
    lr = LR * (1 + noise**2) ** 0.5
    gains = ql.RMS(decay=decay, eps=0.1 / DATA, freeze_after=None if adapts else FROZEN)
    sampler = ql.SGLD([weights], lr, DATA, weights=None, preconditioner=gains, seed=2)
    total, square = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for step in range(FROZEN + steps):
        errors = noise * torch.randn(count, generator=generator) if noise else 0.0
        weights.grad = (gradient(weights.detach()) + errors) / DATA
        sampler.step()
        if step >= FROZEN:
            total += weights.detach()
            square += weights.detach().double() ** 2
    return square / steps - (total / steps) ** 2


def ratio(energy: str, decay: float, noise: float, steps: int, count: int) -> tuple[float, float]:
    """Return the variance with adapting gains over that with frozen ones, and its standard error."""
    adapting, frozen = (variances(ENERGIES[energy], decay, noise, adapts, steps, count) for adapts in (True, False))
    value = float(adapting.mean() / frozen.mean())
    relative = sum(float(v.var() / v.mean() ** 2 / count) for v in (adapting, frozen))
    return value, value * relative**0.5


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--weights", type=int, default=1024)
    given = parser.parse_args()
    print("| U | noise of the gradient | " + " | ".join(f"decay {decay}" for decay in DECAYS) + " |")
    print("|---" * (2 + len(DECAYS)) + "|")
    for energy in ENERGIES:
        for noise in NOISES[energy]:
            cells = [ratio(energy, decay, noise, given.steps, given.weights) for decay in DECAYS]
            print(
                f"| {energy} | {noise:g} | "
                + " | ".join(f"{value:.3f} ± {error:.3f}" for value, error in cells)
                + " |",
                flush=True,
            )


if __name__ == "__main__":
    main()
