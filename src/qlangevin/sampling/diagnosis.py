"""Result of a diagnosis: figures of each parameter and of all, remedies, and the table that a terminal shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .step_variance import StepVariance

__all__ = ["HEAD", "MOST_SATURATED", "TOLERANCE", "Diagnosis", "ParameterDiagnosis", "Remedy", "Sums"]

TOLERANCE = 1.1  # inflation of the effective temperature that passes for none
MOST_SATURATED = 0.01  # share of weights at an end of the range
LEAST_NAMED = MOST_SATURATED  # share of weights that the verdict does not pass over: it lets as many saturate
SHOWN = 20  # parameters in a table


class Sums(NamedTuple):
    """Means over the weights that were measured, as sums over ``size`` weights, so that those of parameters add up."""

    size: float
    above: float
    below: float
    inflation: float
    resolution: float
    drift: float  # of δ²
    noise: float  # of v; with velocities of 2 lr T / N
    gap: float  # of Δ²

    @classmethod
    def of(cls, step: StepVariance, size: int) -> Sums:
        """Return the sums of a step, scaled to a parameter of ``size`` weights."""
        v = step.noise.double().clamp_min(1e-300)
        # without noise the ratios are infinite; see `ParameterDiagnosis`
        shares = (step.above, step.below, step.inflation, step.slope.abs() * step.gap / v)
        squares = (step.drift.double().square(), step.noise, step.gap.square())
        return cls(float(size), *(float(x.double().mean()) * size for x in (*shares, *squares)))

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def mean_inflation(self) -> float:
        """The mean of variance / v."""
        return self.inflation / self.size


@dataclass(frozen=True)
class ParameterDiagnosis:
    """Figures of one parameter, or of all; shares are of its weights.

    Where all noise comes by way of the velocity, as in SGHMC's splitting, a weight has no v of its own given its velocity, and
    ``above``, ``between`` and ``below`` are None.
    """

    name: str
    size: int
    """Weights."""
    format: str
    """Grid that takes the steps: of the accumulator if there is one, else of the weights."""
    above: float | None
    """Share with v > v_0 = Δ²/4: limited by the noise, any drift has the right variance."""
    between: float | None
    """Share with v_s <= v <= v_0: the corrected rounding has the right variance."""
    below: float | None
    """Share with v < v_s: limited by the grid, no unbiased rounding has as little variance as v."""
    inflation: float | None
    """Mean of the step's variance over v, by which the effective temperature is too high; None without noise."""
    resolution: float | None
    """Mean of Δ |∇U| / (2T), with minibatch noise in ∇U: above 1 the bits are too few at any small lr. None without noise."""
    drift: float | None
    """Drift of a step over the gap, both root mean squares; None without a grid."""
    noise: float | None
    """Standard deviation of the noise of a step over the gap, both root mean squares; None without a grid. That of SGHMC is
    what SGLD's would be, 2 lr T / N: most of it arrives later, by way of the velocity."""
    gap: float
    """Root mean square of Δ."""
    gap_over_width: float | None
    """Δ over the posterior's standard deviation, both root mean squares, where samples were given: up to 1/2 is fine."""
    saturated: float
    """Share of weights at an end of the range, where updates are clipped."""
    zero_gradients: float | None
    """Share of gradients that Q_G rounds to zero; None if gradients are not rounded."""
    suffices: str | None = None
    """Coarsest format, with the same range or blocks, in which this parameter would be sampled well; None if none is known."""
    kinetic: float | None = None
    """Mean square of SGHMC's velocities over T/N: rounding, minibatch noise and the length of the step together."""

    @classmethod
    def of(cls, name: str, format: str, sums: Sums, *, has_shares: bool = True, **more: Any) -> ParameterDiagnosis:
        """Return the figures of sums; without shares if v says nothing of the grid."""
        mean = Sums(*(x / sums.size if sums.size else 0.0 for x in sums))
        noisy = mean.noise > 0
        return cls(
            name=name,
            size=round(sums.size),
            format=format,
            above=mean.above if has_shares else None,
            between=max(0.0, 1 - mean.above - mean.below) if has_shares else None,
            below=mean.below if has_shares else None,
            inflation=mean.inflation if noisy else None,
            resolution=mean.resolution if noisy else None,
            drift=math.sqrt(mean.drift / mean.gap) if mean.gap else None,
            noise=math.sqrt(mean.noise / mean.gap) if mean.gap else None,
            gap=math.sqrt(mean.gap),
            **more,
        )


@dataclass(frozen=True)
class Remedy:
    """A change of settings, with the inflation that is left and the memory it takes."""

    kind: str
    """"bits", "block", "accumulator", "lr", "rounding", "range" or "velocity"."""
    settings: str
    """Arguments to write, such as ``weights="bfp12"``."""
    inflation: float | None
    """Inflation that is left over all weights; None if it is not known."""
    bytes_per_weight: float
    """Bytes a weight of the packed weights and the accumulator, without gradients."""
    note: str = ""

    def __str__(self) -> str:
        left = "" if self.inflation is None else f"inflation {self.inflation:.3g}, "
        return f"{self.settings}: {left}{self.bytes_per_weight:.2f} bytes a weight" + (
            f"; {self.note}" if self.note else ""
        )


