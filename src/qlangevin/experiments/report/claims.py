"""Compare the paper's claims, one by one, with results.

A difference counts if chance would hardly explain it (`differences`); otherwise, and where a method has a single seed, the
claim is undecided. A claim about every width holds if it does at each of them, and does not if it fails at one (Simes' test).
Where the paper has no figures, the same comparisons are made and told apart from its claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..results import Result
from .differences import LEVEL, NEAR, Verdict, higher_somewhere, limit, lower, matches
from .paper import PAPER
from .summary import SCORES, Cells, Estimate, by_experiment, family, method_name, scores, sweep

__all__ = ["QUALITY", "RULE", "Claim", "claims"]

UNDECIDED: Verdict = "undecided"
RULE = (
    "Verdicts: a difference counts if it is larger than chance explains, by Welch's t test over seeds at a level of "
    f"{100 * LEVEL:g} %. Expect one false verdict in twenty comparisons of equal methods."
)
QUALITY = (
    f"A score matches another if the {100 * (1 - LEVEL):g} % interval of its excess lies below {100 * NEAR:g} % of the other, "
    "and does not match if it lies above. Full-precision quality means: the NLL matches that of the method's own full-precision "
    "counterpart (SGLDFP or SGDFP)."
)

COMPARED = {  # scores that are compared; of other experiments the NLL, too
    **dict.fromkeys(("cifar10", "cifar100", "imdb"), ("error", "ece")),
    "imagenet": ("error", "top5"),
}
SWEPT = ("mnist-logistic", "mnist-mlp")  # of which the paper has a figure
PAIRS = (
    ("sgldfp", "sgdfp"), ("sgldlp-f", "sgdlp-f"), ("vc-sgldlp-l", "naive-sgldlp-l"), ("vc-sgldlp-l", "sgdlp-l"),
)  # fmt: skip
CYCLICAL = (("csgldfp", "sgldfp"), ("csgldlp-f", "sgldlp-f"), ("vc-csgldlp-l", "vc-sgldlp-l"))
ROUNDING = (  # stochastic against deterministic; the paper has errors only
    ("sgdlp-l", "nearest-sgdlp-l"), ("naive-sgldlp-l", "nearest-sgldlp-l"), ("vc-sgldlp-l", "nearest-sgldlp-l"),
)  # fmt: skip
MATCHES = (  # families of formats, method in them, method in full precision, and scores that are said to match
    (("bfp8",), "vc-csgldlp-l", "sgdfp", ("error", "ece", "top5")),
    (("bfp8",), "sgldlp-f", "sgldfp", ("error",)),
    (("bfp8",), "csgldlp-f", "csgldfp", ("error",)),
    (("bfp8", "fixed8"), "sgldlp-f", "sgldfp", ("ece",)),
    (("bfp8", "fixed8"), "vc-sgldlp-l", "sgldfp", ("ece",)),
)
OVERCONFIDENT = ("sgdlp-f", "sgdlp-l")  # methods whose ECE is said to be above that of SGD in full precision


@dataclass(frozen=True)
class Claim:
    """A claim about an experiment, the verdict of our results, and their numbers."""

    experiment: str
    text: str
    verdict: Verdict
    numbers: str
    printed: bool = True
    """The paper has figures of it; otherwise it is a comparison of ours."""


def claims(results: Iterable[Result]) -> list[Claim]:
    """Judge all claims that these results allow to judge."""
    found: list[Claim] = []
    for experiment, cells in by_experiment(results).items():
        if sweep(cells):
            found += _of_widths(experiment, cells)
        else:
            found += _of_pairs(experiment, cells)
    return found


def _of_pairs(experiment: str, cells: Cells) -> Iterator[Claim]:
    """Compare SGLD with SGD, corrected with naive, cyclical with not cyclical, stochastic with deterministic rounding.

    In each format in which both have been run; then low with full precision.
    """
    names = COMPARED.get(experiment, ("nll", "error", "ece"))
    pairs = (*product((*PAIRS, *CYCLICAL), names), *product(ROUNDING, ("error",)))
    for format in dict.fromkeys(format for _, format in cells):
        for (a, b), name in pairs:
            first, second = (scores(cells, method, name).get(format) for method in (a, b))
            if first is not None and second is not None:
                text = f"{method_name(a)} has a lower {SCORES[name].title} than {method_name(b)} in {format}"
                printed = _is_printed(experiment, name, (family(format), a), (family(format), b))
                yield Claim(experiment, text, lower(first, second), _compare(name, first, second), printed)
        yield from _against_full(experiment, cells, format, names)


def _is_printed(experiment: str, name: str, *cells: tuple[str, str]) -> bool:
    """Return whether the paper has figures of all these families of formats and methods."""
    return all(cell in PAPER.get((experiment, name), {}) for cell in cells)


def _compare(name: str, first: Estimate, second: Estimate) -> str:
    """Return both scores, their difference, and how much of it chance explains, in words."""
    score, chance = SCORES[name], limit(first, second)
    unit = " %" if score.percent else ""
    both = f"{score.bare(first)}{unit} against {score.bare(second)}{unit}"
    if chance == math.inf:
        return f"{both}; one seed, so that its standard error is not known"
    gap, points = score.number(abs(first.mean - second.mean)), " percentage points" if score.percent else ""
    return f"{both}; difference {gap}, chance explains {score.number(chance)}{points}"


def _against_full(experiment: str, cells: Cells, format: str, names: Iterable[str]) -> Iterator[Claim]:
    """Judge whether methods in a low precision match others in full precision, and whether SGD's ECE is worse for it."""
    kind = family(format)
    for families, low, full, which in MATCHES:
        for name in (name for name in which if name in names and kind in families):
            ours, theirs = scores(cells, low, name).get(format), scores(cells, full, name).get("fp32")
            if ours is not None and theirs is not None:
                text = f"{method_name(low)} in {format} matches the {SCORES[name].title} of {method_name(full)}"
                printed = _is_printed(experiment, name, (kind, low), ("fp32", full))
                yield Claim(experiment, text, matches(ours, theirs), _compare(name, ours, theirs), printed)
    for low in OVERCONFIDENT if "ece" in names else ():
        ours, theirs = scores(cells, low, "ece").get(format), scores(cells, "sgdfp", "ece").get("fp32")
        if ours is not None and theirs is not None:
            text = f"SGDFP has a lower ECE than {method_name(low)} in {format}"
            printed = _is_printed(experiment, "ece", (kind, low), ("fp32", "sgdfp"))
            yield Claim(experiment, text, lower(theirs, ours), _compare("ece", theirs, ours), printed)


