"""Theorems 1, 2 and 3 compared with the chains: W2 to a standard Gaussian, U(θ) = θ²/2, in fixed point.

    bound      the bound of the theorem after infinitely many steps
    sharp      the same with the least variance of rounding that we can prove for Theorem 3, see `theory.bounds`
    exact      the distance of the stationary law of the chain, computed without sampling
    sampled    the distance of many parallel chains, started from the target as in Figure 1, with the same burn-in

For this target m = M = 1 and Ψ = 0, and gradients lie on the grid already: Δ_G = 0. There are two panels: W2 against
the stepsize in one format, and against the number of fractional bits at one stepsize. As α goes to 0 the distance of
naive SGLDLP-L grows like α^(-1/4) and its bound like α^(-1/2); with correction neither grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributions import Normal

from .. import theory
from .._validate import check_integer
from ..quantization import random
from ..quantization.formats import FixedPoint, parse
from ..quantization.random import Key
from . import gaussian

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

__all__ = ["BoundResult", "BoundRow", "BoundSettings", "draw", "run_bound", "terms"]

MAX_STEPSIZE = 1.0  # 2/(m + M)
CORRECTED = "VC SGLDLP-L"  # the method of Theorem 3
SHARP = f"{CORRECTED}, sharp"
GREY, DASHES = "#777777", (0, (5, 2.5))
DOTS: dict[str, Any] = {
    "marker": "o",
    "linestyle": "",
    "markersize": 6,
    "markeredgecolor": "#222222",
    "markeredgewidth": 0.7,
}


@dataclass(frozen=True)
class BoundSettings:
    """Theorems 1 to 3 beside the exact law and samples, for a standard Gaussian.

    Shows the 2-Wasserstein distance against the stepsize and against the number of fractional bits.
    """

    stepsizes: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
    """Stepsizes α of the first panel."""
    format: str = "fixed8.3"
    """Number format of the first panel: fixed point up to 12 bits. The theorems ignore that weights are clipped to its range."""
    frac: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    """Numbers of fractional bits of the second panel."""
    integer: int = 5
    """Bits before the point in the second panel, including the sign: fixed8.3 has 5."""
    stepsize: float = 1e-3
    """Stepsize of the second panel."""
    chains: int = 5000
    """Parallel chains; 0 for no sampling."""
    max_steps: int = 5000
    """Sample only where 4.5/α, burn-in included, is at most this many steps."""
    seed: int = 0
    """Seed of the random numbers."""

    def __post_init__(self) -> None:
        for name in ("stepsizes", "frac"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty; leave it out for the default")
        for alpha in (*self.stepsizes, self.stepsize):
            if not 0 < alpha <= MAX_STEPSIZE:
                raise ValueError(
                    f"stepsizes must be above 0 and at most 2/(m + M) = 1, as the theorems ask, got {alpha}"
                )
        check_integer("integer", self.integer, 1)
        for frac in self.frac:
            check_integer("frac", frac, 0)
        for format, _ in self.cases:
            theory.grid(format)
            if parse(format).step is None:
                raise ValueError(
                    f"format must be fixed point, such as fixed8.3, for the gap to be a constant, got {format}"
                )
        if self.chains != 0:
            check_integer("chains", self.chains, 2)
        check_integer("max_steps", self.max_steps, 0)
        Key(self.seed)

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of the second panel."""
        return tuple(f"fixed{self.integer + frac}.{frac}" for frac in self.frac)

    @property
    def cases(self) -> tuple[tuple[str, float], ...]:
        """(format, stepsize) of both panels, each once."""
        pairs = [(self.format, alpha) for alpha in self.stepsizes] + [(name, self.stepsize) for name in self.formats]
        return tuple(dict.fromkeys(pairs))

    def sampling(self, format: str, alpha: float) -> gaussian.GaussianSettings | None:
        """Return the settings for sampling a case; None if it is not sampled."""
        if self.chains == 0 or 4.5 / alpha > self.max_steps:
            return None
        low, high = Key(self.seed).fold(self.cases.index((format, alpha))).bits  # each case has its own random stream
        return gaussian.GaussianSettings((alpha,), format, self.chains, seed=low | high << 32)

    @property
    def gap(self) -> float:
        """Δ_W of the first panel."""
        return _fixed(self.format).step

    @property
    def total_steps(self) -> int:
        return sum(how.total_steps for case in self.cases if (how := self.sampling(*case)))


@dataclass(frozen=True)
class BoundRow:
    """W2 of one method in one format at one stepsize; None where it is not known exactly, or was not sampled.

    ``sharp`` is of Theorem 3 only.
    """

    format: str
    frac: int
    stepsize: float
    method: str
    bound: float
    sharp: float | None
    exact: float | None
    sampled: float | None
    steps: int | None


