"""End-to-end times: importing the library, and ten million steps of Figure 1."""

from __future__ import annotations

import subprocess
import sys

import torch

import qlangevin as ql
from qlangevin.quantization import random

from .timing import PROCESSOR, Goal, Row

GROUP = "to wait for"
IMPORT = "import time, torch; start = time.perf_counter(); import qlangevin; print(time.perf_counter() - start)"
STEPS, CHAINS, ALPHA = 5000, 2000, 1e-2


def import_time(tries: int) -> Row:
    """Time the part of ``import qlangevin`` that comes after ``import torch``, in new processes."""
    times = []
    for _ in range(tries):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        times.append(float(done.stdout))
    return Row(GROUP, "import qlangevin, after torch", min(times), "s", goal=Goal("<", 0.3))


def gaussian_time(tries: int) -> Row:
    """Time VC SGLDLP-L on a standard Gaussian in fixed8.3; the variance of the last states must be that of the target."""
    torch.set_num_threads(1)
    times = []
    for seed in range(tries):
        key, variance = ql.Key(seed), torch.tensor(2 * ALPHA)
        theta = ql.quantize(random.normal(key, CHAINS), "fixed8.3")
        start = PROCESSOR()
        for k in range(1, STEPS + 1):
            theta = ql.corrected(theta - ALPHA * theta, variance, "fixed8.3", key.at(k))
        times.append(PROCESSOR() - start)
        if not 0.8 < float(theta.var()) < 1.25:  # 2000 independent states: six standard errors
            raise RuntimeError(f"the chains have variance {float(theta.var()):.3f}, not about 1")
    return Row(GROUP, f"Figure 1, {STEPS * CHAINS / 1e6:g}M steps", min(times), "s", goal=Goal("<", 2))


def run(tries: int) -> list[Row]:
    return [import_time(tries), gaussian_time(tries)]
