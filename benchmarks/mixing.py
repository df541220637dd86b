"""Speed of mixing: effective samples for each gradient, in 8 bits, of SGLD, SGLD with RMS gains, and SGHMC.

    python -m benchmarks.mixing [--problems gaussian digits mnist] [--data-dir DIR] [--out FILE]

Three problems. A Gaussian in 16 dimensions, condition number 100: autocorrelation times are solved for, nothing is sampled. The
digits of scikit-learn with one hidden layer, and MNIST with logistic regression: four chains of each sampler from weights of
their own, as many gradients each, and of the log-likelihood of the training data R-hat and effective samples over all chains.
What is tuned is the learning rate, over three factors of 2.5: of the settings whose chains agree
best (R-hat at most 0.05 above the least) and whose mean loss is at most 10 % above the least of all, the one with the most
effective samples counts. Test data are not looked at.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.experiments.data import Data, load_dataset
from qlangevin.experiments.models import MLP, LogisticRegression

CHAINS = 4
RATES = (0.4, 1.0, 2.5)  # times the least lr of a sampler


class Problem(NamedTuple):
    """A posterior to sample."""

    name: str
    model: Callable[[], nn.Module]
    x: Tensor
    y: Tensor
    batch: int
    steps: int
    weights: str
    temperature: float
    weight_decay: float
    lr: float  # of SGLD, in the middle of its grid


class Setting(NamedTuple):
    """A sampler and its settings."""

    sampler: str
    lr: float
    friction: float | None = None


def settings_of(problem: Problem) -> Iterator[Setting]:
    """Yield all that is tried."""
    for rate in RATES:
        lr = problem.lr * rate
        yield Setting("SGLD", lr)
        yield Setting("RMS", lr / 50)
        yield Setting("SGHMC, exact", lr, 0.1)
        yield Setting("SGHMC, splitting", lr / 0.2, 0.1)


def make_sampler(setting: Setting, params: Any, problem: Problem, stream: int) -> Any:
    shared: dict[str, Any] = {
        "lr": setting.lr, "num_data": len(problem.x), "temperature": problem.temperature, "weights": problem.weights,
        "weight_decay": problem.weight_decay, "seed": 1, "stream": stream,
    }  # fmt: skip
    if setting.friction is not None:
        integrator: Any = setting.sampler.split(", ")[1]
        return ql.SGHMC(params, friction=setting.friction, integrator=integrator, **shared)
    if setting.sampler == "RMS":
        shared["preconditioner"] = ql.RMS(eps=1e-3, freeze_after=problem.steps // 4)
    return ql.SGLD(params, **shared)


def run_chain(problem: Problem, setting: Setting, chain: int) -> list[float]:
    """Return the log-likelihood of the training data, a number for each example, along the second half of a chain."""
    torch.manual_seed(chain)
    model = problem.model()
    sampler, loss = make_sampler(setting, model.parameters(), problem, chain), nn.CrossEntropyLoss()
    draw, traced = torch.Generator().manual_seed(100 + chain), []
    every = max(1, problem.steps // 400)
    for step in range(problem.steps):
        some = torch.randint(len(problem.x), (problem.batch,), generator=draw)
        sampler.zero_grad()
        loss(model(problem.x[some]), problem.y[some]).backward()
        sampler.step()
        if step >= problem.steps // 2 and step % every == 0:
            with torch.no_grad():
                traced.append(-float(loss(model(problem.x[:10_000]), problem.y[:10_000])))
    return traced


def judge(problem: Problem, setting: Setting) -> dict[str, Any]:
    """Return R-hat, effective samples and mean loss of a setting; None for chains that diverge."""
    begin = time.process_time()
    try:
        traces = torch.tensor([run_chain(problem, setting, chain) for chain in range(CHAINS)])
    except FloatingPointError:
        return {**setting._asdict(), "diverged": True}
    rhat, ess, _ = ql.diagnostics.summarize(traces).worst
    each = {"rhat": rhat, "ess": ess, "per_1000_gradients": 1000 * ess / (CHAINS * problem.steps / 2)}
    return {**setting._asdict(), **each, "loss": -float(traces.mean()), "seconds": time.process_time() - begin}


def choose(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the best setting of each sampler; see the top of this module."""
    good = [r for r in results if "ess" in r and math.isfinite(r["rhat"])]
    least = min(r["loss"] for r in good)
    fit = [r for r in good if r["loss"] <= 1.1 * least] or good
    chosen = []
    for name in dict.fromkeys(r["sampler"] for r in results):
        mine = [r for r in fit if r["sampler"] == name]
        if mine:
            agree = min(r["rhat"] for r in mine) + 0.05
            chosen.append(max((r for r in mine if r["rhat"] <= agree), key=lambda r: r["ess"]))
    return chosen


