"""Bytes a weight, and time of a sampler's step, of a learning coefficient of a GPT-2-like model; devinterp beside it.

    OMP_NUM_THREADS=1 python -m benchmarks.llc_memory --out docs/results/llc

Memory is the peak of the resident memory while a chain steps, less that before the model was made, over the number of weights:
the user's model, the chain's weights, centre, gradients and all temporary ones. A sequence has 8 tokens, so that activations
take next to nothing. Each case has a process of its own. Times are of the step alone, with
gradients given: process time, the median of rounds in which all cases take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qlangevin as ql
from qlangevin.experiments.environment import environment

CASES = (
    ("qlangevin", "float32", "bfp8"), ("qlangevin", "bfloat16", "bfp8"), ("qlangevin", "bfloat16", "bf16"),
    ("qlangevin", "float32", "fp32"), ("devinterp", "float32", "fp32"), ("devinterp", "bfloat16", "bf16"),
)  # fmt: skip
STEPS, TIMED, ROUNDS = 3, 4_000_000, 11
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system at once, and does not count
SETTINGS: dict[str, Any] = {"lr": 1e-7, "nbeta": 100.0, "localization": 100.0}


def make_model(dtype: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8000, n_positions=64, n_embd=640, n_layer=8, n_head=8)
    return GPT2LMHeadModel(config).to(getattr(torch, dtype)).eval()  # type: ignore[no-any-return]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Peak:
    """The largest resident memory while the context lasts, looked at every millisecond."""

    def __enter__(self) -> Peak:
        self.bytes, self.ended = resident(), threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def _look(self) -> None:
        while not self.ended.wait(0.001):
            self.bytes = max(self.bytes, resident())

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


def run_ours(model: nn.Module, ids: torch.Tensor, format: str) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return ql.slt.token_losses(model, batch[0])

    loader = DataLoader(TensorDataset(ids), batch_size=1)
    ql.slt.llc(model, loader, loss, weights=format, chains=1, draws=4, burn_in=0, **SETTINGS)


def run_theirs(model: nn.Module, ids: torch.Tensor) -> None:
    """A chain as devinterp's ``sample_single_chain`` runs it, on a copy of the model."""
    from copy import deepcopy

    from devinterp.optim import SGMCMC

    mine = deepcopy(model)
    sampler = SGMCMC.sgld(mine.parameters(), **SETTINGS)
    for _ in range(STEPS + 1):
        ql.slt.token_losses(mine, ids[:1]).mean().backward()
        sampler.step()
        sampler.zero_grad(set_to_none=True)


def measure_memory(library: str, dtype: str, format: str) -> dict[str, Any]:
    """Return bytes a weight; runs in a process of its own."""
    if library == "devinterp":
        import devinterp.optim  # noqa: F401
    ids = torch.randint(8000, (3, 8))
    tiny = nn.Sequential(nn.Embedding(8000, 4), nn.Linear(4, 8000))
    run_ours(tiny, ids, "bf16")  # imports, caches, kernels
    make_model("float32")
    before = resident()
    model = make_model(dtype)
    weights = sum(p.numel() for p in model.parameters())
    with Peak() as peak:
        if library == "qlangevin":
            run_ours(model, ids, format)
        else:
            run_theirs(model, ids)
    return {"weights": weights, "bytes_per_weight": (peak.bytes - before) / weights}


def make_step(library: str, dtype: str, format: str) -> Callable[[], Any]:
    """Return the step of a sampler of one large parameter that has a gradient."""
    p = nn.Parameter(torch.randn(1000, TIMED // 1000).to(getattr(torch, dtype)) * 0.05)
    if library == "qlangevin":
        model = nn.ParameterList([p])
        if format.startswith("bfp"):
            ql.pack(model, format)
        [p] = model.parameters()
        sampler: Any = ql.slt.Settings(num_data=1000, **SETTINGS).make_sampler([p])
    else:
        from devinterp.optim import SGMCMC

        sampler = SGMCMC.sgld([p], **SETTINGS)
    p.grad = torch.randn(p.shape, dtype=p.dtype)
    return sampler.step  # type: ignore[no-any-return]


def measure_times(cases: Sequence[tuple[str, str, str]]) -> list[float]:
    """Return nanoseconds a weight of a step of each case: the median of rounds in which all cases take turns."""
    steps, times = [make_step(*case) for case in cases], torch.zeros(ROUNDS + 1, len(cases))
    for turn in range(ROUNDS + 1):
        for i, step in enumerate(steps):
            began = time.process_time()
            step()
            times[turn, i] = time.process_time() - began
    found: list[float] = (times[1:].median(0).values / TIMED * 1e9).tolist()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/llc"))
    parser.add_argument("--case", nargs=3, help="measure one case, and print it")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.case:
        print(json.dumps(measure_memory(*options.case)))
        return
    rows = []
    for case in CASES:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.llc_memory", "--case", *case]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | RETURNED)
        if done.returncode:
            print(f"{case}: {done.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append({**dict(zip(("library", "model", "chain"), case, strict=True)), **found})
        print(case, {name: round(value, 2) for name, value in found.items()}, flush=True)
    known = [(row["library"], row["model"], row["chain"]) for row in rows]
    for row, nanoseconds in zip(rows, measure_times(known), strict=True):
        row["ns_per_weight"] = nanoseconds
        print(row)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "memory.json").write_text(json.dumps({"rows": rows, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
