"""The learning coefficient of a language model while it learns, with chains in float32, bf16 and 8 bits.

    OMP_NUM_THREADS=1 python -m benchmarks.llc_training --out docs/results/llc

A transformer of two layers learns the bytes of Python's reference (the texts of ``help()``, which come with Python). Its learning
coefficient is estimated at checkpoints. The same seed has the same batches and normal numbers in all formats, so that a format is
compared with float32 chain by chain.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qlangevin as ql
from benchmarks.llc_transformer import Transformer
from qlangevin.experiments.environment import environment

FORMATS = (None, "bf16", "bfp8")
LENGTH, WIDTH, HEADS, SEQUENCES, BATCH = 64, 64, 4, 4096, 32
CHECKPOINTS = (30, 100, 200, 400, 800, 1500, 3000)
LR, LOCALIZATION, CHAINS, DRAWS, BURN_IN = 5e-5, 1000.0, 4, 100, 60
COLOURS = {"fp32": "#7a7a7a", "bf16": "#0072b2", "bfp8": "#009e73"}


def read_text() -> Tensor:
    """Return byte sequences of Python's reference, [sequence, byte]; each byte value that occurs has a number."""
    from pydoc_data.topics import topics

    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    _, numbers = text.unique(return_inverse=True)
    sequences: Tensor = numbers[: SEQUENCES * LENGTH].view(-1, LENGTH)
    return sequences


def train(ids: Tensor, checkpoints: Sequence[int]) -> Iterator[tuple[int, Transformer]]:
    """Train, and yield the model at each checkpoint."""
    torch.manual_seed(0)
    model = Transformer(int(ids.max()) + 1, LENGTH, WIDTH, HEADS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, checkpoints[-1])
    generator = torch.Generator().manual_seed(0)
    for step in range(checkpoints[-1] + 1):
        if step in checkpoints:
            yield step, model
        optimizer.zero_grad()
        batch = ids[torch.randint(len(ids), (BATCH,), generator=generator)]
        ql.slt.token_losses(model, batch).mean().backward()
        optimizer.step()
        schedule.step()


def estimate(model: nn.Module, ids: Tensor, format: str | None, draws: int, chains: int) -> ql.slt.LLC:
    """Estimate the learning coefficient where the model is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ql.QLangevinWarning)  # early checkpoints are at no minimum
        return ql.slt.llc(
            model, DataLoader(TensorDataset(ids), batch_size=BATCH), lr=LR, localization=LOCALIZATION, weights=format,
            chains=chains, draws=draws, burn_in=draws * BURN_IN // DRAWS,
        )  # fmt: skip


def summarize(found: ql.slt.LLC, reference: ql.slt.LLC) -> dict[str, Any]:
    """Return an estimate, and its difference from that in float32 with the standard error over chains."""
    apart = found.per_chain - reference.per_chain
    return {
        "llc": found.mean, "stderr": found.stderr, "r_hat": found.r_hat, "per_chain": found.per_chain.tolist(),
        "difference": float(apart.mean()), "difference_stderr": float(apart.std(ddof=1)) / math.sqrt(len(apart)),
        "sufficient": None if found.resolution is None else found.resolution["sufficient"],
    }  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw loss and learning coefficient against the step of training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = np.array([max(row["step"], 10) for row in rows])
    left.plot(steps, [row["loss"] for row in rows], "ko-", ms=4, lw=1)
    left.set(xscale="log", xlabel="step of training", ylabel="loss", title="loss at w*")
    for i, (name, colour) in enumerate(COLOURS.items()):
        values, errors = ([row["formats"][name][key] for row in rows] for key in ("llc", "stderr"))
        right.errorbar(
            steps * 1.05 ** (i - 1), values, errors, fmt="o-", ms=4, lw=1, capsize=2, color=colour, label=name
        )
    right.set(xscale="log", xlabel="step of training", ylabel="LLC", title="learning coefficient")
    right.legend(frameon=False)
    for ax in (left, right):
        ax.set_xticks(steps, ["0" if row["step"] == 0 else str(row["step"]) for row in rows])
        ax.minorticks_off()
    figure.savefig(path, dpi=130)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/llc"))
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--chains", type=int, default=CHAINS)
    parser.add_argument("--checkpoints", type=int, nargs="+", default=CHECKPOINTS, help="steps of training, ascending")
    options = parser.parse_args(arguments)
    ids, rows, began = read_text(), [], time.perf_counter()
    for step, model in train(ids, options.checkpoints):
        found = {format or "fp32": estimate(model, ids, format, options.draws, options.chains) for format in FORMATS}
        formats = {name: summarize(each, found["fp32"]) for name, each in found.items()}
        rows.append({"step": step, "loss": found["fp32"].init_loss, "formats": formats})
        text = {name: f"{each['llc']:.2f} ± {each['stderr']:.2f}" for name, each in formats.items()}
        print(f"step {step}: loss {rows[-1]['loss']:.3f}, {text}", flush=True)
    about = {
        "weights": sum(p.numel() for p in model.parameters()), "sequences": len(ids), "length": LENGTH, "batch": BATCH,
        "lr": LR, "localization": LOCALIZATION, "nbeta": ql.slt.default_nbeta(len(ids)), "chains": options.chains,
        "draws": options.draws, "burn_in": options.draws * BURN_IN // DRAWS,
        "seconds": round(time.perf_counter() - began), "environment": environment(),
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "training.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    draw(rows, options.out / "training.png")


if __name__ == "__main__":
    main()
