"""Bytes a weight, and time of a sampler's step, of a learning coefficient of a GPT-2-like model; devinterp beside it.

    OMP_NUM_THREADS=1 python -m benchmarks.llc_memory --out docs/results/llc

Memory is the resident memory of a process, less that before the model was made, over the number of weights: the user's model,
the chain's weights, centre, gradients and all temporary ones. ``peak`` is the largest of one chain, ``peak_4`` of four,
``between_steps`` the largest after a step. A sequence has 8 tokens, so that activations take next to nothing. Each case has a
process of its own. Times are of the step alone, with gradients given: processor time, the least of rounds in which all cases
take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qlangevin as ql
from benchmarks.timing import Contestant, measure
from qlangevin.experiments.environment import environment

CASES = (
    ("qlangevin", "bfp8", "bfp8"), ("qlangevin", "bfloat16", "bfp8"), ("qlangevin", "float32", "bfp8"),
    ("qlangevin", "bfloat16", "bf16"), ("qlangevin", "float32", "fp32"),
    ("devinterp", "float32", "fp32"), ("devinterp", "bfloat16", "bf16"),
)  # fmt: skip
STEPS, TIMED, SECONDS = 4, 4_000_000, 20.0
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system at once, and does not count
SETTINGS: dict[str, Any] = {"lr": 1e-7, "nbeta": 100.0, "localization": 100.0}


def make_model(kind: str) -> nn.Module:
    """Return a model with weights of this dtype, or packed in this format."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8000, n_positions=64, n_embd=640, n_layer=8, n_head=8)
    model: nn.Module = GPT2LMHeadModel(config).eval()
    dtype = getattr(torch, kind, None)
    return ql.pack(model, kind) if dtype is None else model.to(dtype)


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


def run_ours(model: nn.Module, ids: torch.Tensor, format: str, chains: int, look: Callable[[int], None]) -> None:
    """Run chains of a few steps, one after another; ``look`` is called after each step."""
    loader = DataLoader(TensorDataset(ids), batch_size=1)
    ql.slt.llc(model, loader, weights=format, chains=chains, draws=STEPS, burn_in=0, progress=look, **SETTINGS)


def run_theirs(model: nn.Module, ids: torch.Tensor, look: Callable[[int], None]) -> None:
    """Run a chain as devinterp's ``sample_single_chain`` does, on a copy of the model."""
    from copy import deepcopy

    from devinterp.optim import SGMCMC

    mine = deepcopy(model)
    sampler = SGMCMC.sgld(mine.parameters(), **SETTINGS)
    for _ in range(STEPS):
        ql.slt.token_losses(mine, ids[:1]).mean().backward()
        sampler.step()
        sampler.zero_grad(set_to_none=True)
        look(1)


def measure_memory(library: str, kind: str, format: str) -> dict[str, Any]:
    """Return bytes a weight; runs in a process of its own."""
    seen: list[int] = []

    def look(steps: int) -> None:
        seen.append(resident())

    if library == "devinterp":
        import devinterp.optim  # noqa: F401
    ids = torch.randint(8000, (3, 8))
    tiny = nn.Sequential(nn.Embedding(8000, 4), nn.Linear(4, 8000))
    run_ours(tiny, ids, "bf16", 1, look)  # imports, caches, kernels
    make_model("float32")
    before = resident()
    model, found = make_model(kind), {}
    weights = sum(p.numel() for p in model.parameters())
    for name, chains in (("peak", 1), ("peak_4", 4)):
        seen.clear()
        with Peak() as peak:
            if library == "qlangevin":
                run_ours(model, ids, format, chains, look)
            else:
                for _ in range(chains):
                    run_theirs(model, ids, look)
        found[name] = (peak.bytes - before) / weights
        found.setdefault("between_steps", (max(seen) - before) / weights)
    return {"weights": weights, **found}


def make_step(library: str, kind: str, format: str) -> Callable[[], Any]:
    """Return the step of a sampler of one large parameter that has a gradient."""
    p = nn.Parameter(torch.randn(1000, TIMED // 1000).to(getattr(torch, kind, torch.float32)) * 0.05)
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


def measure_times(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row the nanoseconds a weight of its step; all rows take turns."""
    cases = {" ".join(case): case for case in ((row["library"], row["model"], row["chain"]) for row in rows)}
    times = measure({name: Contestant(make_step(*case)) for name, case in cases.items()}, SECONDS)
    for row, name in zip(rows, cases, strict=True):
        row["ns_per_weight"] = round(times[name] / TIMED * 1e9, 2)
        print(row)


def measure_cases() -> list[dict[str, Any]]:
    """Return the memory of all cases, each in a process of its own."""
    rows = []
    for case in CASES:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.llc_memory", "--case", *case]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | RETURNED)
        if done.returncode:
            print(f"{case}: {done.stderr.strip().splitlines()[-1]}")
            continue
        found = {name: round(value, 2) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}
        rows.append({**dict(zip(("library", "model", "chain"), case, strict=True)), **found})
        print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/llc"))
    parser.add_argument("--case", nargs=3, help="measure the memory of one case, and print it")
    parser.add_argument("--times", action="store_true", help="measure times alone, and add them to the file")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.case:
        print(json.dumps(measure_memory(*options.case)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "memory.json"
    rows = json.loads(file.read_text())["rows"] if options.times else measure_cases()
    file.write_text(json.dumps({"rows": rows, "environment": environment()}, indent=1) + "\n")
    measure_times(rows)
    file.write_text(json.dumps({"rows": rows, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
