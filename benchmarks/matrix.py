"""``python -m benchmarks.matrix``: the tests as on other machines, and under checkers of memory; `make matrix`.

A stage is a process with an environment of its own. A stage that fails does not stop the others; one whose tools are missing
is skipped. The table says what each ran and what became of it; the output of each is in results/matrix. The exit code is 1 if
one failed. ``--only valgrind`` runs the stages whose name contains the word.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from qlangevin import native

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "results" / "matrix"
TESTS = (sys.executable, "-m", "pytest", "-q")
QUICK = ("-m", "not slow and not distributed")
CORE = ("tests/quantization", "tests/native", "tests/sampling", "tests/lowering")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
MALLOC_DEBUG = "libc_malloc_debug.so.0"  # glibc 2.34 moved the checks there
CHECKED_MALLOC = {"LD_PRELOAD": MALLOC_DEBUG, "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "7"}
WRITE_PAST_THE_END = """
import ctypes
python = ctypes.pythonapi  # its malloc is the one that is preloaded; a malloc looked up by name would not be
python.PyMem_RawMalloc.restype, python.PyMem_RawFree.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
block = python.PyMem_RawMalloc(20)
ctypes.memset(block, 65, 21)
python.PyMem_RawFree(block)
"""


@dataclass(frozen=True)
class Stage:
    """A command with environment variables. ``missing`` returns what the stage needs and does not find, or nothing."""

    name: str
    what: str
    command: tuple[str, ...]
    minutes: float
    variables: Mapping[str, str] = field(default_factory=dict)
    missing: Callable[[], str] = lambda: ""


class Result(NamedTuple):
    stage: Stage
    outcome: Literal["passed", "failed", "skipped"]
    details: str
    seconds: float


# ---- stages


def stages() -> list[Stage]:
    """Return all stages, those that are most likely to find something first."""
    kernels = [(level, {"QLANGEVIN_KERNELS": level}) for level in native.levels()]
    return [
        Stage("AVX2", "all tests", TESTS, 20, AVX2),
        Stage("no vector code in PyTorch", "quick tests", (*TESTS, *QUICK), 6, {"ATEN_CPU_CAPABILITY": "default"}),
        Stage("no kernels", "quick core", (*TESTS, *QUICK, *CORE), 6, {"QLANGEVIN_KERNELS": "none"}),
        *(Stage(f"{level} kernels", "quick core", (*TESTS, *QUICK, *CORE), 6, v) for level, v in kernels),
        Stage("2 threads", "quick core", (*TESTS, *QUICK, *CORE), 6, {"QLANGEVIN_TEST_THREADS": "2"}),
        *memory_stages(),
        module_stage("kernel_fuzz", 10, "--count", "100000"),
        interpreted_stage(),
        ecosystem_stage(),
        module_stage("gpu_code", 60, missing=needs_module("triton")),
        module_stage("arm64", 2, missing=needs("aarch64-linux-gnu-g++")),
        module_stage("kills", 4, "--runs", "24"),
        module_stage("fuzz", 3, "--count", "2000"),
        module_stage("faults", 4, "--every", "5", missing=needs("cc")),
    ]


def interpreted_stage() -> Stage:
    """Return the stage that runs the GPU's kernels in Triton's interpreter."""
    command, variables = (*TESTS, "tests/gpu/interpreted"), {"TRITON_INTERPRET": "1"}
    return Stage("GPU kernels", "interpreted", command, 20, variables, needs_module("triton"))


def ecosystem_stage() -> Stage:
    """Return the stage that runs the tests with other people's libraries."""
    command = (*TESTS, "tests/integrations", "tests/test_readme.py")
    return Stage("ecosystem", "transformers, peft, Lightning", command, 10, missing=missing_ecosystem)


def missing_ecosystem() -> str:
    """Return the libraries that are missing: without them all tests would be skipped, and the stage would pass."""
    return ", ".join(
        filter(None, (needs_module(name)() for name in ("transformers", "peft", "accelerate", "lightning")))
    )


