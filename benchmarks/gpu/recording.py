"""``python -m benchmarks.gpu.recording FILE PATTERN``: record the launches of operations that have GPU kernels.

This runs in Triton's interpreter: the library does its work on small CPU tensors, and every launch is written down with the
types, constants and alignments that Triton would compile a kernel for. `read` gives them back, to be compiled in another process,
because interpreter and compiler exclude each other.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

__all__ = ["Launch", "Recorded", "read", "record", "record_in_child"]


@dataclass(frozen=True)
class Launch:
    """One launch, without its numbers: a `Specialisation`."""

    name: str
    module: str
    function: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    aligned: list[int]  # places of arguments that are divisible by 16
    num_warps: int
    programs: int
    row: int = 0  # elements of a block, if the operation has blocks
    bytes_per_element: float = 0.0  # of the whole operation, which may be several launches
    most_registers: int | None = None

    @property
    def kernel(self) -> Any:
        return getattr(importlib.import_module(self.module), self.function)

    @property
    def attrs(self) -> dict[tuple[int, ...], list[list[Any]]]:
        return {(place,): [["tt.divisibility", 16]] for place in self.aligned}

    @property
    def elements_per_program(self) -> int:
        """By the names that constants have in the kernels: R blocks, or C counters of four elements each, or E elements."""
        if "PIECE" in self.constexprs:  # chunks of a block that several programs share
            return self._chunk * int(self.constexprs["PIECE"])
        rows = self.constexprs.get("R")
        return rows * self.row if rows and self.row else self._chunk * (rows or 1)

    @property
    def takes_whole_blocks(self) -> bool:
        """Return True if each program takes blocks of its own, which it reads twice."""
        return bool(self.row) and "R" in self.constexprs

    @property
    def passes(self) -> int:
        if "PIECE" in self.constexprs:
            return int(self.constexprs["PIECE"])
        return -(-self.row // self._chunk) if self.row and "R" in self.constexprs else 1

    @property
    def _chunk(self) -> int:
        """The elements of a block that one pass of a loop handles."""
        return int(self.constexprs.get("E", 0)) or 4 * int(self.constexprs["C"])

    @property
    def identity(self) -> str:
        """All for which Triton compiles a kernel of its own, and the length of blocks, on which its cost depends."""
        parts = (
            self.row,
            self.module,
            self.function,
            self.signature,
            self.constexprs,
            self.aligned,
            self.num_warps,
            self.most_registers,
        )
        return json.dumps(parts, sort_keys=True, default=str)


@dataclass(frozen=True)
class Recorded:
    """An operation of the library: its launches, and the bytes an element that it has to move and that it moves.

    See `operations` for ``scratch``, and `traffic` for ``moved``.
    """

    name: str
    bytes: float
    scratch: float
    moved: float
    launches: list[Launch]

    @property
    def is_simple(self) -> bool:
        """Return True for operations that draw nothing: with few registers, they have more blocks in work than a cache holds."""
        return any(word in self.name for word in ("nearest", "ReLU", "encode", "decode"))


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Write down all launches within this context, while the interpreter runs them."""
    from triton.runtime import interpreter

    launches: list[Launch] = []
    function: Any = interpreter.InterpretedFunction
    run = function.run

    def recording(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.append(_launch_of(self, grid, args, kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    function.run = recording
    try:
        yield launches
    finally:
        function.run = run


def _launch_of(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """Specialise the arguments as a launch on a GPU does: Triton's own function says how."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    from qlangevin.gpu.launch import MOST_REGISTERS

    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    parameters = kernel.fn.__annotations__
    plain = kernel.kwargs.get("do_not_specialize") or ()
    signature, constexprs, aligned = {}, {}, []
    for place, name in enumerate(kernel.arg_names):
        value = given[name]
        if "constexpr" in str(parameters.get(name, "")):
            signature[name], constexprs[name] = "constexpr", _as_json(getattr(value, "value", value))
            continue
        type_, key = native_specialize_impl(BaseBackend, value, False, name not in plain and place not in plain, True)
        signature[name] = type_
        if type_ == "constexpr":
            constexprs[name] = key
        elif key == "D":
            aligned.append(place)
    programs = grid[0] if isinstance(grid, tuple) else 0
    return Launch(
        kernel.fn.__name__, kernel.fn.__module__, kernel.fn.__name__, signature, constexprs, aligned,
        int(kwargs.get("num_warps", 4)), programs, most_registers=MOST_REGISTERS.get(kernel.fn.__name__),
    )  # fmt: skip


def _as_json(constant: Any) -> Any:
    """Return a constant as JSON has it: records and Triton's dtypes by their names."""
    if is_dataclass(constant):
        kind, values = type(constant), [getattr(constant, field.name) for field in fields(constant)]
        return {"record": [kind.__module__, kind.__qualname__, [_as_json(value) for value in values]]}
    return {"dtype": constant.name} if hasattr(constant, "primitive_bitwidth") else constant


def _from_json(found: dict[str, Any]) -> Any:
    """Return the constant of which `_as_json` made this; any other dict as it is."""
    if found.keys() == {"dtype"}:
        from triton.language import dtype

        return dtype(found["dtype"])
    if found.keys() == {"record"}:
        module, name, values = found["record"]
        return getattr(importlib.import_module(module), name)(*values)
    return found


def record_in_child(quick: bool, only: str = "") -> list[Recorded]:
    """Record all operations, or the most important ones, whose names match ``only``, in a process with the interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launches.json"
        command = [sys.executable, "-m", "benchmarks.gpu.recording", str(file), only, *(["--quick"] if quick else [])]
        variables = {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": folder}
        subprocess.run(command, env=os.environ | variables, check=True)
        return read(file)


def read(file: Path) -> list[Recorded]:
    """Return what `main` wrote."""
    written = json.loads(file.read_text(encoding="utf-8"), object_hook=_from_json)
    found = []
    for name, least, scratch, moved, launches in written:
        found.append(Recorded(name, least, scratch, moved, [Launch(**launch) for launch in launches]))
    return found


def main(file: Path, only: str, quick: bool) -> None:
    """Run the operations whose names match and write their launches."""
    from .operations import operations
    from .traffic import trace

    found = []
    for operation in operations(quick):
        if not re.search(only, operation.name):
            continue
        with record() as launches, trace() as traffic:
            operation.run()
        moved = traffic.bytes / operation.elements
        noted = [vars(launch) | {"row": operation.row} for launch in launches]
        found.append((operation.name, operation.bytes, operation.scratch, moved, noted))
    file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "--quick" in sys.argv)
