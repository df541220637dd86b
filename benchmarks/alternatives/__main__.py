"""Make all rows with all seeds, score them, and print a table. See the package."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qlangevin as ql
from qlangevin._validate import describe_differences
from qlangevin.experiments.chain import build_network
from qlangevin.experiments.config import MAY_DIFFER_IN_SEEDS
from qlangevin.experiments.data import Examples, make_loader
from qlangevin.experiments.presets import EXPERIMENTS, Experiment
from qlangevin.experiments.score import TEST_BATCH
from qlangevin.prediction import metrics
from qlangevin.storage import files

from .outside import load_outside
from .rows import ESTIMATED, ROWS, Made, Work
from .table import Rows, table


def score_row(work: Work, made: Made, outside: Examples | None) -> dict[str, float]:
    """Score the average over the samples of all stores of a row, with activations in float32."""
    model = build_network(work.config, work.data)
    estimated = made.batch_norm and has_batch_norm(model)
    posterior = ql.Posterior.open(made.folders, model, batch_norm=_batches(work.data.train) if estimated else "stored")
    inside = list(posterior.uncertainty_loader(_batches(work.data.test), progress=False))
    scored = metrics.evaluate((uncertainty.mean, labels) for uncertainty, labels in inside)
    found = {name: scored[name] for name in ("error", "nll", "ece")}
    if outside is not None:
        found["auroc"] = metrics.ood(inside, posterior.uncertainty_loader(_batches(outside), progress=False))["entropy"]
    nbytes = sum(ql.SampleStore.open(folder).nbytes for folder in made.folders)
    return {**found, "bytes": nbytes, "samples": len(posterior), "steps": made.steps}


def has_batch_norm(model: nn.Module) -> bool:
    """Tell whether a network has batch normalization."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def _batches(examples: Examples) -> ql.Loader:
    return make_loader(examples, TEST_BATCH, shuffle=False)


def parse_options(given: list[str], preset: type[Experiment]) -> dict[str, Any]:
    """Return settings of the experiment from words such as epochs=5; rows and --seeds decide the method, format and seed."""
    options = {}
    for word in given:
        name, _, value = word.partition("=")
        if name not in preset.__dataclass_fields__ or not value:
            raise ValueError(f"--option {word} is not a setting of {preset.name}, such as epochs=5")
        if name in ("method", "format", "seed"):
            raise ValueError(f"--option {word}: choose methods and formats by --rows, and seeds by --seeds")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value  # a word
    return options


def parse() -> tuple[argparse.Namespace, Experiment]:
    """Return the command's words, and the settings that all rows share."""
    parser = argparse.ArgumentParser(prog="alternatives", description=__doc__)
    # A chain that begins at the network of another run has no first step of its own that all rows could share.
    parser.add_argument(
        "experiment", choices=sorted(n for n, p in EXPERIMENTS.items() if p(method="sgldfp").warm_start is None)
    )
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--runs", type=Path, help="folder of a sweep: its runs with the same settings are not done again"
    )
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the experiment")
    given = parser.parse_args()
    preset = EXPERIMENTS[given.experiment]
    try:
        return given, preset(method="sgdfp", **{"temperature": 0.001} | parse_options(given.option, preset))
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def read_scores(path: Path, config: Experiment) -> Rows:
    """Return the rows that were scored before. Raises ValueError if that was with other settings, but for the seed."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if kept:
        there, here = ({**s, **dict.fromkeys(MAY_DIFFER_IN_SEEDS)} for s in (kept["settings"], config.to_json()))
        if differences := describe_differences(there, here):
            raise ValueError(f"{path} has scores of other settings: {'; '.join(differences)}. Choose another --out")
    rows: Rows = kept.get("rows", {})
    return rows


def save(out: Path, config: Experiment, rows: Rows) -> None:
    """Write scores with what made them."""
    machine = {"python": platform.python_version(), "torch": torch.__version__, "library": ql.__version__}
    command = shlex.join(["python", "-m", "benchmarks.alternatives", *sys.argv[1:]])
    text = json.dumps({"command": command, "machine": machine, "settings": config.to_json(), "rows": rows}, indent=1)
    files.write(out / "scores.json", [text.encode()])


def main() -> None:
    """Run and print."""
    torch.set_num_threads(1)
    given, config = parse()
    out = given.out or Path("results") / "alternatives" / given.experiment
    out.mkdir(parents=True, exist_ok=True)
    try:
        rows = read_scores(out / "scores.json", config)
    except ValueError as error:
        sys.exit(f"alternatives: {error}")
    save(out, config, rows)  # what is interrupted before the first score is not mixed with other settings either
    data = config.load_data(given.data_dir)
    outside, normalized = load_outside(data, given.data_dir), has_batch_norm(build_network(config, data))
    for seed in given.seeds:
        work = Work(replace(config, seed=seed), out, given.data_dir, given.runs)
        for row in given.rows:
            if str(seed) in rows.get(row, {}) or (row == ESTIMATED and not normalized):
                continue
            began = time.monotonic()
            rows.setdefault(row, {})[str(seed)] = score_row(work, ROWS[row](work), outside)
            print(f"{row}, seed {seed}: {rows[row][str(seed)]} in {time.monotonic() - began:.0f} s", flush=True)
            save(out, config, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
