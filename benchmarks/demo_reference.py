"""The reference of the demo's network: a long run of HMC in float64, stored as numbers with the package.

    python -m benchmarks.demo_reference [--draws N] [--out FILE]

Hamiltonian Monte Carlo with 100 leapfrog steps of random size and a Metropolis test, all data in each gradient. 32 chains
begin at draws of the prior, which unadjusted Langevin steps bring to where the posterior is. What is stored are mean, standard
deviation and quantiles of f(x) on the demo's grid, with the acceptance rate, the largest R-hat (split, and of ranks) and the
least effective sample size of f(x) over the grid.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qlangevin import diagnostics
from qlangevin.experiments.demo.reference import LEVELS, PATH
from qlangevin.experiments.demo.regression import GRID, Network, make_data

CHAINS, LEAPS, STEP, BURN_IN = 32, 100, 0.014, 0.2


def approach(model: Network, theta: Tensor, draw: torch.Generator, steps: int = 6000, alpha: float = 1e-4) -> Tensor:
    """Return the chains after unadjusted Langevin steps: at HMC's stepsize, trajectories from the prior are all rejected."""
    for _ in range(steps):
        noise = torch.randn(theta.shape, generator=draw, dtype=theta.dtype)
        theta = theta - alpha * len(model.x) * model.gradient(theta) + (2 * alpha) ** 0.5 * noise
    return theta


def propose(model: Network, theta: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the chains after one trajectory, and which were accepted."""
    n, p = len(model.x), torch.randn(theta.shape, generator=draw, dtype=theta.dtype)
    step = STEP * (0.7 + 0.6 * torch.rand(len(theta), 1, generator=draw, dtype=theta.dtype))
    q, before = theta, model.energy(theta) + p.square().sum(1) / 2
    p = p - step / 2 * n * model.gradient(q)
    for i in range(LEAPS):
        q = q + step * p
        p = p - (step if i < LEAPS - 1 else step / 2) * n * model.gradient(q)
    after = model.energy(q) + p.square().sum(1) / 2
    accepted = torch.rand(len(theta), generator=draw, dtype=theta.dtype).log() < before - after
    return torch.where(accepted[:, None], q, theta), accepted


def run(draws: int) -> dict[str, Any]:
    """Run all chains and return what is stored."""
    model, draw, begin = Network(*make_data()), torch.Generator().manual_seed(1), time.process_time()
    theta = approach(model, torch.randn(CHAINS, model.size, generator=draw, dtype=torch.float64), draw)
    values, rates = [], []
    for i in range(draws):
        theta, accepted = propose(model, theta, draw)
        if i >= BURN_IN * draws:
            values.append(model.predict(theta, GRID))
            rates.append(accepted.double().mean())
        if i % max(1, draws // 20) == 0:
            print(f"{i} of {draws}, U {float(model.energy(theta).mean()):.1f}", flush=True)
    f = torch.stack(values, 1)
    split, ranks = (diagnostics.summarize(f[:, :, ::5], method=method).worst for method in ("split", "rank"))
    flat = f.flatten(0, 1)
    return {
        "chains": CHAINS, "draws": f.shape[1], "leaps": LEAPS, "step": STEP, "acceptance": float(torch.stack(rates).mean()),
        "r_hat": split[0], "r_hat_ranks": ranks[0], "ess": split[1], "seconds": time.process_time() - begin,
        "mean": rounded(flat.mean(0)), "sd": rounded(flat.std(0)),
        "quantiles": [rounded(q) for q in torch.quantile(flat[:: max(1, len(flat) // 20_000)], LEVELS, 0)],
    }  # fmt: skip


def rounded(values: Tensor) -> list[float]:
    return [round(v, 5) for v in values.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1500)
    parser.add_argument("--out", type=Path, default=PATH)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run(options.draws)
    options.out.write_text(json.dumps(found) + "\n")
    print({name: value for name, value in found.items() if not isinstance(value, list)})


if __name__ == "__main__":
    main()