@dataclass(frozen=True)
class BoundResult:
    """The rows, and the W2 of as many draws from the target as there are chains, the least that sampling can resolve."""

    settings: BoundSettings
    rows: tuple[BoundRow, ...]
    resolution: float | None


def run_bound(settings: BoundSettings, progress: Callable[[str, int], None] = lambda label, steps: None) -> BoundResult:
    """Compute bound, exact and sampled distances. ``progress`` receives a label and the number of steps just taken."""
    rows: list[BoundRow] = []
    for format, alpha in settings.cases:
        how = settings.sampling(format, alpha)
        sampled = {row.method: row for row in gaussian.run_gaussian(how, progress).rows} if how else {}
        rows += [_row(format, alpha, method, sampled.get(method)) for method in gaussian.METHODS]
    return BoundResult(settings, tuple(rows), _resolution(settings) if settings.total_steps else None)


def _row(format: str, alpha: float, method: str, sampled: gaussian.GaussianRow | None) -> BoundRow:
    fixed = _fixed(format)
    known = (sampled.exact_variance, sampled.exact_w2) if sampled else gaussian.exact(method, alpha, format)
    return BoundRow(
        format=format,
        frac=fixed.frac,
        stepsize=alpha,
        method=method,
        bound=limit(method, alpha, fixed.step),
        sharp=limit(method, alpha, fixed.step, "sharp") if method == CORRECTED else None,
        exact=_distance(method, known),
        sampled=sampled.w2 if sampled else None,
        steps=sampled.steps if sampled else None,
    )


def limit(method: str, alpha: float, gap: float, theorem3: theory.Theorem3 = "corrected") -> float:
    """Return the theorem's bound after infinitely many steps."""
    constants = theory.Constants(1.0, 1.0, gradient=mean_gradient(alpha, gap))
    return theory.bound(method, constants, alpha, gap, theorem3=theorem3).floor


def mean_gradient(alpha: float, gap: float) -> float:
    """Return G, an upper bound of E|θ| in every step of VC SGLDLP-L that starts from the target.

    E|θ| ≤ √S, and S = E[θ²] becomes (1-α)² S + E[max(2α, v_s)] ≤ (1-α)² S + 2α + αΔ√S: so √S never exceeds the root of
    (2 - α) S = 2 + Δ√S.
    """
    return (gap + math.sqrt(gap * gap + 8 * (2 - alpha))) / (2 * (2 - alpha))


def _distance(method: str, known: gaussian.Exact) -> float | None:
    """Return W2 of the stationary law. That of SGLDLP-F is N(0, V), as far as V is known, at a distance of |√V - 1|."""
    variance, w2 = known
    return abs(math.sqrt(variance) - 1) if method == "SGLDLP-F" and variance is not None else w2


def _resolution(settings: BoundSettings, times: int = 16) -> float:
    """Return the root mean square W2 of as many independent draws as there are chains, over some repetitions."""
    draws = random.normal(Key(settings.seed), times * settings.chains).double().view(times, -1).sort().values
    share = torch.full_like(draws[0], 1 / settings.chains)
    return math.sqrt(sum(theory.wasserstein2(row, share, Normal(0.0, 1.0)) ** 2 for row in draws) / times)


def _fixed(name: str) -> FixedPoint:
    format = parse(name)
    assert isinstance(format, FixedPoint)  # Settings has seen to it
    return format


def terms(
    constants: theory.Constants,
    stepsize: float,
    weight_gap: float,
    gradient_gap: float = 0.0,
    steps: int | None = None,
    start: float = 0.0,
) -> dict[str, theory.Bound]:
    """Return the bounds of all three methods, term by term, Theorem 3 also sharp; the arguments are those of `theory.bound`."""
    arguments = (constants, stepsize, weight_gap, gradient_gap, steps, start)
    each = {name: theory.bound(name, *arguments) for name in gaussian.METHODS}
    return {**each, SHARP: theory.bound(CORRECTED, *arguments, theorem3="sharp")}


def draw(result: BoundResult, path: Path) -> None:
    """Draw bounds as dashed lines, exact distances as solid ones, samples as dots, a colour for each method."""
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    settings, rows = result.settings, result.rows
    figure = Figure(figsize=(11, 5.4), layout="constrained", dpi=160)
    left, right = figure.subplots(1, 2, sharey=True)
    figure.suptitle("Distance to a standard Gaussian: what the theorems allow, and what the chains do", fontsize=13)
    for method in gaussian.METHODS:
        _draw_by_stepsize(left, result, method)
        _draw_by_bits(right, result, method)
    left.set(xscale="log", xlabel="stepsize α", ylabel="2-Wasserstein distance")
    left.set_title(f"in {settings.format}", fontsize=11)
    right.set_xlabel("fractional bits F, Δ = 2$^{-F}$")
    right.set_title(f"at α = {settings.stepsize:g}, with {settings.integer} bits before the point", fontsize=11)
    right.xaxis.get_major_locator().set_params(integer=True)
    least = min(row.exact for row in rows if row.exact and row.method != "SGLDLP-F")  # which falls like α/4
    for ax in (left, right):
        ax.set(yscale="log", ylim=(min(1e-4, least / 2), 2.5 * max(row.bound for row in rows)))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25, linewidth=0.6)
        if result.resolution is not None:
            ax.axhline(result.resolution, color=GREY, linewidth=1, linestyle=":", zorder=1)
    handles = _legend(result)
    columns = (len(handles) + 1) // 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9.5)
    figure.savefig(path)


