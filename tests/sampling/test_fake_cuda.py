"""Training on fake CUDA tensors, from `pack` and `lower` to the step: shapes, dtypes and devices are right without a GPU."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCH = Path(torch.__file__).parent


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A library that gives a PyTorch without CUDA a CUDA device with nothing behind it."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this PyTorch has a CUDA device of its own")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path / "fake_cuda.so"
    source = ROOT / "tests" / "helpers" / "fake_cuda.cpp"
    links = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH / 'lib'}"]
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{TORCH / 'include'}", str(source), "-o", str(library)]
    made = subprocess.run([*command, *links], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"the library does not compile here: {made.stderr[-500:]}")
    return library


@pytest.mark.slow
def test_fake_tensors_take_the_whole_way(device: Path) -> None:
    command = [sys.executable, "-m", "tests.helpers.fake_cuda", str(device)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    kinds = ["None None", "None fp32", "bfp8 None", "bfp4 bfp16"]
    expected = [f"{how} {kind}" for how in ("eager", "compiled") for kind in kinds]
    assert child.stdout.split("\n")[:-1] == [*expected, "eager bfloat16"]
