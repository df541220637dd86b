"""Learning coefficients that are known, estimated in four formats, and by devinterp in two: a JSON file and a picture.

    OMP_NUM_THREADS=1 python -m benchmarks.llc_truths --out docs/results/llc

Every estimate is of 16 chains, which are rows of one tensor; its error is the standard error over them. devinterp, if it is
installed, takes the same steps in the same process. Loss and gradient are computed in float32 for all.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qlangevin as ql
from benchmarks.llc_problems import Problem, make_problems
from qlangevin.experiments.environment import environment

CHAINS = 16
OURS = ("fp32", "bf16", "bfp8", "bfp8/16")
THEIRS = ("fp32", "bf16")
COLOURS = {"fp32": "#7a7a7a", "bf16": "#0072b2", "bfp8": "#009e73", "bfp8/16": "#cc79a7"}


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


def measure(
    problem: Problem, library: str, make: Callable[..., Any], format: str, lr: float, seed: int, scale: float
) -> dict[str, Any]:
    """Run one row of the table."""
    steps, began = max(40, round(scale * problem.steps / lr)), time.perf_counter()
    params, sampler = make(problem, format, lr, seed)
    values = run(problem, params, sampler, steps)
    expected = problem.coefficient
    if problem.expected is not None:
        expected = problem.expected(lr, problem.nbeta, problem.localization)
    mean, error = float(values.mean()), float(values.std()) / math.sqrt(CHAINS)
    row = {
        "problem": problem.name, "library": library, "format": format, "lr": lr, "steps": steps, "weights": problem.size,
        "nbeta": problem.nbeta, "localization": problem.localization, "coefficient": problem.coefficient,
        "expected": expected, "llc": mean if math.isfinite(mean) else None,
        "stderr": error if math.isfinite(error) else None, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    name = f"{problem.name:40s} {library:10s} {format:8s} lr {lr:g}"
    print(f"{name}: {mean:9.3f} ± {error:.3f}, expected {expected:.3f}", flush=True)
    return row


def has_devinterp() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import devinterp.optim  # noqa: F401
        except ImportError:
            return False
    return True


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each estimate over the expected value against the stepsize, a panel for each problem."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["problem"] for row in rows))
    figure = Figure(figsize=(9, 2.7 * math.ceil(len(names) / 2)), layout="constrained")
    axes: Any = figure.subplots(math.ceil(len(names) / 2), 2, squeeze=False)
    for ax, name in zip(axes.flat, names, strict=False):
        mine = [row for row in rows if row["problem"] == name and row["llc"] is not None]
        kinds = list(dict.fromkeys((row["library"], row["format"]) for row in mine))
        for i, (library, format) in enumerate(kinds):
            some = [row for row in mine if (row["library"], row["format"]) == (library, format)]
            ax.errorbar(
                [row["lr"] * 1.04 ** (i - 2) for row in some], [row["llc"] / row["expected"] for row in some],
                [row["stderr"] / row["expected"] for row in some], color=COLOURS[format], ms=4, lw=1, capsize=2,
                fmt="o-" if library == "qlangevin" else "v--", label=f"{library} {format}",
            )  # fmt: skip
        ax.axhline(1, color="k", lw=0.8)
        ax.set(xscale="log", title=name, xlabel="lr (ε)", ylabel="estimate / expected")
        if max(row["llc"] / row["expected"] for row in mine) > 3:
            ax.set_yscale("log")
    axes[0, 0].legend(fontsize="x-small", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/llc"))
    parser.add_argument("--scale", type=float, default=1.0, help="steps, relative to those of the published table")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    kinds: list[tuple[str, Callable[..., Any], str]] = [("qlangevin", make_ours, format) for format in OURS]
    if has_devinterp():
        kinds += [("devinterp", make_theirs, format) for format in THEIRS]
    rows = [
        measure(problem, library, make, format, lr, options.seed, options.scale)
        for problem in make_problems()
        for lr in problem.lrs
        for library, make, format in kinds
    ]
    about = {"chains": CHAINS, "seed": options.seed, "scale": options.scale, "environment": environment()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "truths.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    draw(rows, options.out / "truths.png")


if __name__ == "__main__":
    main()