def _of_widths(experiment: str, cells: Cells) -> Iterator[Claim]:
    """Judge the claims about a sweep over fractional bits."""
    widths = sweep(cells)
    narrow = {bits: format for bits, format in widths.items() if bits == 2}
    for claim in (
        _everywhere(experiment, cells, widths, "sgldlp-f", "sgdlp-f"),
        _sufficient(experiment, cells, widths, "sgldlp-f", "sgldfp", 6),
        _necessary(experiment, cells, widths, "sgdlp-f", "sgdfp", 10),
        _everywhere(experiment, cells, widths, "vc-sgldlp-l", "naive-sgldlp-l"),
        _everywhere(experiment, cells, widths, "vc-sgldlp-l", "sgdlp-l"),
        _everywhere(experiment, cells, narrow, "vc-sgldlp-l", "sgdlp-f", "with 2 fractional bits"),
    ):
        yield replace(claim, printed=experiment in SWEPT)


def _everywhere(
    experiment: str, cells: Cells, widths: dict[int, str], a: str, b: str, where: str = "at every width"
) -> Claim:
    """Judge whether method a has a lower NLL than method b at all these widths."""
    text = f"{method_name(a)} has a lower NLL than {method_name(b)} {where}"
    first, second = scores(cells, a, "nll"), scores(cells, b, "nll")
    pairs = {bits: (first[f], second[f]) for bits, f in widths.items() if f in first and f in second}
    if not pairs:
        return Claim(experiment, text, "undecided", "there are no runs of both")
    verdicts = {bits: lower(*pair) for bits, pair in pairs.items()}
    holds = len(pairs) == len(widths) and all(v == "holds" for v in verdicts.values())
    fails = higher_somewhere(pairs.values())
    verdict: Verdict = "holds" if holds else "does not hold" if fails else "undecided"
    missing = len(widths) - len(pairs)
    numbers = _over_widths(pairs, verdicts) + (f"; {missing} of {len(widths)} widths were not run" if missing else "")
    return Claim(experiment, text, verdict, numbers)


