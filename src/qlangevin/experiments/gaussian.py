"""Figure 1 of the paper: three variants of low-precision SGLD on a standard Gaussian, U(θ) = θ²/2, in 8-bit fixed point.

    SGLDLP-F         θ' = θ - α Q^s(θ) + √(2α) ξ            θ in full precision
    naive SGLDLP-L   θ' = Q^s(θ - αθ + √(2α) ξ)             θ on the grid
    VC SGLDLP-L      θ' = Q^vc(θ - αθ, 2α)                  θ on the grid

The gradient of U is the weight itself and lies on the grid already, so that Q_G changes nothing. The samples are θ; for
SGLDLP-F that is the accumulator, the subject of Theorem 1.

Many chains run in parallel as one tensor. They start as draws from the target, rounded to the grid. SGLDLP-F and VC SGLDLP-L
should stay there, so that only the naive chains need a burn-in: the influence of the start on their variance falls as
exp(-2αk), and the default burn-in of 3/α steps leaves 0.2 % of it, far less than a standard error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.distributions import Normal

from .. import theory
from ..distributed.ranks import ALONE, Ranks, agree, gather
from ..quantization import operators, random
from ..quantization.formats import FP32, Format, parse
from ..quantization.laws import Mean
from ..quantization.operators import corrected, quantize
from ..quantization.random import Key

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["METHODS", "GaussianResult", "GaussianRow", "GaussianSettings", "draw", "run_gaussian"]

RECORDS = 200  # times that a chain is recorded at least, if it is that long; more add little, as successive ones are correlated
MAX_STEPS = 10**8

Step: TypeAlias = Callable[[Tensor, float, Tensor, Format, Key], Tensor]  # (θ, α, 2α, format, key) -> θ'
Exact: TypeAlias = tuple[float | None, float | None]  # variance and W2


def sgldlp_f(theta: Tensor, alpha: float, variance: Tensor, format: Format, key: Key) -> Tensor:
    """Step SGLDLP-F: θ' = θ - α Q^s(θ) + √(2α) ξ."""
    weights = quantize(theta, format, "stochastic", key)
    return corrected(theta - alpha * weights, variance, FP32, key)  # on float32 Q^vc only adds the noise


def naive_sgldlp_l(theta: Tensor, alpha: float, variance: Tensor, format: Format, key: Key) -> Tensor:
    """Step naive SGLDLP-L: θ' = Q^s(θ - αθ + √(2α) ξ)."""
    move = corrected(-alpha * theta, variance, FP32, key)
    return operators.draw(Mean(theta, move), torch.zeros(()), format, key)


def vc_sgldlp_l(theta: Tensor, alpha: float, variance: Tensor, format: Format, key: Key) -> Tensor:
    """Step VC SGLDLP-L: θ' = Q^vc(θ - αθ, 2α)."""
    return operators.draw(Mean(theta, -alpha * theta), variance, format, key)


METHODS: dict[str, Step] = {"SGLDLP-F": sgldlp_f, "naive SGLDLP-L": naive_sgldlp_l, "VC SGLDLP-L": vc_sgldlp_l}


