"""``python -m benchmarks.guarded_convolutions``: derivatives of many random convolutions, with guards around their memory.

It compiles guarded_memory.c and runs itself with it, as on a CPU without AVX-512. A convolution that writes outside of its
memory is printed, with exit code 1. ``--plain`` tries PyTorch's own convolutions, to see which of them do (PyTorch 2.13:
strided ones of kernel size 1 in channels-last memory, with fewer than 8 channels; see `qlangevin.lowering.convolution`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import tyro
from torch import nn

import qlangevin as ql

WAYS = ("float32", "packed", "autocast", "without batch", "without kernels")
SETTINGS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


@dataclass(frozen=True)
class Options:
    """Differentiate random convolutions and look for writes out of bounds."""

    count: int = 2000
    """Number of convolutions."""
    seed: int = 0
    """Seed of their shapes."""
    plain: bool = False
    """Leave them as PyTorch has them: not lowered."""


def random_convolution(rng: Random) -> tuple[Any, torch.Tensor]:
    """Return a convolution, most often of kernel size 1, and an input in channels-last memory, most often."""
    dims, groups, size = rng.choice((1, 2, 2, 2, 3)), rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 1, 1, 2, 3))
    stride = tuple(rng.choice((1, 2, 2, 3)) for _ in range(dims))
    inputs, outputs = (groups * rng.randint(1, 20 // groups) for _ in range(2))
    options: dict[str, Any] = {"stride": stride, "groups": groups, "bias": rng.random() < 0.5}
    kind = "ConvTranspose" if (transposed := rng.random() < 0.4) else "Conv"
    if transposed:
        options["output_padding"] = tuple(s - 1 for s in stride)
    else:
        options["padding"] = rng.choice((0, 0, size // 2, "valid"))
    layer = getattr(nn, f"{kind}{dims}d")(inputs, outputs, size, **options)
    pixels = [s * rng.choice((2, 4, 8) if dims < 3 else (1, 2)) + size - 1 for s in stride]
    x = torch.randn(rng.choice((1, 2, 6, 17)), *pixels, inputs).movedim(-1, 1)
    return layer, x if rng.random() < 0.8 else x.contiguous()


def differentiate(rng: Random, plain: bool) -> str:
    """Compute first and, half of the time, second derivatives of a random convolution; return its description."""
    layer, x = random_convolution(rng)
    way = rng.choice(WAYS)
    model = nn.Sequential(layer)
    if not plain:
        ql.lower(model, "fixed8.3", "fixed8.3")
    if way == "packed":
        ql.pack(model, "bfp8")
    x = (x[0] if way == "without batch" else x).detach().requires_grad_()
    wanted, twice = [x, *model.parameters()], rng.random() < 0.5
    kernels = ql.native.disabled() if way == "without kernels" else contextlib.nullcontext()
    with kernels, torch.autocast("cpu", enabled=way == "autocast"):
        first = torch.autograd.grad(model(x).float().square().sum(), wanted, create_graph=twice)
        if twice:
            torch.autograd.grad(torch.stack([g.float().square().sum() for g in first]).sum(), wanted)
    return f"{layer}, input {tuple(x.shape)}, strides {x.stride()}, {way}{', second derivatives' * twice}"


def scan(options: Options) -> int:
    """Differentiate in this process, whose memory is guarded."""
    torch.set_num_threads(1)
    damaged, blocks = (ctypes.c_long.in_dll(ctypes.CDLL(None), f"{word}_blocks") for word in ("damaged", "guarded"))
    found = 0
    for number in range(options.count):
        damaged.value = 0
        what = differentiate(Random(f"{options.seed} {number}"), options.plain)
        if damaged.value:
            found += 1
            print(what, flush=True)
    print(f"{found} of {options.count} convolutions wrote out of bounds; {blocks.value} blocks were guarded")
    return 1 if found or not blocks.value else 0


def main(options: Options) -> int:
    if "guarded" in os.environ.get("LD_PRELOAD", ""):
        return scan(options)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "guarded.so"
        source = Path(__file__).parent / "guarded_memory.c"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", library, "-ldl", "-lpthread"], check=True)
        variables = os.environ | SETTINGS | {"LD_PRELOAD": str(library)}
        return subprocess.run(
            [sys.executable, "-m", __spec__.name, *sys.argv[1:]], env=variables, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.guarded_convolutions")))
