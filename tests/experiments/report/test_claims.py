"""The paper's claims against results made so that the answer is known; and how results are put in order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qlangevin.experiments.methods import METHODS
from qlangevin.experiments.report.claims import Claim, claims
from qlangevin.experiments.report.differences import higher_somewhere, limit, lower, matches
from qlangevin.experiments.report.paper import FAMILIES, NEAREST, PAPER, ROWS, TITLES
from qlangevin.experiments.report.summary import (
    SCORES,
    Estimate,
    by_cell,
    by_experiment,
    estimate,
    family,
    fractional_bits,
    mixtures,
    score,
    shown_formats,
)
from qlangevin.experiments.report.summary import sweep as widths_of
from tests.helpers.runs import FIVE, full, run, runs, sweep


def scored(
    method: str, format: str, nll: list[float], experiment: str = "mnist-logistic", **others: float
) -> list[Any]:
    """A run for each NLL, with seeds 0, 1, ..."""
    made = [run(experiment, method, format, seed) for seed in range(len(nll))]
    return [
        result | {"scores": result["scores"] | others | {"nll": value}} for result, value in zip(made, nll, strict=True)
    ]


def verdicts(found: list[Claim]) -> dict[str, str]:
    return {claim.text: claim.verdict for claim in found}


def test_estimates_are_means_and_standard_errors() -> None:
    assert estimate([2.0]) == (2.0, None, 1)
    mean, error, seeds = estimate([1.0, 2.0, 4.5])
    assert (mean, seeds) == (2.5, 3)
    assert error == pytest.approx(math.sqrt((1.5**2 + 0.5**2 + 2**2) / 2 / 3))


def test_numbers_are_written_as_in_the_paper() -> None:
    assert SCORES["error"].text(Estimate(0.0713, 0.0001, 3)) == "7.13 ± 0.01 (3)"
    assert SCORES["error"].text(Estimate(0.0713, None, 1)) == "7.13 (1)"
    assert SCORES["nll"].text(Estimate(0.27561, 0.00042, 2)) == "0.2756 ± 0.0004 (2)"
    assert SCORES["nll"].bare(Estimate(23.456, 0.0, 2)) == "23.46 ± 0.0000"
    assert SCORES["ece"].bare(Estimate(0.01, 0.0000301, 2)) == "1.00 ± 0.003"  # not 0.00, which would read as none
    assert SCORES["nll"].text(None) == "—"


def test_differences_count_beyond_welchs_limit() -> None:
    """Equal errors and three seeds each have ν = 4, t = 2.776; if one error is nearly 0, ν = 2, t = 4.303."""
    one = Estimate(1.0, 0.1, 3)
    assert limit(one, Estimate(2.0, 0.1, 3)) == pytest.approx(2.7764 * 0.1 * math.sqrt(2), rel=1e-4)
    assert limit(one, Estimate(2.0, 1e-9, 3)) == pytest.approx(4.3027 * 0.1, rel=1e-4)
    assert lower(one, Estimate(1.40, 0.1, 3)) == "holds"  # 0.393
    assert lower(one, Estimate(1.38, 0.1, 3)) == "undecided"
    assert lower(one, Estimate(0.60, 0.1, 3)) == "does not hold"
    assert lower(one, Estimate(9.0, None, 1)) == "undecided"
    assert lower(Estimate(1.0, 0.0, 3), Estimate(1.0, 0.0, 3)) == "undecided"
    assert lower(Estimate(1.0, 0.0, 3), Estimate(1.1, 0.0, 3)) == "holds"


def test_a_score_matches_if_it_is_surely_at_most_two_per_cent_higher() -> None:
    full = Estimate(1.0, 0.0, 3)
    assert [matches(Estimate(mean, 0.0, 3), full) for mean in (0.5, 1.019, 1.021)] == [
        "holds",
        "holds",
        "does not hold",
    ]
    noisy = [matches(Estimate(mean, 0.01, 3), full) for mean in (0.97, 1.0, 1.05, 1.07)]  # ± 0.043
    assert noisy == ["holds", "undecided", "undecided", "does not hold"]
    assert matches(Estimate(1.0, None, 1), full) == "undecided"


@pytest.mark.parametrize("spread", [(1.0, 1.0), (1.0, 3.0), (1.0, 10.0)])
def test_equal_methods_are_told_apart_as_rarely_as_promised(spread: tuple[float, float]) -> None:
    """Three seeds each, 4000 times: at most 5 % false verdicts but for 5 standard errors of 0.34 %; two of errors alone: 12 %."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4000, 2, 3, generator=generator, dtype=torch.float64) * torch.tensor(spread)[:, None]
    pairs = [[estimate(row) for row in rows] for rows in drawn.tolist()]
    alarms = sum(lower(first, second) != "undecided" for first, second in pairs) / len(pairs)
    assert 0.03 < alarms < 0.067