@dataclass(frozen=True)
class GaussianSettings:
    """Figure 1: SGLDLP-F, naive SGLDLP-L and VC SGLDLP-L on a standard Gaussian.

    Samples each method with many parallel chains and compares with the exact stationary law.
    """

    stepsizes: tuple[float, ...] = (1e-3, 1e-4)
    """Stepsizes α; each is a row of the picture."""
    format: str = "fixed8.3"
    """Number format of the weights: fixed point up to 12 bits, or a small float such as e4m3."""
    chains: int = 10_000
    """Parallel chains."""
    steps: int | None = None
    """Steps of each chain, burn-in included (at most two thirds); by default 4.5/α, of which 3/α are burn-in."""
    seed: int = 0
    """Seed of the random numbers."""
    full: bool = False
    """Four times the chains and five times the steps: minutes instead of seconds, standard errors a fifth."""

    def __post_init__(self) -> None:
        theory.grid(self.format)
        Key(self.seed)
        if not self.stepsizes:
            raise ValueError("stepsizes must not be empty; give for example 1e-3 1e-4")
        for alpha in self.stepsizes:
            if not 0 < alpha < 2:
                raise ValueError(
                    f"stepsizes must be above 0 and below 2, where SGLD is stable on this target, got {alpha}"
                )
            if self.steps is None and 4.5 / alpha > MAX_STEPS:
                raise ValueError(
                    f"stepsize {alpha} would take {4.5 / alpha:.1e} steps to converge; give the number of steps"
                )
        if self.chains < 2:
            raise ValueError(f"chains must be at least 2, for a standard error, got {self.chains}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    @property
    def parallel(self) -> int:
        """Number of chains that run."""
        return self.chains * (4 if self.full else 1)

    def schedule(self, alpha: float) -> tuple[int, int]:
        """Return (all steps, those of burn-in) at stepsize α."""
        burn_in, rest = math.ceil((5 if self.full else 3) / alpha), math.ceil((17.5 if self.full else 1.5) / alpha)
        if self.steps is None:
            return burn_in + rest, burn_in
        steps = self.steps * (5 if self.full else 1)
        return steps, min(burn_in, steps * 2 // 3)

    @property
    def total_steps(self) -> int:
        """Steps of all methods at all stepsizes, of one chain each."""
        return sum(self.schedule(alpha)[0] for alpha in self.stepsizes) * len(METHODS)


@dataclass(frozen=True)
class GaussianRow:
    """Figures of one method at one stepsize. The exact ones are those of its stationary law, None where it is not known."""

    stepsize: float
    method: str
    variance: float
    standard_error: float
    exact_variance: float | None
    w2: float
    exact_w2: float | None
    steps: int
    burn_in: int
    chain_steps: int
    seconds: float

    @property
    def z(self) -> float | None:
        """(sampled - exact) / standard error of the variance."""
        if self.exact_variance is None or self.standard_error == 0:
            return None
        return (self.variance - self.exact_variance) / self.standard_error


@dataclass(frozen=True, eq=False)
class GaussianResult:
    """The rows, and for each the share of the samples that are nearest to each point of the grid."""

    settings: GaussianSettings
    points: Tensor
    rows: tuple[GaussianRow, ...]
    shares: tuple[Tensor, ...]


def run_gaussian(
    settings: GaussianSettings,
    progress: Callable[[str, int], None] = lambda label, steps: None,
    ranks: Ranks = ALONE,
) -> GaussianResult:
    """Sample all methods at all stepsizes. ``progress`` receives a label and the number of steps just taken.

    Several ranks share the rows, and all of them return all rows. The numbers do not depend on the number of ranks.
    """
    points = theory.grid(settings.format)
    # The first call of an operator takes a second, which must not count as the sampler's.
    quantize(torch.zeros(1), settings.format)
    cases = [(alpha, name) for alpha in settings.stepsizes for name in METHODS]
    found: dict[int, tuple[GaussianRow, Tensor]] = {}
    if ranks.size > 1:
        agree({f.name: getattr(settings, f.name) for f in fields(GaussianSettings)}, ranks.group)
    for i in range(ranks.rank, len(cases), ranks.size):
        alpha, name = cases[i]
        known = exact(name, alpha, settings.format)
        before = time.perf_counter()
        samples = _sample(name, alpha, settings, Key(settings.seed).fold(i), progress)
        seconds = time.perf_counter() - before
        found[i] = _summarize(name, alpha, settings, samples, known, seconds), _shares(samples, points)
    if ranks.size > 1:
        ranks.wait(patient=True)  # some ranks have more to do than others
        found = _gather_rows(found, ranks)
    rows, shares = zip(*(found[i] for i in range(len(cases))), strict=True)
    return GaussianResult(settings, points, rows, shares)


def _gather_rows(mine: dict[int, tuple[GaussianRow, Tensor]], ranks: Ranks) -> dict[int, tuple[GaussianRow, Tensor]]:
    """Return the numbered rows of all ranks, with the shares of each."""
    sent = {i: (asdict(row), shares.tolist()) for i, (row, shares) in mine.items()}
    received = {int(i): case for part in gather(sent, ranks.group) for i, case in part.items()}
    return {i: (GaussianRow(**row), torch.tensor(s, dtype=torch.float64)) for i, (row, s) in received.items()}


def _sample(
    name: str, alpha: float, settings: GaussianSettings, key: Key, progress: Callable[[str, int], None]
) -> Tensor:
    """Return the chains after burn-in, at evenly spaced times, from `RECORDS` to nearly twice as many: (times, chains)."""
    format, step = parse(settings.format), METHODS[name]
    variance = torch.tensor(2 * alpha)
    theta = quantize(random.normal(key, settings.parallel), format, "nearest")
    steps, burn_in = settings.schedule(alpha)
    every, tick = max(1, (steps - burn_in) // RECORDS), max(1, steps // 100)
    records = []
    for k in range(1, steps + 1):
        theta = step(theta, alpha, variance, format, key.at(k))
        if k > burn_in and (steps - k) % every == 0:
            records.append(theta)
        if k % tick == 0 or k == steps:
            progress(f"{name}, α = {alpha:g}", tick if k % tick == 0 else steps % tick)
    return torch.stack(records)


def _summarize(
    name: str, alpha: float, settings: GaussianSettings, samples: Tensor, known: Exact, seconds: float
) -> GaussianRow:
    """Return the row of one method: variance and W2 of its samples beside the exact ones."""
    samples = samples.double()
    values, counts = torch.unique(samples, return_counts=True)
    of_chains = (samples - samples.mean()).square().mean(0)  # chains are independent, the moments of one chain are not
    steps, burn_in = settings.schedule(alpha)
    return GaussianRow(
        stepsize=alpha,
        method=name,
        variance=float(of_chains.mean()),
        standard_error=float(of_chains.std()) / math.sqrt(settings.parallel),
        exact_variance=known[0],
        w2=theory.wasserstein2(values, counts.double() / samples.numel(), Normal(0.0, 1.0)),
        exact_w2=known[1],
        steps=steps,
        burn_in=burn_in,
        chain_steps=steps * settings.parallel,
        seconds=seconds,
    )


def exact(name: str, alpha: float, format: str) -> Exact:
    """Return variance and W2 of the stationary law of a method, as far as they are known exactly."""
    if name == "SGLDLP-F":
        return accumulator_variance(format, alpha), None
    law = theory.stationary(format, alpha, "corrected" if name == "VC SGLDLP-L" else "stochastic")
    return law.variance, law.w2


def accumulator_variance(format: Format | str, alpha: float) -> float | None:
    """Return the stationary variance of SGLDLP-F: V = (1-α)² V + α² E[v_s] + 2α.

    A full-precision accumulator has no finite grid. But on fixed point E[v_s] = Δ²/6, up to exp(-2π²/Δ²), because θ is
    spread evenly over a gap. Range and gap must be such that neither clipping nor that last term counts; else None.
    """
    format = parse(format)
    if format.step is None or format.high <= 8 or format.step > 0.5:
        return None
    return (2 + alpha * format.step**2 / 6) / (2 - alpha)


def _shares(samples: Tensor, points: Tensor) -> Tensor:
    """Return the share of the samples nearest to each point."""
    cells = torch.bucketize(samples.flatten(), ((points[1:] + points[:-1]) / 2).float())
    return torch.bincount(cells, minlength=len(points)).double() / samples.numel()


COLOURS = {"SGLDLP-F": "#8fa3bf", "naive SGLDLP-L": "#e58a62", "VC SGLDLP-L": "#5aa88b"}


def draw(result: GaussianResult, path: Path) -> None:
    """Draw a row for each stepsize and a column for each method, the samples as bars and the target as a line."""
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    settings = result.settings
    figure = Figure(figsize=(11, 1.1 + 2.5 * len(settings.stepsizes)), layout="constrained", dpi=160)
    axes = figure.subplots(len(settings.stepsizes), len(METHODS), sharex=True, sharey=True, squeeze=False)
    figure.suptitle(f"SGLD on a standard Gaussian with weights in {settings.format}", fontsize=13)
    for row, shares, ax in zip(result.rows, result.shares, axes.flat, strict=True):
        _panel(ax, row, result.points, shares)
    reach = 3 * math.sqrt(max(1.0, *(row.variance for row in result.rows)))
    for line, alpha in zip(axes, settings.stepsizes, strict=True):
        line[0].set_ylabel(f"α = {alpha:g}", fontsize=12)
        line[0].set(xlim=(-reach, reach), ylim=(0, 0.47))
    for ax in axes[-1]:
        ax.set_xlabel("θ")
    axes[0, 0].legend(frameon=False, fontsize=9, loc="upper left", handlelength=1.2)
    figure.savefig(path)


def _panel(ax: Axes, row: GaussianRow, points: Tensor, shares: Tensor) -> None:
    """Draw one histogram as a density: a grid point stands for the cell of numbers nearest to it."""
    middle = (points[1:] + points[:-1]) / 2
    width = torch.cat((2 * points[:1] - middle[:1], middle, 2 * points[-1:] - middle[-1:])).diff()
    x, height, wide = (t[shares > 0].numpy() for t in (points, shares / width, 0.85 * width))
    ax.bar(x, height, wide, color=COLOURS[row.method], label="samples")
    t = torch.linspace(-20, 20, 2001)
    density = (-0.5 * t * t).exp() / math.sqrt(2 * math.pi)
    ax.plot(t.numpy(), density.numpy(), color="#222222", linewidth=1.3, label="target N(0, 1)")
    exact = "" if row.exact_variance is None else f" (exact {row.exact_variance:.3f})"
    ax.set_title(f"{row.method}\nvariance {row.variance:.3f} ± {row.standard_error:.3f}{exact}", fontsize=10.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
