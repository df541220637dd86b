"""Install a wheel into a new environment with no compiler on its PATH, and test it: ``python -m tools.check_wheel WHEEL``.

Only wheels are installed, with the versions of constraints.txt. The tests are the quick ones of the kernels and of quantization;
they import what was installed, not src/.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/native", "tests/quantization"]
PROBE = """
import shutil, qlangevin as ql
assert not any(shutil.which(name) for name in ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja")), "a compiler"
assert ql.native.available, "no kernels"
print(f"qlangevin {ql.__version__} from {ql.__file__}: kernels {ql.native.levels()}, no compiler")
"""


def main(wheel: str) -> None:
    """Install and test a wheel; raise if a step fails."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        binaries = Path(folder, "bin")
        environment = {**os.environ, "PATH": str(binaries)}
        for name in ("CC", "CXX", "PYTHONPATH", "VIRTUAL_ENV"):
            environment.pop(name, None)

        def run(*arguments: str) -> None:
            subprocess.run([str(binaries / "python"), *arguments], cwd=ROOT, env=environment, check=True)

        extras = ["pytest", "hypothesis", "scipy"]
        run("-m", "pip", "install", "--quiet", "--only-binary", ":all:", "-c", "constraints.txt", wheel, *extras)
        run("-P", "-c", PROBE)
        run("-P", "-m", "pytest", "-q", *TESTS, "-m", "not slow and not distributed")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.check_wheel WHEEL")
    main(str(Path(sys.argv[1]).resolve()))