@dataclass(frozen=True)
class Diagnosis:
    """Verdict on the bits for the noise: figures of each parameter and of all, and settings that would repair them."""

    parameters: tuple[ParameterDiagnosis, ...]
    total: ParameterDiagnosis
    advice: tuple[Remedy, ...]
    bytes_per_weight: float
    """Bytes a weight now, if the weights are packed."""
    tolerance: float = TOLERANCE
    """Inflation that passes for none."""

    @property
    def sufficient(self) -> bool:
        """True if the effective temperature is that asked for, up to the tolerance, and hardly a weight saturates."""
        return self._passes(self.total.inflation) and self.total.saturated <= MOST_SATURATED

    def _passes(self, inflation: float | None) -> bool:
        return inflation is None or 1 / self.tolerance <= inflation <= self.tolerance

    def _find_hidden(self) -> ParameterDiagnosis | None:
        """Return the parameter that is furthest from the temperature asked for, if the average over all weights hides it.

        None if all pass that have at least a hundredth of the weights.
        """
        large = [
            p for p in self.parameters if p.size >= LEAST_NAMED * self.total.size and not self._passes(p.inflation)
        ]
        return max(large, key=_distance) if large and self.sufficient else None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as numbers, texts and lists, for JSON."""
        return {**dataclasses.asdict(self), "sufficient": self.sufficient}

    @property
    def summary(self) -> str:
        """The verdict in a sentence or two."""
        t = self.total
        if t.inflation is None:
            return "Temperature 0: there is no noise for the grid to spoil; the chain is SGD."
        many = "" if t.below is None else f"; {t.below:.0%} of the weights are limited by the grid"
        if t.saturated > MOST_SATURATED:
            return f"The range does not suffice: {t.saturated:.1%} of the weights are at an end of it{many}."
        also = "" if t.kinetic is None else f" Velocities are at {t.kinetic:.3g} times the temperature asked for."
        if self.sufficient:
            found = f"The bits suffice: the effective temperature is {t.inflation:.3g} times the one asked for."
            return f"{found}{_describe_hidden(self._find_hidden())}{also}"
        found = f"the effective temperature is {t.inflation:.3g} times the one asked for{many}"
        return f"The bits do not suffice: {found}.{also}"

    def __str__(self) -> str:
        rows, left_out = self.rows()
        widths = [max(len(row[i]) for row in (HEAD, *rows)) for i in range(len(HEAD))]
        aligned = [str.ljust] * 2 + [str.rjust] * (len(HEAD) - 2)
        padded = [[pad(text, n) for pad, text, n in zip(aligned, row, widths, strict=True)] for row in (HEAD, *rows)]
        text = ["  ".join(row).rstrip() for row in padded]
        if left_out:
            text.insert(-1, f"... and {left_out} parameters with less inflation")
        return "\n".join([*text, "", self.summary, *(f"- {remedy}" for remedy in self.advice)])

    def rows(self, most: int = SHOWN) -> tuple[list[tuple[str, ...]], int]:
        """Return the cells of a table, the total last, and how many parameters were left out: those with the least inflation."""
        order = sorted(self.parameters, key=lambda p: -(p.inflation or 0.0))[:most]
        shown = [p for p in self.parameters if any(p is q for q in order)]
        return [_cells(p) for p in (*shown, self.total)], len(self.parameters) - len(shown)


HEAD = (
    "parameter", "format", "weights", "v>v0", "between", "v<v_s", "inflation", "resolution", "drift/gap", "noise/gap",
    "gap/width", "saturated", "zero grads", "suffices",
)  # fmt: skip


def _cells(p: ParameterDiagnosis) -> tuple[str, ...]:
    """Return one row of the table."""
    above, between, below, zeros = (_number(x, ".0%") for x in (p.above, p.between, p.below, p.zero_gradients))
    numbers = (_number(x, ".3g") for x in (p.inflation, p.resolution, p.drift, p.noise, p.gap_over_width))
    last = (f"{p.saturated:.1%}", zeros, p.suffices or "—")
    return (p.name, p.format, str(p.size), above, between, below, *numbers, *last)


def _number(x: float | None, format: str) -> str:
    return "—" if x is None else f"{x:{format}}"


def _distance(p: ParameterDiagnosis) -> float:
    """Return by which factor a parameter's effective temperature is off, to either side."""
    inflation = 1.0 if p.inflation is None else max(p.inflation, 1e-300)
    return max(inflation, 1 / inflation)


def _describe_hidden(p: ParameterDiagnosis | None) -> str:
    """Return the sentence about a parameter that the average hides; empty if there is none."""
    if p is None:
        return ""
    needs = "" if p.suffices is None else f", and needs {p.suffices}"
    return f" On average: {p.name} is at {p.inflation:.3g}{needs}."


def total_share(parts: Sequence[ParameterDiagnosis], name: str) -> float | None:
    """Return a share over all weights of the parameters that have it; None if none has."""
    known = [(p.size, getattr(p, name)) for p in parts if getattr(p, name) is not None]
    return sum(n * x for n, x in known) / sum(n for n, _ in known) if known else None
