"""The program; see `qlangevin.gpu.check`."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time

import torch

SECONDS, QUICK_SECONDS = 75.0, 50.0  # in which comparisons may begin; training and timing need the rest of two minutes
NO_TRITON = (
    "Triton is not installed, so there are no kernels to check: tensors on GPUs take the PyTorch path, which is slower and gives "
    "the same bits. PyTorch's builds for CUDA and ROCm bring Triton; otherwise: pip install 'qlangevin[gpu]'"
)
IN_INTERPRETER = (
    "There is no GPU here that PyTorch sees. The kernels run in Triton's interpreter instead, on small tensors on the CPU: this "
    "compares their bits, but neither compiles nor times them."
)
PLEA = "Please send this table with a report, also if nothing differs: GPUs differ, and most have not run these kernels before."


def main(arguments: list[str] | None = None) -> int:
    """Check the kernels; return 0, 1 if anything differs, 2 if nothing could be checked."""
    options = parse(arguments)
    if importlib.util.find_spec("triton") is None:
        print(NO_TRITON, file=sys.stderr)
        return 2
    try:
        device = find_device(options.device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return run_in_interpreter(sys.argv[1:] if arguments is None else arguments)
    if device.type != "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 keeps Triton from compiling: unset it to check a GPU", file=sys.stderr)
        return 2
    return check(device, options.quick)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m qlangevin.gpu.check", description="Compare the GPU kernels with PyTorch."
    )
    parser.add_argument("--device", help="a device of PyTorch's, such as cuda:1; cpu is Triton's interpreter")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller tensors, and no times")
    return parser.parse_args(arguments)


def find_device(name: str | None) -> torch.device:
    """Return the device of that name, or the GPU that there is, or the CPU; raise ValueError if it is not there."""
    if name is None:
        gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return gpu if gpu is not None and gpu.type in ("cuda", "xpu") else torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"PyTorch has no device {name!r} here ({reason}); leave out --device to use what there is"
        ) from None
    return device


def run_in_interpreter(arguments: list[str]) -> int:
    """Start this program again: Triton reads the variable when it is imported, which may have happened."""
    command = [sys.executable, "-m", "qlangevin.gpu.check", *arguments]
    return subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=False).returncode


def check(device: torch.device, quick: bool) -> int:
    """Run all comparisons, and on a GPU the measurements; print the table."""
    from .comparing import Place  # not before it is known that there is Triton
    from .suite import comparisons
    from .table import comparison_lines, head_lines, measurement_head, measurement_line
    from .timing import measure_all

    start = time.monotonic()
    place = Place(device, "interpreter" if device.type == "cpu" else "kernels")
    if not place.has_kernels:
        print(f"there are no kernels for {device.type}: its tensors take the PyTorch path", file=sys.stderr)
        return 2
    print(*head_lines(describe(device), IN_INTERPRETER if device.type == "cpu" else ""), sep="\n", flush=True)
    differ = left_out = 0
    for result in comparisons(place, quick, start + (QUICK_SECONDS if quick else SECONDS)):
        differ += len(result.differ)
        left_out += result.left_out
        print(*comparison_lines(result), sep="\n", flush=True)
    if device.type != "cpu" and not quick:
        print(measurement_head())
        for measurement in measure_all(device):
            print(measurement_line(measurement), flush=True)
    verdict = f"{differ} comparisons differ" if differ else "no bit differs"
    verdict += f"; {left_out} comparisons were left out, because time was short" if left_out else ""
    print(f"\n{verdict}; {time.monotonic() - start:.0f} s\n{PLEA}")
    return 1 if differ else 0


def describe(device: torch.device) -> list[tuple[str, str]]:
    """Return versions and devices, each with its name."""
    found = [(name, importlib.metadata.version(name)) for name in ("qlangevin", "torch", "triton")]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        found.append(("GPU", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}"))
        found.append(("CUDA or ROCm", str(torch.version.cuda or torch.version.hip)))
        found.append(("driver", driver_version()))
    elif device.type != "cpu":
        found.append(("GPU", str(torch.get_device_module(device).get_device_name(device))))
    return [*found, ("Python", platform.python_version()), ("system", platform.platform())]


def driver_version() -> str:
    """Return the version of NVIDIA's driver as its own tool says, or the words "not known"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        said = []
    return said[0] if said else "not known"


if __name__ == "__main__":
    sys.exit(main())