def test_claims_about_a_sweep() -> None:
    results = sweep("mnist-mlp")
    alike = [r for r in results if r["settings"]["format"] == "fixed16.14"]
    corrected = [r["scores"] for r in alike if r["settings"]["method"] == "vc-sgldlp-l"]
    same = [r for r in alike if r["settings"]["method"] == "naive-sgldlp-l"]
    for result, scores in zip(same, corrected, strict=True):
        result["scores"] = scores
    found = claims(results)
    assert {claim.experiment for claim in found} == {"mnist-mlp"}
    assert verdicts(found) == {
        "SGLDLP-F has a lower NLL than SGDLP-F at every width": "holds",
        "SGLDLP-F has full-precision quality from 6 fractional bits on": "holds",
        "SGDLP-F needs at least 10 fractional bits for full-precision quality": "does not hold",  # +0.7 % with 8
        "VC SGLDLP-L has a lower NLL than Naïve SGLDLP-L at every width": "undecided",  # the same with 14
        "VC SGLDLP-L has a lower NLL than SGDLP-L at every width": "holds",
        "VC SGLDLP-L has a lower NLL than SGDLP-F with 2 fractional bits": "holds",
    }
    first, _, needs, naive, *_, last = (claim.numbers for claim in found)
    assert first.startswith("lower at 7 of 7 widths, by a difference that counts at 7; at worst, with ")
    assert needs.startswith("surely with 8, 10, 12, 14; surely not with 2, 4; undecided with 6 bits; SGDFP 0.28")
    assert "2 bits +4" in needs
    assert "at 6; at worst, with 14 bits" in naive
    assert " against " in last


def test_a_single_width_of_the_other_opinion_decides() -> None:
    low = [(bits, f"fixed{bits + 2}.{bits}") for bits in (2, 4, 6)]
    results = [r for bits, format in low for r in scored("sgldlp-f", format, [0.3, 0.31] if bits != 4 else [0.9, 0.91])]
    results += [r for _, format in low for r in scored("sgdlp-f", format, [0.5, 0.51])]
    claim = claims(results)[0]
    assert claim.verdict == "does not hold"
    assert claim.numbers == (
        "lower at 2 of 3 widths, by a difference that counts at 2; higher by a difference that counts with 4 bits; at "
        "worst, with 4 bits: 0.9050 ± 0.0050 against 0.5050 ± 0.0050; difference 0.4000, chance explains 0.0304"
    )