def _draw_by_stepsize(ax: Axes, result: BoundResult, method: str) -> None:
    """Draw one method in the first panel."""
    settings = result.settings
    gap, low, high = settings.gap, min(settings.stepsizes), max(settings.stepsizes)
    alphas = [min(high, low * (high / low) ** (k / 400)) for k in range(401)]
    here = {row.stepsize: row for row in result.rows if row.method == method and row.format == settings.format}
    _draw_curves(ax, method, alphas, [limit(method, alpha, gap) for alpha in alphas], settings.stepsizes, here)
    if method == CORRECTED:
        _draw_sharp(ax, alphas, [limit(method, alpha, gap, "sharp") for alpha in alphas])
        if low < gap * gap / 8 < high:
            _mark(ax, gap * gap / 8, limit(method, gap * gap / 7.99, gap))


def _draw_by_bits(ax: Axes, result: BoundResult, method: str) -> None:
    """Draw one method in the second panel."""
    settings = result.settings
    alpha, low, high = settings.stepsize, min(settings.frac), max(settings.frac)
    bits = [low + (high - low) * k / 400 for k in range(401)]
    rows = [row for row in result.rows if row.method == method and row.stepsize == alpha]
    here = {float(row.frac): row for row in rows if row.format in settings.formats}
    _draw_curves(ax, method, bits, [limit(method, alpha, 2.0**-frac) for frac in bits], settings.frac, here)
    if method == CORRECTED:
        _draw_sharp(ax, bits, [limit(method, alpha, 2.0**-frac, "sharp") for frac in bits])
        if low < (frac := -math.log2(8 * alpha) / 2) < high:
            _mark(ax, frac, limit(method, alpha, 2.0 ** -(frac + 1e-3)))


def _draw_sharp(ax: Axes, x: list[float], allowed: list[float]) -> None:
    """Draw the sharp form of Theorem 3."""
    ax.plot(x, allowed, color=gaussian.COLOURS[CORRECTED], linewidth=1.2, linestyle=":")


def _mark(ax: Axes, x: float, y: float) -> None:
    """Mark where Q^vc, and with it Theorem 3, changes from one case to the other."""
    ax.text(x, 1.2 * y, "2α = Δ²/4", ha="center", va="bottom", fontsize=8.5, color=gaussian.COLOURS["VC SGLDLP-L"])


def _draw_curves(
    ax: Axes, method: str, x: list[float], allowed: list[float], places: Sequence[float], rows: Mapping[float, BoundRow]
) -> None:
    """Draw the bound, known everywhere, and the distances known at some points; a missing number leaves a gap."""
    colour, at = gaussian.COLOURS[method], sorted(places)
    ax.plot(x, allowed, color=colour, linewidth=1.4, linestyle=DASHES)
    ax.plot(at, [_or_nan(rows[place].exact) for place in at], color=colour, linewidth=2.2)
    ax.plot(at, [_or_nan(rows[place].sampled) for place in at], color=colour, zorder=3, **DOTS)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _legend(result: BoundResult) -> list[Line2D]:
    """Return the legend: colours in the upper row, kinds of lines in the lower."""
    from matplotlib.lines import Line2D

    names = [
        Line2D([], [], color=gaussian.COLOURS[name], linewidth=4, label=f"{name}, Theorem {number}")
        for number, name in enumerate(gaussian.METHODS, 1)
    ]
    theorem = Line2D([], [], color=GREY, linewidth=1.4, linestyle=DASHES, label="theorem, after infinitely many steps")
    sharp = Line2D([], [], color=gaussian.COLOURS[CORRECTED], linewidth=1.2, linestyle=":", label="Theorem 3, sharp")
    law = Line2D([], [], color=GREY, linewidth=2.2, label="exact stationary law")
    if result.resolution is None:
        return [names[0], theorem, names[1], law, names[2], sharp]
    dots = Line2D([], [], color=GREY, **DOTS, label=f"sampled, {result.settings.chains} chains")
    draws = Line2D([], [], color=GREY, linewidth=1, linestyle=":", label="as many draws from the target itself")
    return [names[0], theorem, names[1], law, names[2], dots, sharp, draws]