def memory_stages() -> list[Stage]:
    """Return the stages that run under a checker of memory."""
    checked = ("tests/native", "tests/lowering", "tests/quantization", "tests/storage")
    options = "--error-exitcode=9 --undef-value-errors=no --leak-check=no --suppressions=benchmarks/valgrind.supp"
    valgrind = ("valgrind", *options.split(), sys.executable, "-m", "benchmarks.checked_training")
    single = {"PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "1"}
    return [
        Stage(
            "MALLOC_CHECK_", "quick core", (*TESTS, *QUICK, *checked), 6, AVX2 | CHECKED_MALLOC, missing_malloc_checks
        ),
        module_stage("guarded_convolutions", 4, "--count", "2000", missing=needs("cc")),
        Stage("valgrind", "training ResNet, U-Net, LSTM", valgrind, 12, single, needs("valgrind")),
        module_stage("sanitized_tests", 10, "-q", *QUICK, "tests/native/test_native.py", missing=missing_sanitizer),
    ]


def module_stage(name: str, minutes: float, *arguments: str, missing: Callable[[], str] = lambda: "") -> Stage:
    """Return a stage that runs one of the programs in this folder."""

    def not_there() -> str:
        return missing() if importlib.util.find_spec(f"benchmarks.{name}") else f"benchmarks/{name}.py"

    what = " ".join(arguments) or "all"
    return Stage(name, what, (sys.executable, "-m", f"benchmarks.{name}", *arguments), minutes, missing=not_there)


def needs(program: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(program) else program


def needs_module(name: str) -> Callable[[], str]:
    return lambda: "" if importlib.util.find_spec(name) else name


def missing_malloc_checks() -> str:
    """Write past the end of a block: the process must be aborted for it, or a green stage would mean nothing."""
    ended = subprocess.run(
        [sys.executable, "-c", WRITE_PAST_THE_END], env=os.environ | CHECKED_MALLOC, capture_output=True, check=False
    )
    return "" if ended.returncode == -signal.SIGABRT else f"glibc with {MALLOC_DEBUG}"


def missing_sanitizer() -> str:
    if not shutil.which("c++"):
        return "c++"
    path = subprocess.run(["c++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False).stdout
    return "" if Path(path.strip()).is_absolute() else "libasan"


# ---- running them


def run(stage: Stage, slack: float) -> Result:
    """Run a stage to its end, or to that of its time."""
    if needed := stage.missing():
        return Result(stage, "skipped", f"needs {needed}", 0.0)
    log, start = LOGS / f"{stage.name.replace(' ', '-')}.log", time.perf_counter()
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(LOGS / "compiled" / stage.name)}  # code of one instruction set each
    with log.open("w") as output:
        process = subprocess.Popen(
            stage.command, cwd=ROOT, env=os.environ | variables | dict(stage.variables), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(60 * slack * stage.minutes)
            details = last_line(log)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status, details = -signal.SIGKILL, f"was not done within {slack * stage.minutes:g} minutes"
    if status < 0 and "within" not in details:
        details = f"ended by {signal.Signals(-status).name}: {details}"
    return Result(stage, "failed" if status else "passed", details, time.perf_counter() - start)


def last_line(log: Path) -> str:
    """Return what a program said last; of valgrind, its summary."""
    lines = [line.strip(" =\n") for line in log.read_text(errors="replace").splitlines() if line.strip(" =\n")]
    line = lines[-1] if lines else "no output"
    return line.partition("== ")[2] or line


def table_of(results: list[Result]) -> Table:
    table = Table("stage", "what", "outcome", "details", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("seconds", justify="right")
    for r in results:
        table.add_row(r.stage.name, r.stage.what, r.outcome, r.details[:70], f"{r.seconds:.0f}")
    return table


@dataclass(frozen=True)
class Options:
    """Run the tests as on other machines, and under checkers of memory."""

    only: str = ""
    """Run the stages whose name contains this."""
    minutes: float = 60
    """Stages that would begin after so many minutes are left out, and count as failed."""
    slack: float = 1
    """Factor of the time that each stage may take, for a busy machine."""


def main(options: Options) -> int:
    console = Console(width=None if sys.stdout.isatty() else 150)
    LOGS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the running stage is ended, too
    results, start = [], time.perf_counter()
    for stage in stages():
        if options.only not in stage.name:
            continue
        if time.perf_counter() - start > 60 * options.slack * options.minutes:
            results.append(Result(stage, "failed", f"no time left of {options.minutes:g} minutes", 0.0))
            continue
        console.print(f"{stage.name}: {stage.what} ...", highlight=False)
        results.append(run(stage, options.slack))
    failed = sum(r.outcome == "failed" for r in results)
    console.print(table_of(results))
    seconds = time.perf_counter() - start
    console.print(
        f"{failed} of {len(results)} failed, {seconds:.0f} s; logs are in {LOGS}", highlight=False, soft_wrap=True
    )
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.matrix")))