@pytest.mark.parametrize(
    ("nlls", "sufficient", "necessary"),
    [
        ({2: 9.0, 6: 1.0, 8: 1.0, 10: 1.0}, "holds", "does not hold"),
        ({2: 9.0, 6: 1.019, 8: 1.019, 10: 1.019}, "holds", "does not hold"),  # 2 % are allowed
        ({2: 9.0, 6: 1.03, 8: 1.03, 10: 1.0}, "does not hold", "holds"),
        ({2: 9.0, 6: 1.0, 8: 1.0, 10: 1.03}, "does not hold", "holds"),  # good, but not from there on
        ({2: 9.0, 3: 9.0, 12: 1.0}, "undecided", "undecided"),  # what is in between is not known
        ({2: 9.0, 3: 9.0, 12: 9.0}, "does not hold", "holds"),
        ({2: 0.5, 6: 0.5, 8: 0.5}, "holds", "does not hold"),  # better than full precision is good
        ({2: 0.5, 3: 0.5, 4: 0.5}, "undecided", "does not hold"),  # no width from 6 on was run
    ],
)
def test_full_precision_quality(nlls: dict[int, float], sufficient: str, necessary: str) -> None:
    results = scored("sgldfp", "fp32", [1.0, 1.0]) + scored("sgdfp", "fp32", [1.0, 1.0])
    for bits, nll in nlls.items():
        for method in ("sgldlp-f", "sgdlp-f"):
            results += scored(method, f"fixed{bits + 2}.{bits}", [nll, nll])
    found = verdicts(claims(results))
    assert found["SGLDLP-F has full-precision quality from 6 fractional bits on"] == sufficient
    assert found["SGDLP-F needs at least 10 fractional bits for full-precision quality"] == necessary


def test_quality_within_the_reach_of_chance_is_undecided() -> None:
    low = [r for bits in (2, 4, 6) for r in scored("sgldlp-f", f"fixed{bits + 2}.{bits}", [1.0, 1.1])]  # 1.05 ± 0.64
    for reference, verdict in ((1.05, "undecided"), (2.0, "holds"), (0.3, "does not hold")):
        claim = claims([*low, *scored("sgldfp", "fp32", [reference, reference])])[1]
        assert claim.verdict == verdict
        assert claim.numbers.startswith(
            {"undecided": "undecided with", "holds": "surely with"}.get(verdict, "surely not")
        )


@pytest.mark.parametrize(
    ("worse", "gap", "verdict"),
    [(1, 0.04, "undecided"), (1, 0.045, "does not hold"), (4, 0.026, "undecided"), (4, 0.029, "does not hold")],
)
def test_widths_that_fail_decide_together(worse: int, gap: float, verdict: str) -> None:
    """One of seven has to differ by 5.06 standard errors of 0.0082, t(4) for 5 % / 7; each of four by 3.32, for 5 % · 4/7."""
    results = []
    for bits in range(2, 15, 2):
        excess = gap if bits <= 2 * worse else -0.3
        spread = [-0.01, 0.0, 0.01]
        results += scored("sgldlp-f", f"fixed{bits + 2}.{bits}", [0.5 + excess + x for x in spread])
        results += scored("sgdlp-f", f"fixed{bits + 2}.{bits}", [0.5 + x for x in spread])
    assert claims(results)[0].verdict == verdict


