"""Runs for tests: the arguments of a tiny one, files of one, and made-up results as `qlangevin run` saves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from qlangevin.cli.main import main

TINY = ["run", "digits", "--epochs", "2", "--batch", "50", "--samples", "2"]
TINY += ["--limit-train", "100", "--limit-test", "40", "--hidden", "8"]

# Method -> (NLL, further NLL for each gap of the grid); SGD is the worse calibrated.
QUALITY = {
    "sgdfp": (0.285, 0.0), "sgldfp": (0.275, 0.0), "csgldfp": (0.27, 0.0), "sgdlp-f": (0.285, 0.5), "sgdlp-l": (0.285, 6.0),
    "sgldlp-f": (0.275, 0.02), "naive-sgldlp-l": (0.275, 9.0), "vc-sgldlp-l": (0.275, 0.3), "csgldlp-f": (0.27, 0.02),
    "vc-csgldlp-l": (0.27, 0.25),
}  # fmt: skip
FIVE = ("naive-sgldlp-l", "vc-sgldlp-l", "sgdlp-l", "sgldlp-f", "sgdlp-f")


def run(
    experiment: str = "digits", method: str = "vc-sgldlp-l", format: str = "bfp8", seed: int = 0, **changes: Any
) -> dict[str, Any]:
    """A result; ``changes`` replace its fields."""
    random = Random(ascii((experiment, method, format, seed)))
    base, slope = QUALITY.get(method, (0.3, 0.1))
    gap = 2.0 ** -int(format.split(".")[1]) if format.startswith("fixed") else 2.0**-6
    nll = base + slope * gap + abs(random.gauss(0, 0.001))
    samples = 1 if method.startswith("sgd") else 20
    steps = [500 + 25 * i for i in range(samples)]
    scores = {"error": 0.28 * nll, "nll": nll, "brier": 0.45 * nll, "ece": (0.03 if samples == 1 else 0.01) + nll / 50}
    result = {
        "experiment": experiment,
        "version": "0.5.0",
        "command": f"qlangevin run {experiment} --method {method} --format {format} --seed {seed}",
        "settings": {"method": method, "format": format, "seed": seed, "epochs": 20, "batch": 64, "lr": 0.1},
        "environment": {
            "machine": "a machine",
            "cores": 2,
            "kernels": "native (avx2)",
            "threads": 1,
            "torch": "2.13.0",
        },
        "data": {"name": "mnist", "train": 60000, "test": 10000, "note": None},
        "model": {"name": "LogisticRegression", "weights": 7850},
        "scores": scores | ({"top5": 0.1 * nll} if experiment == "imagenet" else {}),
        "single": {name: value * (1 if samples == 1 else 1.15) for name, value in scores.items()},
        "reliability": reliability(random, scores["ece"]),
        "trace": {
            "steps": steps,
            "log_likelihood": [-1.1 * nll + random.gauss(0, 0.004) for _ in steps],
            "error": [0.3 * nll for _ in steps],
        },
        "r_hat": None if samples == 1 else 1 + abs(random.gauss(0, 0.03)),
        "ess": None if samples == 1 else 12.0,
        "memory": {"training": 4.0 if format == "fp32" else 1.0, "sample": 4.0 if format == "fp32" else 1.01},
        "steps": 1000,
        "samples": samples,
        "seconds": {"train": 8.0 + random.random(), "evaluate": 1.2},
        "finished": f"2026-11-16T18:00:{seed % 60:02d}Z",
    }
    return result | changes


def reliability(random: Random, ece: float) -> dict[str, Any]:
    """Ten bins, the first two empty, overconfident by the ECE."""
    counts = [0, 0, 3, 11, 60, 150, 240, 400, 900, 8236]
    middle = [0.05 + 0.1 * i for i in range(10)]
    right = [max(0.0, m - ece + random.gauss(0, 0.3 / (n + 9) ** 0.5)) for m, n in zip(middle, counts, strict=True)]
    return {
        "edges": [i / 10 for i in range(11)],
        "counts": counts,
        "confidence": [m if n else None for m, n in zip(middle, counts, strict=True)],
        "accuracy": [min(1.0, r) if n else None for r, n in zip(right, counts, strict=True)],
    }


def runs(experiment: str, methods: Sequence[str], format: str, seeds: int = 3, **changes: Any) -> list[dict[str, Any]]:
    return [run(experiment, method, format, seed, **changes) for method in methods for seed in range(seeds)]


def full(experiment: str, seeds: int = 3, **changes: Any) -> list[dict[str, Any]]:
    return runs(experiment, ("sgldfp", "sgdfp"), "fp32", seeds, **changes)


def sweep(
    experiment: str = "mnist-logistic", widths: Sequence[int] = (2, 4, 6, 8, 10, 12, 14), seeds: int = 3
) -> list[Any]:
    """A sweep over fractional bits, with 2 integer bits, as in the paper."""
    low = [result for bits in widths for result in runs(experiment, FIVE, f"fixed{bits + 2}.{bits}", seeds)]
    return [*full(experiment, seeds), *low]


def read_files(folder: Path) -> dict[str, bytes]:
    """All files in and below a folder, by their relative paths."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run a command that must fail with one sentence on standard error and nothing else; return the sentence."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("qlangevin: error: ")
    assert "Traceback" not in line
    return line.removeprefix("qlangevin: error: ")
