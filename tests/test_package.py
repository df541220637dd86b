"""The package as such: what is installed, what imports what, and what happens where there is no compiler."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import qlangevin as ql

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "qlangevin"

# Data flows down: the modules of a folder import only from their own folder and from those before it. CONTRIBUTING.md draws
# this order. "" is the package itself, its public names: what comes after it is built on the library.
ORDER = [
    *["_version", "_warnings", "_validate", "_progress", "_select", "_dtensor"],
    *["quantization", "native", "gpu", "sampling", "lowering", "storage", "prediction", "theory", "distributed", "slt"],
    "",
    "integrations",
    *["experiments", "gpu.check", "cli", "__main__"],  # gpu.check is a program, in the folder of what it checks
]


def module_name(path: Path) -> str:
    """The name of a source file's module below the package: "" for its __init__, "experiments.data"."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def place(name: str) -> int:
    """The position in ORDER of the folder, or top-level module, that a module belongs to."""
    while "." in name and name not in ORDER:
        name = name.rpartition(".")[0]
    return ORDER.index(name)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of all that a file imports from qlangevin, wherever in the file it does so."""
    package = ["qlangevin", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            first, _, inner = name.partition(".")
            if first == "qlangevin":
                while inner and inner not in SOURCES:
                    inner = inner.rpartition(".")[0]  # a name in a module, or an extension module in a package
                yield node.lineno, inner


@pytest.mark.parametrize("name", [name for name in SOURCES if name])
def test_modules_import_only_from_their_folder_and_those_before_it(name: str) -> None:
    here = place(name)
    wrong = [
        f"{SOURCES[name].relative_to(ROOT)}:{line} imports qlangevin.{other}".rstrip(".")
        for line, other in imports(SOURCES[name])
        if place(other) > here
    ]
    assert not wrong, "\n".join(wrong)


def test_contributing_draws_the_order_of_the_folders() -> None:
    drawing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("```")[1]
    places = [drawing.index(f"  {name}/ ") for name in ORDER if (PACKAGE / name / "__init__.py").exists() and name]
    assert places == sorted(places)


def test_public_names_are_all_there_is_to_see() -> None:
    assert dir(ql) == sorted(ql.__all__)
    assert all(getattr(ql, name) is not None for name in ql.__all__)


def test_version_is_the_installed_one() -> None:
    assert ql.__version__ == importlib.metadata.version("qlangevin")


def run(*command: str | Path, **env: str) -> str:
    result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_import_is_light() -> None:
    heavy = {"accelerate", "lightning", "transformers"}  # other people's, if they are installed
    heavy |= {"arviz", "matplotlib", "pandas", "rich", "scipy", "sklearn", "torchmetrics", "tyro", "xarray"}
    loaded = run(sys.executable, "-W", "ignore", "-c", "import sys, qlangevin; print(*sys.modules)").split()
    assert heavy.isdisjoint(loaded)


@pytest.mark.skipif(os.environ.get("QLANGEVIN_KERNELS") == "none", reason="kernels are turned off")
def test_kernels_are_built_where_they_can_be(tmp_path: Path) -> None:
    probe = tmp_path / "probe.cpp"
    probe.write_text("#include <Python.h>\n#include <thread>\n")
    compiler = os.environ.get("CXX") or "c++"
    command = [*compiler.split(), "-std=c++17", "-fsyntax-only", f"-I{sysconfig.get_path('include')}", str(probe)]
    if not shutil.which(command[0]) or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("no C++ compiler, or no Python headers")
    assert ql.native.available, "the kernels did not compile: `pip install --verbose .` says why"


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, without a compiler and without network."""
    for tool in ["scikit_build_core", "nanobind"]:
        pytest.importorskip(tool)
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ["CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"]:
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, source, CC="false", CXX="false")
    [wheel] = folder.glob("*.whl")
    return wheel


def test_wheel_without_compiler_is_complete_and_pure(pure_wheel: Path) -> None:
    files = zipfile.ZipFile(pure_wheel).namelist()
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in files if name.endswith((".so", ".pyd", ".dylib", ".cpp", ".h"))]
    wanted = {path.relative_to(PACKAGE.parent).as_posix() for path in SOURCES.values()} | {"qlangevin/py.typed"}
    assert wanted <= set(files)


@pytest.mark.slow
def test_wheel_without_compiler_works(pure_wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(pure_wheel).extractall(tmp_path)
    program = """
import torch, qlangevin as ql
assert not ql.native.available
print(ql.__file__)
print(ql.quantize(torch.ones(3) * 0.3, "fixed8.3").tolist())
"""
    # -S keeps an editable installation, which comes before PYTHONPATH, out of the way.
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    origin, values = run(sys.executable, "-S", "-W", "ignore", "-c", program, PYTHONPATH=path).splitlines()
    assert Path(origin).is_relative_to(tmp_path)
    assert all(value in (0.25, 0.375) for value in ast.literal_eval(values))
