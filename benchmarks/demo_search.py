"""Prior and temperature of the demo's methods on digits, chosen on validation data by the same search for all.

    python -m benchmarks.demo_search [--steps N] [--out FILE]

The last 297 of the 1197 training images are validation data; each method trains on the other 900, with every weight decay and
temperature of the grid (SGD has no temperature). Chosen is the pair with the least validation NLL among those whose chains agree,
R-hat < 1.1. The test images are not looked at. Weight decay times N is the precision of the prior; the demo trains on all 1197
images with the weight decay chosen here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qlangevin import metrics
from qlangevin.experiments.demo.digits import CHOSEN, DigitSettings, run_digits
from qlangevin.experiments.demo.images import load_images

WEIGHT_DECAYS = (3e-4, 1e-3, 3e-3)
TEMPERATURES = (0.03, 0.1, 0.3)
TRAINED_ON, CONVERGED = 900, 1.1


def search(base: DigitSettings, steps: int) -> list[dict[str, Any]]:
    """Try the whole grid with one method; the best comes first."""
    images, tried = load_images(), []
    x, y = images.train[:TRAINED_ON], images.train_labels[:TRAINED_ON]
    sets, labels = {"validation": images.train[TRAINED_ON:]}, images.train_labels[TRAINED_ON:]
    for weight_decay in WEIGHT_DECAYS:
        for temperature in TEMPERATURES if base.samples else (0.0,):
            settings = replace(base, weight_decay=weight_decay, temperature=temperature, steps=steps)
            found = run_digits(settings, x, y, sets, lambda label, share: None)
            p = found.predictions["validation"]
            average = p.mean((0, 1)) if base.samples else p[0, -1]  # SGD is one network
            scores = metrics.evaluate(average, labels)
            if not base.samples:
                each = [metrics.evaluate(q, labels) for q in p[:, -1]]
                scores = {name: sum(s[name] for s in each) / len(each) for name in scores}
            row = {"weight_decay": weight_decay, "temperature": temperature, "r_hat": found.convergence[0], **scores}
            print(base.name, {name: round(v, 4) if v is not None else v for name, v in row.items()}, flush=True)
            tried.append(row)
    return sorted(tried, key=lambda row: ((row["r_hat"] or 1.0) >= CONVERGED, row["nll"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=CHOSEN[0].steps)
    parser.add_argument("--out", type=Path, default=Path("results/demo_search.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {settings.name: search(settings, options.steps) for settings in CHOSEN}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))
    for name, rows in found.items():
        print("chosen", name, rows[0])


if __name__ == "__main__":
    main()
