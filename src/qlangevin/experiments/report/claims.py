"""Compare the paper's claims, one by one, with results.

A difference counts if chance would hardly explain it (`scatter`); otherwise, and where no method has two seeds, the claim is
undecided. A claim about every width holds if it does at each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

from ..results import Result
from .scatter import LEVEL, Scatter, pool_scatter
from .summary import SCORES, Cells, Estimate, by_experiment, family, method_name, scores, sweep

__all__ = ["QUALITY", "RULE", "Claim", "Verdict", "claims", "lower"]

Verdict: TypeAlias = Literal["holds", "does not hold", "undecided"]

UNDECIDED: Verdict = "undecided"
NEAR = 0.02  # of the full-precision NLL
RULE = (
    f"Verdicts: a difference counts if chance would exceed it in less than {100 * LEVEL:g} % of all comparisons, by Student's t. "
    "Its standard error has the relative variance over seeds, pooled over all methods in the format."
)
QUALITY = (
    "Full-precision quality means: the NLL is above that of the method's own full-precision counterpart (SGLDFP or SGDFP) by "
    "at most 2 %, or by a difference that does not count."
)

REPORTED = {  # scores that the paper has of an experiment
    **dict.fromkeys(("cifar10", "cifar100", "imdb"), ("error", "ece")),
    "imagenet": ("error", "top5"),
}
PAIRS = (("sgldlp-f", "sgdlp-f"), ("vc-sgldlp-l", "naive-sgldlp-l"), ("vc-sgldlp-l", "sgdlp-l"))
CYCLICAL = (("csgldfp", "sgldfp"), ("csgldlp-f", "sgldlp-f"), ("vc-csgldlp-l", "vc-sgldlp-l"))
ROUNDING = (  # stochastic against deterministic; the paper has errors only
    ("sgdlp-l", "nearest-sgdlp-l"), ("naive-sgldlp-l", "nearest-sgldlp-l"), ("vc-sgldlp-l", "nearest-sgldlp-l"),
)  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A claim of the paper about an experiment, the verdict of our results, and their numbers."""

    experiment: str
    text: str
    verdict: Verdict
    numbers: str


def claims(results: Iterable[Result]) -> list[Claim]:
    """Judge all claims that these results allow to judge."""
    found: list[Claim] = []
    for experiment, cells in by_experiment(results).items():
        if sweep(cells):
            found += _of_widths(experiment, cells)
        else:
            found += _of_pairs(experiment, cells)
    return found


def lower(a: Estimate, b: Estimate, scatter: Scatter | None) -> Verdict:
    """Judge whether a is below b."""
    gap = b.mean - a.mean
    if scatter is None or abs(gap) <= scatter.limit(a, b):
        return "undecided"
    return "holds" if gap > 0 else "does not hold"


def _of_pairs(experiment: str, cells: Cells) -> Iterator[Claim]:
    """Compare SGLD with SGD, corrected with naive, cyclical with not cyclical, stochastic with deterministic rounding.

    In each format in which both have been run.
    """
    names = REPORTED.get(experiment, ("nll", "error", "ece"))
    pairs = (*product((*PAIRS, *CYCLICAL), names), *product(ROUNDING, ("error",)))
    for format in dict.fromkeys(format for _, format in cells):
        for (a, b), name in pairs:
            first, second = (scores(cells, method, name).get(format) for method in (a, b))
            if first is not None and second is not None:
                text = f"{method_name(a)} has a lower {SCORES[name].title} than {method_name(b)} in {format}"
                scatter = pool_scatter(cells, {format}, name)
                yield Claim(experiment, text, lower(first, second, scatter), _compare(name, first, second, scatter))
        if family(format) == "bfp8":
            yield from _matches(experiment, cells, format, names)


def _compare(name: str, first: Estimate, second: Estimate, scatter: Scatter | None) -> str:
    """Return both scores in words, and their difference with the standard error by which it is judged."""
    unit = " %" if SCORES[name].percent else ""
    both = f"{SCORES[name].bare(first)}{unit} against {SCORES[name].bare(second)}{unit}"
    if scatter is None:
        return f"{both}; one seed, so that the standard error is not known"
    gap = Estimate(abs(first.mean - second.mean), scatter.error(first, second), 2)
    return f"{both}; difference {SCORES[name].bare(gap)}{unit}"


def _matches(experiment: str, cells: Cells, format: str, names: Iterable[str]) -> Iterator[Claim]:
    """Judge whether the cyclical method in 8 bits throughout is no worse than SGD in full precision."""
    for name in names:
        ours, full = scores(cells, "vc-csgldlp-l", name).get(format), scores(cells, "sgdfp", name).get("fp32")
        if ours is not None and full is not None:
            scatter = pool_scatter(cells, {format, "fp32"}, name)
            verdict: Verdict = "does not hold" if lower(full, ours, scatter) == "holds" else "undecided"
            verdict = "holds" if scatter is not None and ours.mean <= full.mean else verdict
            text = f"VC cSGLDLP-L in {format} has no higher {SCORES[name].title} than SGDFP"
            yield Claim(experiment, text, verdict, _compare(name, ours, full, scatter))


