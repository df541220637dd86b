"""Learning coefficients that are known, estimated in four formats, and by devinterp in two: a JSON file, a table and a picture.

    OMP_NUM_THREADS=1 python -m benchmarks.llc_truths --out docs/results/llc

Every estimate is of 16 chains, which are rows of one tensor; its error is the standard error over them. devinterp, if it is
installed, takes the same steps in the same process. Loss and gradient are computed in float32 for all.

An estimate at finite (ε, nβ, γ) is not λ. It is compared with what a chain without rounding has there: a formula for quadratic
losses, and for the others the mean over many chains in float64 that are simulated here, without either library.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qlangevin as ql
from benchmarks.llc_picture import draw, write_table
from benchmarks.llc_problems import Problem, make_problems
from qlangevin.experiments.environment import environment

CHAINS = 16
SIMULATED = 12  # times as many weights and chains as an estimate has
OURS = ("fp32", "bf16", "bfp8", "bfp8/16")
THEIRS = ("fp32", "bf16")


def make_parameters(problem: Problem, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return w* for each chain, chains below one another."""
    return [nn.Parameter(w.repeat(CHAINS, 1).to(dtype)) for w in problem.minimum]


def make_ours(problem: Problem, format: str, lr: float, seed: int) -> tuple[list[nn.Parameter], Any]:
    settings = ql.slt.Settings(lr, problem.nbeta, problem.localization, num_data=10**6, seed=seed)
    params = make_parameters(problem, torch.float32)
    center = [p.detach().clone() for p in params]
    return params, settings.make_sampler(params, weights=format, center=center)


def make_theirs(problem: Problem, format: str, lr: float, seed: int) -> tuple[list[nn.Parameter], Any]:
    from devinterp.optim import SGMCMC

    torch.manual_seed(seed)
    params = make_parameters(problem, torch.bfloat16 if format == "bf16" else torch.float32)
    return params, SGMCMC.sgld(params, lr=lr, nbeta=problem.nbeta, localization=problem.localization)


def run(problem: Problem, params: Sequence[nn.Parameter], sampler: Any, steps: int) -> Tensor:
    """Return nβ K of each chain, the mean over the second half of the steps."""
    total = torch.zeros(CHAINS, dtype=torch.float64)
    for step in range(steps):
        excess = problem.excess([p.float().unflatten(0, (CHAINS, -1)) for p in params])
        excess.sum().backward()
        if step >= steps // 2:
            total += excess.detach().double()
        sampler.step()
        sampler.zero_grad()
    return problem.nbeta * total / (steps - steps // 2)


def simulate(problem: Problem, lr: float, steps: int, seed: int) -> tuple[float, float]:
    """Return E[nβ K] and its standard error, by w' = w - ε/2 (nβ ∇K + γ (w - w*)) + N(0, ε) in float64."""
    chains, generator = CHAINS * SIMULATED, torch.Generator().manual_seed(10_000 + seed)
    centers = [w.double().expand(chains, *w.shape) for w in problem.minimum]
    params = [c.clone().requires_grad_() for c in centers]
    total = torch.zeros(chains, dtype=torch.float64)
    for step in range(steps):
        excess = problem.excess(params)
        gradients = torch.autograd.grad(excess.sum(), params)
        if step >= steps // 2:
            total += excess.detach()
        with torch.no_grad():
            for p, center, gradient in zip(params, centers, gradients, strict=True):
                pull = problem.nbeta * gradient + problem.localization * (p - center)
                noise = torch.randn(p.shape, dtype=torch.float64, generator=generator)
                p.add_(pull, alpha=-lr / 2).add_(noise, alpha=math.sqrt(lr))
    values = problem.nbeta * total / (steps - steps // 2)
    return float(values.mean()), float(values.std()) / math.sqrt(chains)


def expect(problem: Problem, lr: float, seed: int, scale: float) -> dict[str, Any]:
    """Return λ, and what a chain without rounding has at this stepsize."""
    about = {"coefficient": problem.coefficient, "at_zero_lr": None}
    if problem.at_zero_lr is not None:
        about["at_zero_lr"] = problem.at_zero_lr(problem.nbeta, problem.localization)
    if problem.expected is not None:
        return {**about, "expected": problem.expected(lr, problem.nbeta, problem.localization), "expected_stderr": 0.0}
    mean, error = simulate(problem, lr, count_steps(problem, lr, scale), seed)
    return {**about, "expected": mean, "expected_stderr": error}


def count_steps(problem: Problem, lr: float, scale: float) -> int:
    return max(40, round(scale * problem.steps / lr))


def measure(
    problem: Problem, library: str, format: str, lr: float, seed: int, scale: float, expected: dict[str, Any]
) -> dict[str, Any]:
    """Run one row of the table."""
    steps, began = count_steps(problem, lr, scale), time.perf_counter()
    params, sampler = (make_ours if library == "qlangevin" else make_theirs)(problem, format, lr, seed)
    values = run(problem, params, sampler, steps)
    mean, error = float(values.mean()), float(values.std()) / math.sqrt(CHAINS)
    row = {
        "problem": problem.name, "library": library, "format": format, "lr": lr, "steps": steps, "weights": problem.size,
        "nbeta": problem.nbeta, "localization": problem.localization, **expected,
        "llc": mean if math.isfinite(mean) else None, "stderr": error if math.isfinite(error) else None,
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    name = f"{problem.name:40s} {library:10s} {format:8s} lr {lr:g}"
    print(f"{name}: {mean:9.3f} ± {error:.3f}, expected {expected['expected']:.3f}", flush=True)
    return row


def has_devinterp() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import devinterp.optim  # noqa: F401
        except ImportError:
            return False
    return True


def measure_problem(
    problem: Problem, kinds: Sequence[tuple[str, str]], seed: int, scale: float
) -> list[dict[str, Any]]:
    """Run all rows of a problem."""
    rows = []
    for lr in problem.lrs:
        expected = expect(problem, lr, seed, scale)
        rows += [measure(problem, library, format, lr, seed, scale, expected) for library, format in kinds]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/llc"))
    parser.add_argument("--scale", type=float, default=1.0, help="steps, relative to those of the published table")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    kinds = [("qlangevin", format) for format in OURS]
    if not has_devinterp():
        print("devinterp is not installed: the table has no rows of its estimates")
    else:
        kinds += [("devinterp", format) for format in THEIRS]
    rows = [row for problem in make_problems() for row in measure_problem(problem, kinds, options.seed, options.scale)]
    about = {"chains": CHAINS, "seed": options.seed, "scale": options.scale, "environment": environment()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "truths.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    (options.out / "truths.md").write_text(write_table(rows))
    draw(rows, options.out / "truths.png")


if __name__ == "__main__":
    main()
