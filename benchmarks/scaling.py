"""Seconds, bytes sent and memory of a step on two ranks, measured and as `benchmarks.cost_model` estimates them.

Two processes with a thread each talk over the loopback device by gloo. The model's inputs are measured in the same job, all
taking turns: the step of one rank alone, the rounding of gradients for the wire, and a plain all-to-all. Nothing is fitted to
the step of two ranks.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cost_model import Job, Machine, estimate_step
from .memory import ENVIRONMENT, MB, can_measure
from .pair import NAMES, RANKS, SIZE, SOLO, UNCONNECTED, Case, Kind, Options
from .timing import Row

PATIENCE = 120  # seconds of starting up, beyond twice the seconds of measuring


def measure_pair(options: Options) -> dict[str, Any]:
    """Run `benchmarks.pair` in two processes and return the result of the first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    given = {name: value for name, value in asdict(options).items() if value is not None}
    command = [sys.executable, "-m", "benchmarks.pair", *(f"--{name}={value}" for name, value in given.items())]
    environment = {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    environment |= {"OMP_NUM_THREADS": "1"} | (ENVIRONMENT if options.memory else {})
    processes = []
    try:
        for rank in range(RANKS):
            env = os.environ | environment | {"RANK": str(rank)}
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1], env=env)
            )
        texts = [process.communicate(timeout=2 * options.seconds + PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{' '.join(command)} failed: {[process.returncode for process in processes]}")
    return dict(json.loads(texts[0]))


def job_of(kind: Kind, weights: int, batch: int = 0, **facts: Any) -> Job:
    """Return the cost model's description of a layout."""
    layout, _, wire = kind.partition(" ")
    known: Any = layout if layout in ("replicas", "shards") else "chains"
    packed = 1 + 1 / 1024 if kind in ("packed", "shards") else None  # a row of the MLP has so many weights, or more
    return Job(weights, batch, RANKS, known, wire=wire or None, packed=packed, every=0, **facts)


def rates(found: dict[str, Any]) -> dict[str, float]:
    """Return the bytes a second of plain exchanges, and the elements a second that are coded for each wire."""
    sizes = {"all-to-all": SIZE, "all-reduce": 2 * SIZE, "reduce-scatter": SIZE}
    least = {name: seconds for name, seconds in found["least"].items() if name != "latency"}
    return {name: sizes.get(name, 2 * found["weights"]) / seconds for name, seconds in least.items()}


def comparison(case: str, found: dict[str, Any]) -> list[Row]:
    """Return the measured steps beside the estimated ones."""
    weights, best, rate = found["weights"], found["best"], rates(found)
    title = f"{case}, {weights / 1e6:.1f}M weights: a step on two ranks of one thread, gloo"
    rows = []
    for kind, name in NAMES.items():
        compute, stepping, alone = best["packed" if kind == "shards" else "floats"]
        machine = Machine(
            network=rate["all-to-all"],
            latency=found["least"]["latency"],
            stepping=weights / stepping,
            coding=rate.get(kind, math.inf),
        )
        facts = {name: found[name] for name in ("tensors", "layers")}
        expected = estimate_step(job_of(kind, weights, seconds=compute, **facts), machine)
        seconds = best[kind][2] * 1e3
        rows.append(Row(title, name, seconds, "ms", "the model", expected.seconds * 1e3, "time"))
        rows.append(Row(title, f"{name}, sent", found["sent"][kind] / MB, "MB", "the model", expected.sent / MB))
        if kind != "chains":
            rows.append(Row(title, f"{name}, over one rank", seconds, "ms", "one rank", alone * 1e3, "time"))
    return rows


def calibration(case: str, found: dict[str, Any]) -> list[Row]:
    """Return the measured inputs of the model."""
    title, best = f"{case}: the model's inputs, and more; {found['rounds']} rounds", found["best"]
    rows = [
        Row(title, f"{name}, {part}", best[kind][i] * 1e3, "ms")
        for kind, name in (SOLO | UNCONNECTED).items()
        for i, part in enumerate(("forward and backward", "the sampler's step"))
    ]
    names = {str(kind): name for kind, name in NAMES.items()}
    for name, rate in rates(found).items():
        if name in names:
            rows.append(Row(title, f"{names[name]}, to the wire and back", 1e9 / rate, "ns a weight"))
        else:
            rows.append(Row(title, f"{name} of 32 MB, over what has to be sent", rate / 1e9, "GB/s"))
    return [*rows, Row(title, "all-to-all of 128 bytes", found["least"]["latency"] * 1e6, "µs")]


def memory(case: Case) -> list[Row]:
    """Return the measured memory of each layout beside the estimated one."""
    rows = []
    kinds: list[Kind] = ["floats", "packed", *(kind for kind in NAMES if kind != "chains")]
    for kind in kinds:
        found = measure_pair(Options(case, memory=kind))
        weights = found["weights"]
        expected = estimate_step(job_of(kind, weights, largest=found["largest"]), Machine()).memory
        title = f"{case}, {weights / 1e6:.1f}M weights: the most bytes a weight that a rank holds, few examples"
        name = {"floats": "one rank, floats", "packed": "one rank, packed, step in backward"}.get(kind) or NAMES[kind]
        rows.append(Row(title, name, found["peak"] / weights, "bytes", "the model", expected / weights, "memory"))
    return rows


def run(seconds: float, quick: bool) -> list[Row]:
    """Measure all cases; a quick run leaves out the ResNet and memory."""
    cases: list[Case] = ["mlp"] if quick else ["mlp", "resnet"]
    rows = []
    for case in cases:
        found = measure_pair(Options(case, seconds / len(cases)))
        rows += comparison(case, found) + calibration(case, found)
    return rows + (memory("mlp") if can_measure() and not quick else [])