def _of_widths(experiment: str, cells: Cells) -> Iterator[Claim]:
    """Judge the claims about a sweep over fractional bits."""
    widths = sweep(cells)
    yield _everywhere(experiment, cells, widths, "sgldlp-f", "sgdlp-f")
    yield _sufficient(experiment, cells, widths, "sgldlp-f", "sgldfp", 6)
    yield _necessary(experiment, cells, widths, "sgdlp-f", "sgdfp", 10)
    yield _everywhere(experiment, cells, widths, "vc-sgldlp-l", "naive-sgldlp-l")
    yield _everywhere(experiment, cells, widths, "vc-sgldlp-l", "sgdlp-l")
    narrow = {bits: format for bits, format in widths.items() if bits == 2}
    yield _everywhere(experiment, cells, narrow, "vc-sgldlp-l", "sgdlp-f", "with 2 fractional bits")


def _everywhere(
    experiment: str, cells: Cells, widths: dict[int, str], a: str, b: str, where: str = "at every width"
) -> Claim:
    """Judge whether method a has a lower NLL than method b at all these widths."""
    text = f"{method_name(a)} has a lower NLL than {method_name(b)} {where}"
    first, second = scores(cells, a, "nll"), scores(cells, b, "nll")
    pairs = {
        bits: (first[f], second[f], pool_scatter(cells, {f}, "nll"))
        for bits, f in widths.items()
        if f in first and f in second
    }
    if not pairs:
        return Claim(experiment, text, "undecided", "there are no runs of both")
    verdicts = {bits: lower(*pair) for bits, pair in pairs.items()}
    found = set(verdicts.values())
    verdict: Verdict = "does not hold" if "does not hold" in found else "holds" if found == {"holds"} else "undecided"
    return Claim(experiment, text, verdict, _over_widths(pairs, verdicts))


def _over_widths(pairs: dict[int, tuple[Estimate, Estimate, Scatter | None]], verdicts: dict[int, Verdict]) -> str:
    """Count the widths at which a is lower, and name the width at which it is so by the least."""
    bits = min(pairs, key=lambda bits: (pairs[bits][1].mean - pairs[bits][0].mean) / pairs[bits][1].mean)
    worst = _compare("nll", *pairs[bits])
    if len(pairs) == 1:
        return worst
    lower_at = sum(a.mean < b.mean for a, b, _ in pairs.values())
    clear = sum(v == "holds" for v in verdicts.values())
    wrong = [str(bits) for bits, v in verdicts.items() if v == "does not hold"]
    text = f"lower at {lower_at} of {len(pairs)} widths, by a difference that counts at {clear}"
    text += f"; higher by one with {', '.join(wrong)} bits" if wrong else ""
    return f"{text}; at worst, with {bits} bits: {worst}"


def _quality(cells: Cells, widths: dict[int, str], method: str, full: str) -> tuple[dict[int, bool], str]:
    """Return for each width whether a method has full-precision quality there, and the numbers in words."""
    reference, found = scores(cells, full, "nll").get("fp32"), scores(cells, method, "nll")
    if reference is None or not found:
        return {}, f"there are no runs of both {method_name(method)} and {method_name(full)}"
    good, words = {}, []
    for bits, format in widths.items():
        if format in found:
            e = found[format]
            scatter = pool_scatter(cells, {format, "fp32"}, "nll")
            slack = max(NEAR * reference.mean, scatter.limit(e, reference) if scatter else 0.0)
            good[bits] = e.mean - reference.mean <= slack
            words.append(f"{bits} bits {round(100 * (e.mean / reference.mean - 1), 1) + 0.0:+} %")
    return good, f"{method_name(full)} {SCORES['nll'].bare(reference)}, and relative to it: {', '.join(words)}"


def _first_good(good: dict[int, bool]) -> int | None:
    """Return the width from which on all are good; None if there is none."""
    bad = [bits for bits, fine in good.items() if not fine]
    return min((bits for bits in good if not bad or bits > max(bad)), default=None)


def _sufficient(experiment: str, cells: Cells, widths: dict[int, str], method: str, full: str, bits: int) -> Claim:
    """Judge whether all widths from this one on are good."""
    text = f"{method_name(method)} has full-precision quality from {bits} fractional bits on"
    good, numbers = _quality(cells, widths, method, full)
    start, verdict = _first_good(good), UNDECIDED
    if start is not None and start <= bits:
        verdict = "holds"
    elif any(not fine and b >= bits for b, fine in good.items()):
        verdict = "does not hold"
    return Claim(experiment, text, verdict, _describe_quality(good, numbers))


def _necessary(experiment: str, cells: Cells, widths: dict[int, str], method: str, full: str, bits: int) -> Claim:
    """Judge whether a width of at least ``bits`` - 2 is not good yet."""
    text = f"{method_name(method)} needs at least {bits} fractional bits for full-precision quality"
    good, numbers = _quality(cells, widths, method, full)
    start, verdict = _first_good(good), UNDECIDED
    if start is not None and start < bits:
        verdict = "does not hold"
    elif any(not fine and b >= bits - 2 for b, fine in good.items()):
        verdict = "holds"
    return Claim(experiment, text, verdict, _describe_quality(good, numbers))


def _describe_quality(good: dict[int, bool], numbers: str) -> str:
    """Return the width from which on all are good, and the numbers."""
    if not good:
        return numbers
    start = _first_good(good)
    return f"{'at no width of the sweep' if start is None else f'here from {start} bits on'}; {numbers}"
