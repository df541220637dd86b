"""Make all rows with all seeds, score them, and print a table. See the package."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import qlangevin as ql
from qlangevin.experiments.chain import build_network
from qlangevin.experiments.data import Examples, make_loader
from qlangevin.experiments.presets import EXPERIMENTS, Experiment
from qlangevin.experiments.score import TEST_BATCH
from qlangevin.prediction import metrics

from .outside import load_outside
from .rows import ROWS, Made, Work, read
from .table import Rows, table


def score_row(work: Work, made: Made, outside: Examples | None) -> dict[str, float]:
    """Score the average over the samples of all stores of a row, with activations in float32."""
    model = build_network(work.config, work.data)
    estimated = made.batch_norm and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    posterior = ql.Posterior.open(made.folders, model, batch_norm=_batches(work.data.train) if estimated else "stored")
    inside = list(posterior.uncertainty_loader(_batches(work.data.test), progress=False))
    scored = metrics.evaluate((uncertainty.mean, labels) for uncertainty, labels in inside)
    found = {name: scored[name] for name in ("error", "nll", "ece")}
    if outside is not None:
        found["auroc"] = metrics.ood(inside, posterior.uncertainty_loader(_batches(outside), progress=False))["entropy"]
    nbytes = sum(ql.SampleStore.open(folder).nbytes for folder in made.folders)
    return {**found, "bytes": nbytes, "samples": len(posterior), "steps": made.steps}


def _batches(examples: Examples) -> ql.Loader:
    return make_loader(examples, TEST_BATCH, shuffle=False)


def parse_options(given: list[str], preset: type[Experiment]) -> dict[str, Any]:
    """Return settings of the experiment from words such as epochs=5."""
    options = {}
    for word in given:
        name, _, value = word.partition("=")
        if name not in preset.__dataclass_fields__ or not value:
            sys.exit(f"alternatives: --option {word} is not a setting of {preset.name}, such as epochs=5")
        options[name] = json.loads(value)
    return options


def main() -> None:
    """Run and print."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="alternatives", description=__doc__)
    parser.add_argument("experiment", choices=sorted(EXPERIMENTS))
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
    options = {"temperature": 0.001} | parse_options(given.option, preset)
    out = given.out or Path("results") / "alternatives" / given.experiment
    out.mkdir(parents=True, exist_ok=True)
    config = preset(method="sgdfp", **options)
    kept = read(out / "scores.json")
    rows: Rows = kept.get("rows", {})
    outside = load_outside(config.load_data(given.data_dir), given.data_dir)
    for seed in given.seeds:
        work = Work(replace(config, seed=seed), out, given.data_dir, given.runs)
        for row in given.rows:
            if str(seed) in rows.get(row, {}):
                continue
            began = time.monotonic()
            rows.setdefault(row, {})[str(seed)] = score_row(work, ROWS[row](work), outside)
            print(f"{row}, seed {seed}: {rows[row][str(seed)]} in {time.monotonic() - began:.0f} s", flush=True)
            machine = {"python": platform.python_version(), "torch": torch.__version__, "library": ql.__version__}
            command = f"python -m benchmarks.alternatives {given.experiment} --seeds {' '.join(map(str, given.seeds))}"
            command += f" --option {' '.join(given.option)}" if given.option else ""
            text = {"command": command, "machine": machine, "settings": config.to_json(), "rows": rows}
            (out / "scores.json").write_text(json.dumps(text, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