def test_equal_methods_fail_at_some_width_as_rarely_as_promised() -> None:
    """Seven widths, three seeds, 2000 times: at most 2.5 % in this direction, but for 5 standard errors of 0.35 %."""
    drawn = torch.randn(2000, 7, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    alarms = sum(higher_somewhere([(estimate(a), estimate(b)) for a, b in widths]) for widths in drawn)
    assert 0.005 < alarms / len(drawn) < 0.0425


def test_claims_without_the_runs_are_undecided() -> None:
    results = [r for bits in (2, 4, 6) for r in scored("vc-sgldlp-l", f"fixed{bits + 2}.{bits}", [0.3, 0.31])]
    found = claims(results)
    assert {claim.verdict for claim in found} == {"undecided"}
    assert {claim.numbers for claim in found} == {
        "there are no runs of both",
        "there are no runs of both SGLDLP-F and SGLDFP",
        "there are no runs of both SGDLP-F and SGDFP",
    }


def test_claims_about_single_formats_compare_what_was_run() -> None:
    results = runs("cifar10", FIVE, "fixed8.8") + runs("cifar10", ("sgldlp-f", "sgdlp-f"), "bfp8", seeds=1)
    found = claims(results)
    assert [claim.text for claim in found if "bfp8" in claim.text] == [
        "SGLDLP-F has a lower error than SGDLP-F in bfp8",
        "SGLDLP-F has a lower ECE than SGDLP-F in bfp8",
    ]
    assert all(claim.verdict == "undecided" for claim in found if "bfp8" in claim.text)
    assert found[-1].numbers.endswith("one seed, so that its standard error is not known")
    fixed = [claim for claim in found if "fixed8.8" in claim.text]
    assert len(fixed) == 6
    assert {claim.verdict for claim in fixed} == {"holds"}


def test_claims_about_cyclical_methods() -> None:
    results = runs("cifar10", ("vc-sgldlp-l", "vc-csgldlp-l"), "bfp8") + full("cifar10")
    found = verdicts(claims(results))
    assert found["VC cSGLDLP-L has a lower error than VC SGLDLP-L in bfp8"] == "holds"
    text = "VC cSGLDLP-L in bfp8 matches the error of SGDFP"
    assert found[text] == "holds"
    bad = [scored("vc-csgldlp-l", "bfp8", [9.0, 9.1], "cifar10", error=e)[i] for i, e in enumerate((0.5, 0.51))]
    assert verdicts(claims(bad + full("cifar10")))[text] == "does not hold"
    single = runs("cifar10", ("vc-csgldlp-l",), "bfp8", seeds=1) + full("cifar10")
    assert verdicts(claims(single))[text] == "undecided"


def test_claims_about_deterministic_rounding_are_about_errors() -> None:
    results = [
        *(r for e, seed in ((0.10, 0), (0.11, 1)) for r in _with_error("sgdlp-l", e, seed)),
        *(r for e, seed in ((0.20, 0), (0.21, 1)) for r in _with_error("nearest-sgdlp-l", e, seed)),
    ]
    found = {text: verdict for text, verdict in verdicts(claims(results)).items() if "nearest" in text}
    assert found == {"SGDLP-L has a lower error than SGDLP-L, nearest in bfp8": "holds"}


def _with_error(method: str, error: float, seed: int) -> list[Any]:
    result = run("cifar10", method, "bfp8", seed)
    return [result | {"scores": result["scores"] | {"error": error}}]


def test_imagenet_is_judged_by_both_errors() -> None:
    found = claims(runs("imagenet", ("sgldlp-f", "sgdlp-f"), "bfp8"))
    assert [claim.text.split(" than")[0] for claim in found] == [
        "SGLDLP-F has a lower error", "SGLDLP-F has a lower top-5 error"
    ]  # fmt: skip


def test_formats_belong_to_the_groups_of_the_paper() -> None:
    assert [family(f) for f in ("fp32", "fixed8.6", "bfp8", "bfp8/tensor", "bfp8/32", "bfp8e5")] == [
        "fp32", "fixed8", "bfp8", "bfp8", "bfp8", "bfp8"
    ]  # fmt: skip
    assert [family(f) for f in ("fixed6.4", "bfp4", "e4m3", "<b>")] == ["fixed6.4", "bfp4", "e4m3", "<b>"]
    assert [fractional_bits(f) for f in ("fixed8.6", "fixed8.-2", "bfp8")] == [6, -2, None]


def test_experiments_and_methods_come_in_the_papers_order() -> None:
    results = [run("odd"), run("imdb"), *runs("cifar10", ("mine", *reversed(FIVE)), "bfp8", 1), *full("cifar10", 1)]
    ordered = by_experiment(results)
    assert list(ordered) == ["cifar10", "imdb", "odd"]
    assert [method for method, _ in ordered["cifar10"]] == ["sgldfp", "sgdfp", *FIVE, "mine"]


def test_a_sweep_has_three_widths_with_the_same_integer_bits() -> None:
    cells = by_cell([run(format=f) for f in ("fixed4.2", "fixed6.4", "fixed8.6", "fixed8.4", "bfp8")])
    assert widths_of(cells) == {2: "fixed4.2", 4: "fixed6.4", 6: "fixed8.6"}
    assert shown_formats(cells) == ["fixed8.6", "fixed8.4", "bfp8"]
    assert widths_of(by_cell([run(format=f) for f in ("fixed4.2", "fixed6.4", "fixed8.4", "fp32")])) == {}


def test_runs_that_differ_in_more_than_the_seed_are_noticed() -> None:
    odd = run(seed=1)
    odd["settings"] |= {"lr": 0.05, "workers": 3}
    assert mixtures(by_cell([run(), odd])) == [
        "VC SGLDLP-L in bfp8 is averaged over runs with different lr (0.1, 0.05)"
    ]
    assert mixtures(by_cell([run(), run(seed=1)])) == []


def test_a_score_is_averaged_over_the_runs_that_have_it() -> None:
    without = run(seed=1) | {"single": None}
    found = score([run(), without], "nll", "single")
    assert found is not None
    assert found.seeds == 1
    assert score([without], "nll", "single") is None


def test_the_papers_tables_speak_of_methods_there_are() -> None:
    assert {experiment for experiment, _ in PAPER} <= set(TITLES)
    assert {name for _, name in PAPER} <= set(SCORES)
    for printed in PAPER.values():
        for (kind, method), text in printed.items():
            assert kind in FAMILIES
            assert method in METHODS
            assert method in ROWS[kind] or (kind, method) in NEAREST
            assert [0 < float(number) < 100 for number in text.split(" ± ")] in ([True], [True, True])
    assert PAPER["imdb", "error"]["bfp8", "sgdlp-l"] == "16.06 ± 1.81"
    assert PAPER["cifar100", "ece"]["bfp8", "sgdlp-l"] == "12.97"
    assert PAPER["imagenet", "top5"]["bfp8", "sgldlp-f"] == "11.77"


def test_comparisons_without_figures_in_the_paper_are_told_apart_from_its_claims() -> None:
    """Its table of ECEs has neither IMDB nor the naive method, and only MNIST has a figure of widths."""
    found = claims([*runs("imdb", FIVE, "bfp8/tensor"), *full("imdb"), *runs("cifar10", FIVE, "fixed8.8")])
    printed = {(claim.experiment, claim.text): claim.printed for claim in found}
    assert printed["imdb", "SGLDLP-F has a lower error than SGDLP-F in bfp8/tensor"]
    assert not printed["imdb", "SGLDLP-F has a lower ECE than SGDLP-F in bfp8/tensor"]
    assert printed["cifar10", "SGLDLP-F has a lower ECE than SGDLP-F in fixed8.8"]
    assert not printed["cifar10", "VC SGLDLP-L has a lower ECE than Naïve SGLDLP-L in fixed8.8"]
    assert all(claim.printed for claim in claims(sweep("mnist-mlp")))
    assert not any(claim.printed for claim in claims(sweep("digits")))


def test_low_precision_is_compared_with_full_precision() -> None:
    results = [*runs("cifar10", ("sgldlp-f", "vc-sgldlp-l", "sgdlp-l"), "bfp8"), *full("cifar10")]
    names = {claim.text for claim in claims(results) if "matches" in claim.text or claim.text.startswith("SGDFP")}
    assert names == {
        "SGLDLP-F in bfp8 matches the error of SGLDFP",
        "SGLDLP-F in bfp8 matches the ECE of SGLDFP",
        "VC SGLDLP-L in bfp8 matches the ECE of SGLDFP",
        "SGDFP has a lower ECE than SGDLP-L in bfp8",
    }


def test_a_claim_about_every_width_waits_for_all_of_them() -> None:
    results = [r for bits in (2, 3, 4) for r in scored("sgldlp-f", f"fixed{bits + 2}.{bits}", [0.30, 0.31])]
    results += scored("sgdlp-f", "fixed4.2", [0.90, 0.91])
    claim = claims(results)[0]
    assert claim.verdict == "undecided"
    assert claim.numbers.endswith("; 2 of 3 widths were not run")
