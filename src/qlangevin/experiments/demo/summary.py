"""The demo in words and tables: three sentences, and the figures they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..gaussian import GaussianResult
from .bands import Band
from .scores import Scored, compare

__all__ = ["BAND_HEAD", "DIGITS_HEAD", "VERDICT_HEAD", "band_rows", "digits_rows", "sentences", "verdict_rows"]

DECIDED = 2.0  # standard errors beyond which a difference counts
NAMES = {"error": "error", "nll": "NLL", "ece": "ECE", "auroc": "AUROC"}
BAND_HEAD = ("model, sampler", "width / reference", "coverage (should be 95 %)")
DIGITS_HEAD = ("method", "B/weight", "stored", "time", "R-hat", "error, %", "NLL", "ECE, %", "AUROC")
VERDICT_HEAD = ("corrected, against", "error, %", "NLL", "ECE, %", "AUROC")


class Verdict(NamedTuple):
    """A difference of a score, its standard error, and the word for it."""

    score: str
    difference: float
    error: float

    @property
    def word(self) -> str:
        """Return better, worse or same; a difference below two standard errors is none."""
        if abs(self.difference) <= DECIDED * self.error:
            return "same"
        return "better" if (self.difference > 0) == (self.score == "auroc") else "worse"

    @property
    def numbers(self) -> str:
        """Return the difference and its standard error, in percentage points if the score is a share."""
        scale, digits = (100, 2) if self.score in ("error", "ece") else (1, 3)
        return f"{scale * self.difference:+.{digits}f} ± {scale * self.error:.{digits}f}"

    def __str__(self) -> str:
        return f"{self.word} ({self.numbers}{' percentage points' if self.score in ('error', 'ece') else ''})"


def band_rows(model: str, bands: Sequence[Band]) -> list[tuple[str, ...]]:
    """Return rows of `BAND_HEAD`."""
    return [
        (f"{model}, SGLD {b.method.name}", f"{b.width:.2f} ± {b.width_error:.2f}", f"{b.coverage:.1%}") for b in bands
    ]


def digits_rows(scored: Sequence[Scored]) -> list[tuple[str, ...]]:
    """Return rows of `DIGITS_HEAD`: scores with standard errors over test images."""
    rows: list[tuple[str, ...]] = []
    for s in scored:
        run, v, e = s.run, s.scores, s.errors
        networks = 4 if s.name == "one network, SGD" else 1  # it costs a quarter of the four
        rows.append(
            (
                s.name,
                f"{run.training_bytes:.1f}",
                f"{run.stored_bytes / networks / 1000:.0f} kB",
                f"{run.seconds / networks:.1f} s",
                "—" if run.trace is None else f"{run.convergence[0]:.2f}",
                f"{100 * v['error']:.1f} ± {100 * e['error']:.1f}",
                f"{v['nll']:.3f} ± {e['nll']:.3f}",
                f"{100 * v['ece']:.1f} ± {100 * e['ece']:.1f}",
                f"{v['auroc']:.3f} ± {e['auroc']:.3f}",
            )
        )
    return rows


def verdict_rows(scored: Sequence[Scored]) -> list[tuple[str, ...]]:
    """Return rows of `VERDICT_HEAD`: the last method compared with each other one, on the same test images."""
    return [(s.name, *(f"{v.word} ({v.numbers})" for v in _verdicts(scored[-1], s))) for s in scored[:-1]]


def _verdicts(one: Scored, other: Scored) -> list[Verdict]:
    return [Verdict(name, *compare(one, other, name)) for name in NAMES]


def sentences(law: GaussianResult, features: Sequence[Band], digits: Sequence[Scored]) -> tuple[str, str, str]:
    """Return the summary: what goes wrong, what the correction costs and keeps, what a posterior adds to one network."""
    _, naive, corrected = features
    variance = {row.method: row.variance for row in law.rows}
    single, full, rounded, ours = digits[0], *digits[-3:]
    heat = [f"{s.run.settings.temperature:g}" for s in (ours, full)]
    heats = "" if heat[0] == heat[1] else f" (at the temperatures that validation chose, {heat[0]} and {heat[1]})"
    first = (
        f"Rounding each step of SGLD to 8 bits makes its uncertainty {naive.width:.1f} times too wide (regression, exact answer "
        f"known; the variance of a Gaussian becomes {variance['naive SGLDLP-L']:.1f} instead of 1), and the corrected rounding "
        f"gives {corrected.width:.2f} ± {corrected.width_error:.2f} of the exact width in the same 8 bits."
    )
    second = (
        f"On digits, corrected 8-bit SGHMC trains in {ours.run.training_bytes:.1f} bytes a weight instead of "
        f"{full.run.training_bytes:.0f}, and compared with FP32{heats} its {_describe(_verdicts(ours, full))}; compared with "
        f"naive rounding in the same format, its {_describe(_verdicts(ours, rounded))}."
    )
    third = (
        f"Compared with one SGD network, its {_describe(_verdicts(ours, single))}; it stores "
        f"{ours.run.stored_bytes / 1000:.0f} kB of samples where the network takes {single.run.stored_bytes / 4000:.0f} kB."
    )
    return first, second, third


def _describe(verdicts: Sequence[Verdict]) -> str:
    """Return the scores by verdict: "NLL is better (...); error and ECE are the same within two standard errors"."""
    parts = []
    for word in ("better", "worse"):
        parts += [f"{NAMES[v.score]} is {v}" for v in verdicts if v.word == word]
    same = [NAMES[v.score] for v in verdicts if v.word == "same"]
    if same:
        listed = " and ".join(filter(None, [", ".join(same[:-1]), same[-1]]))
        parts.append(f"{listed} {'is' if len(same) == 1 else 'are'} the same within two standard errors")
    return ", ".join(parts)
