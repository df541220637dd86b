"""Is an estimate in 8 bits or bf16 biased? A small transformer, trained here, estimated with many seeds in each format.

    OMP_NUM_THREADS=1 python -m benchmarks.llc_control --out docs/results/llc

Every seed is an estimate of its own: other noise, other batches, other rounding. The same seed has the same batches and the same
normal numbers in all formats, so that differences from float32 are taken seed by seed. devinterp, if it is installed, estimates
the same in float32; its batches are those of its own order, so that its difference is one of means. ``inflation`` is what
`diagnose` expects: the variance of a step over the one asked for, the mean over weights and seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qlangevin as ql
from benchmarks.llc_transformer import Transformer
from qlangevin.experiments.environment import environment

FORMATS = (None, "bf16", "bfp8", "bfp8/16")
LENGTH, WIDTH, HEADS = 32, 32, 2
SETTINGS = ((2e-5, 1e4), (2e-6, 1e5))  # ε and γ: noise well above what 8-bit rounding adds, and near it
DRAWS, BURN_IN, BATCH = 100, 40, 16


def read_text(limit: int) -> Tensor:
    """Return the English of the licence of this repository as byte sequences; each byte value that occurs has a number."""
    text = torch.tensor(list((Path(__file__).parents[1] / "LICENSE").read_bytes()))
    _, numbers = text.unique(return_inverse=True)
    count = min(limit, len(numbers) // LENGTH)
    sequences: Tensor = numbers[: count * LENGTH].view(count, LENGTH)
    return sequences


def train(ids: Tensor, steps: int, seed: int = 0) -> Transformer:
    """Train to a low loss; the learning rate falls to zero, so that w* is near a minimum."""
    torch.manual_seed(seed)
    model = Transformer(int(ids.max()) + 1, LENGTH, WIDTH, HEADS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        batch = ids[torch.randint(len(ids), (64,))]
        ql.slt.token_losses(model, batch).mean().backward()
        optimizer.step()
        schedule.step()
    model.eval()
    return model


def estimate(
    model: nn.Module, ids: Tensor, format: str | None, where: tuple[float, float], seed: int, draws: int
) -> ql.slt.LLC:
    loader = DataLoader(TensorDataset(ids), batch_size=BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ql.QLangevinWarning)
        return ql.slt.llc(
            model, loader, lr=where[0], localization=where[1], weights=format, chains=1, draws=draws,
            burn_in=draws * BURN_IN // DRAWS, seed=seed,
        )  # fmt: skip


def estimate_theirs(
    model: Transformer, ids: Tensor, where: tuple[float, float], seed: int, draws: int, baseline: Tensor
) -> float:
    """Return devinterp's estimate in float32, paired with the losses of the same examples at w* as ours is."""
    from devinterp.optim import SGMCMC

    mine, burn_in = copy.deepcopy(model), draws * BURN_IN // DRAWS
    nbeta, total = ql.slt.default_nbeta(len(ids)), 0.0
    torch.manual_seed(seed)
    sampler = SGMCMC.sgld(mine.parameters(), lr=where[0], nbeta=nbeta, localization=where[1])
    numbers = torch.cat([torch.randperm(len(ids)) for _ in range(1 + (burn_in + draws) * BATCH // len(ids))])
    for step in range(burn_in + draws):
        some = numbers[step * BATCH : (step + 1) * BATCH]
        loss = ql.slt.token_losses(mine, ids[some]).mean()
        sampler.zero_grad()
        loss.backward()
        sampler.step()
        total += float(loss.detach()) - float(baseline[some].mean()) if step >= burn_in else 0.0
    return nbeta * total / draws


def summarize(values: Sequence[float], reference: Sequence[float], paired: bool) -> dict[str, float]:
    """Return mean and standard error over seeds, and the difference from float32 with its own."""
    v, r = torch.tensor(values, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    error = (v - r).std() if paired else (v.var() + r.var()).sqrt()
    count = math.sqrt(len(v))
    return {
        "mean": float(v.mean()), "stderr": float(v.std()) / count, "difference": float(v.mean() - r.mean()),
        "difference_stderr": float(error) / count, "percent": 100 * float(v.mean() / r.mean() - 1),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/llc"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--train-steps", type=int, default=600)
    options = parser.parse_args(arguments)
    ids = read_text(320)
    model, began = train(ids, options.train_steps), time.perf_counter()
    with torch.no_grad():
        baseline = ql.slt.token_losses(model, ids).mean(1)
    print(f"{sum(p.numel() for p in model.parameters())} weights, {len(ids)} sequences, loss {baseline.mean():.3f}")
    tables = []
    for where in SETTINGS:
        found, inflations = run_seeds(model, ids, where, baseline, options.seeds, options.draws)
        reference = found["qlangevin fp32"]
        rows: dict[str, dict[str, Any]] = {
            name: {
                "values": values, "inflation": mean(inflations.get(name)),
                **summarize(values, reference, name.startswith("qlangevin")),
            }
            for name, values in found.items()
        }  # fmt: skip
        tables.append({"lr": where[0], "localization": where[1], "rows": rows})
        for name, row in rows.items():
            difference = f"{row['difference']:+.3f} ± {row['difference_stderr']:.3f}"
            text = f"{row['mean']:8.3f} ± {row['stderr']:.3f}, {row['percent']:+.1f} %, difference {difference}"
            print(f"{name:20s} {text}, inflation {row['inflation']}")
    about = {
        "weights": sum(p.numel() for p in model.parameters()), "sequences": len(ids), "loss": float(baseline.mean()),
        "nbeta": ql.slt.default_nbeta(len(ids)), "batch": BATCH, "draws": options.draws,
        "burn_in": options.draws * BURN_IN // DRAWS, "seeds": options.seeds, "train_steps": options.train_steps,
        "seconds": round(time.perf_counter() - began), "environment": environment(),
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "control.json").write_text(json.dumps({**about, "settings": tables}, indent=1) + "\n")


def run_seeds(
    model: Transformer, ids: Tensor, where: tuple[float, float], baseline: Tensor, seeds: int, draws: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the estimates of each library and format, one for each seed, and the inflations that our samplers expect."""
    found: dict[str, list[float]] = {}
    inflations: dict[str, list[float]] = {}
    for seed in range(seeds):
        for format in FORMATS:
            one, name = estimate(model, ids, format, where, seed, draws), f"qlangevin {format or 'fp32'}"
            found.setdefault(name, []).append(one.mean)
            if one.resolution is not None:
                inflations.setdefault(name, []).append(one.resolution["total"]["inflation"])
        with suppress(ImportError):
            theirs = estimate_theirs(model, ids, where, seed, draws, baseline)
            found.setdefault("devinterp fp32", []).append(theirs)
        print(f"{where}, seed {seed}:", {name: round(values[-1], 3) for name, values in found.items()}, flush=True)
    return found, inflations


def mean(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


if __name__ == "__main__":
    main()