def digits() -> Problem:
    x, y = _tensors(load_dataset("digits", progress=False))
    return Problem("digits, one hidden layer", lambda: MLP(64, 10, 100), x, y, 50, 6000, "bfp8", 0.01, 1e-3, 0.1)


def mnist(folder: str | None) -> Problem:
    x, y = _tensors(load_dataset("mnist", None if folder is None else Path(folder), progress=False))
    return Problem(
        "MNIST, logistic regression", lambda: LogisticRegression(784, 10), x, y, 500, 3000, "bfp8", 1.0, 1e-4, 0.1
    )


def _tensors(data: Data) -> tuple[Tensor, Tensor]:
    x, y = data.train.__getitems__(list(range(len(data.train))))
    return x.flatten(1).float(), y


# ---- the Gaussian, exactly


def slowest(law: Any, step: Tensor) -> float:
    """Return the longest autocorrelation time of θ_i and θ_i² over all i, for a step z' = F z of each coordinate: (..., k, k).

    Of θ² it is 1 + 2 Σ ρ², ρ the autocorrelation of θ; θ alone would flatter chains that overshoot.
    """
    cov, longest = law, 0.0
    for i in range(len(step)):
        x, f = cov[i], step[i]
        rho, linear, square, power = 1.0, 1.0, 1.0, x
        for _ in range(200_000):
            power = f @ power
            rho = float(power[-1, -1] / x[-1, -1])
            linear, square = linear + 2 * rho, square + 2 * rho * rho
            if float(power.abs().max()) < 1e-7 * float(x.abs().max()):
                break
        longest = max(longest, linear, square)
    return longest


def gaussian_table(dims: int = 16, condition: float = 100.0) -> list[dict[str, Any]]:
    """Return the best autocorrelation time of each sampler over lr and friction; N = 1000."""
    heat, h = 1e-3, torch.logspace(-math.log10(condition), 0, dims, dtype=torch.float64)
    gain = 1 / (1e-6 + (h * heat).sqrt())  # of gradients in equilibrium
    found: dict[str, dict[str, Any]] = {}

    def offer(name: str, time_: float, **settings: float) -> None:
        if name not in found or time_ < found[name]["steps_per_sample"]:
            found[name] = {"sampler": name, "steps_per_sample": time_, **settings}

    for rate in (0.3, 0.6, 1.0, 1.4, 1.8):
        offer("SGLD", _overdamped(h * rate), lr=rate)
        lr = rate / float((h * gain).max())
        offer("RMS", _overdamped(h * gain * lr), lr=lr)
        for friction in (0.03, 0.1, 0.2, 0.3, 0.5, 1.0):
            offer("SGHMC, exact", _underdamped(h, rate, friction, "exact"), lr=rate, friction=friction)
            longer = rate / friction
            offer("SGHMC, splitting", _underdamped(h, longer, friction, "splitting"), lr=longer, friction=friction)
    return list(found.values())


def _overdamped(rates: Tensor) -> float:
    return slowest(torch.ones(len(rates), 1, 1, dtype=torch.float64), (1 - rates)[:, None, None])


def _underdamped(h: Tensor, lr: float, friction: float, integrator: Any) -> float:
    from qlangevin.sampling.underdamped import solve

    c, covariances, steps = solve(lr, friction, 1.0, 1.0, integrator), [], []
    for each in h.tolist():
        try:
            law = ql.theory.gaussian(torch.tensor([[each]]), 1, lr, friction=friction, update=integrator)
        except ValueError:
            return math.inf
        assert law.velocity is not None
        assert law.cross is not None
        covariances.append(
            torch.cat((torch.cat((law.velocity, law.cross), 1), torch.cat((law.cross, law.covariance), 1)))
        )
        steps.append(torch.tensor([[1 + c.fade, c.kick * each], [c.carry, 1 + c.push * each]], dtype=torch.float64))
    return slowest(torch.stack(covariances), torch.stack(steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["gaussian", "digits", "mnist"])
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=Path("results/mixing.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    if "gaussian" in options.problems:
        results["gaussian"] = gaussian_table()
        for row in results["gaussian"]:
            print(row, flush=True)
    for name in ("digits", "mnist"):
        if name not in options.problems:
            continue
        problem = digits() if name == "digits" else mnist(options.data_dir)
        tried = []
        for setting in settings_of(problem):
            tried.append(judge(problem, setting))
            print(name, tried[-1], flush=True)
        settings = {k: v for k, v in problem._asdict().items() if k not in ("model", "x", "y")}
        results[name] = {"tried": tried, "chosen": choose(tried), "settings": settings}
        for row in results[name]["chosen"]:
            print("chosen", row, flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