def _over_widths(pairs: dict[int, tuple[Estimate, Estimate]], verdicts: dict[int, Verdict]) -> str:
    """Count the widths at which a is lower, and name the width at which it is so by the least."""
    bits = min(pairs, key=lambda bits: (pairs[bits][1].mean - pairs[bits][0].mean) / pairs[bits][1].mean)
    worst = _compare("nll", *pairs[bits])
    if len(pairs) == 1:
        return worst
    lower_at = sum(a.mean < b.mean for a, b in pairs.values())
    clear = sum(v == "holds" for v in verdicts.values())
    wrong = [str(bits) for bits, v in verdicts.items() if v == "does not hold"]
    text = f"lower at {lower_at} of {len(pairs)} widths, by a difference that counts at {clear}"
    text += f"; higher by a difference that counts with {', '.join(wrong)} bits" if wrong else ""
    return f"{text}; at worst, with {bits} bits: {worst}"


def _quality(cells: Cells, widths: dict[int, str], method: str, full: str) -> tuple[dict[int, Verdict], str]:
    """Judge for each width whether a method has full-precision quality there; return the numbers in words, too."""
    reference, found = scores(cells, full, "nll").get("fp32"), scores(cells, method, "nll")
    if reference is None or not found:
        return {}, f"there are no runs of both {method_name(method)} and {method_name(full)}"
    there = {bits: found[format] for bits, format in widths.items() if format in found}
    words = (f"{bits} bits {round(100 * (e.mean / reference.mean - 1), 1) + 0.0:+} %" for bits, e in there.items())
    numbers = f"{method_name(full)} {SCORES['nll'].bare(reference)}, and relative to it: {', '.join(words)}"
    return {bits: matches(e, reference) for bits, e in there.items()}, numbers


def _first_good(quality: dict[int, Verdict]) -> int | None:
    """Return the width from which on all surely have quality; None if there is none."""
    last = max((bits for bits, verdict in quality.items() if verdict != "holds"), default=-math.inf)
    return min((bits for bits in quality if bits > last), default=None)


def _sufficient(experiment: str, cells: Cells, widths: dict[int, str], method: str, full: str, bits: int) -> Claim:
    """Judge whether all widths from this one on have quality."""
    text = f"{method_name(method)} has full-precision quality from {bits} fractional bits on"
    quality, numbers = _quality(cells, widths, method, full)
    start, verdict = _first_good(quality), UNDECIDED
    if start is not None and start <= bits <= max(quality):
        verdict = "holds"
    elif any(v == "does not hold" and b >= bits for b, v in quality.items()):
        verdict = "does not hold"
    return Claim(experiment, text, verdict, _describe_quality(quality, numbers))


def _necessary(experiment: str, cells: Cells, widths: dict[int, str], method: str, full: str, bits: int) -> Claim:
    """Judge whether a width of at least ``bits`` - 2 does not have quality yet."""
    text = f"{method_name(method)} needs at least {bits} fractional bits for full-precision quality"
    quality, numbers = _quality(cells, widths, method, full)
    start, verdict = _first_good(quality), UNDECIDED
    if start is not None and start < bits:
        verdict = "does not hold"
    elif any(v == "does not hold" and b >= bits - 2 for b, v in quality.items()):
        verdict = "holds"
    return Claim(experiment, text, verdict, _describe_quality(quality, numbers))


def _describe_quality(quality: dict[int, Verdict], numbers: str) -> str:
    """Return the widths that surely have quality or surely lack it, and the numbers."""
    if not quality:
        return numbers
    groups = {"surely with": "holds", "surely not with": "does not hold", "undecided with": "undecided"}
    parts = [
        f"{label} {', '.join(map(str, bits))}"
        for label, v in groups.items()
        if (bits := [b for b, w in quality.items() if w == v])
    ]
    return f"{'; '.join(parts)} bits; {numbers}"
