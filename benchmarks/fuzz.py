"""``python -m benchmarks.fuzz``: a store of samples with one file damaged or forged, many thousand times, each read again.

Damage leaves checksums as they are; a forgery comes with new ones, as a hostile author would write them. What may happen:

refused       a DamagedError or an OSError that says what is wrong; samples that can still be read are as they were written
identical     all samples are as they were written
well-formed   of forgeries only: what is read has the shapes and dtypes that the manifest declares, and finite parameters

Anything else is a failure, with exit code 1: another exception, another number, a process that dies, takes more than
`SECONDS` or grows by more than `MEMORY`. Mutations are numbered, and ``--first n --count 1`` repeats number n.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeAlias

import torch
import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import qlangevin as ql

SECONDS = 5
MEMORY = 200 << 20
BATCH = 250  # mutations in one process
REFUSED, IDENTICAL, WELL_FORMED, FAILED = OUTCOMES = ("refused", "identical", "well-formed", "FAILED")
FORMATS = {
    "block": "bfp8",
    "tight": "bfp8e3/7",
    "fixed": "fixed8.6",
    "eight": "fp8_e4m3",
    "four": "bfp4",
    "wide": "e4m3",
}
JUNK: list[Any] = [
    None, True, -1, 0, 1, 1.5, 2**31, 2**63, 2**64, 10**40, 1e308, "", "x", "../../x", "/etc/passwd", "a\0b", "\ud800",
    "bfp8", "float32", "0" * 64, [], {}, [[]], [1] * 5000, {"a": {}},
]  # fmt: skip
SHAPES = [
    [],
    [0],
    [0, 2**59],
    [2**40],
    [2**62],
    [2**31, 2**31],
    [-1],
    [-3, -5],
    [1.0],
    [True],
    [1] * 100_000,
    "3",
    None,
]
NAMES = ["../../x", "/x", "a\0b", "\ud800", "", ".", "__metadata__", "é" * 300, "block.weight.codes", "x" * 100_000]
KINDS: list[Any] = ["parameter", "buffer", "frozen", "model", None, []]
FORGED_FORMATS = [
    *FORMATS.values(),
    "bfp8/tensor",
    "fixed2.0",
    "fp16",
    "fp32",
    "bfp999",
    "fixed8.9999",
    "bfp08",
    "é",
    None,
    8,
]
DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "bool",
    "complex64",
    "x",
    1,
    [],
]
STORED = ["F64", "F32", "F16", "BF16", "I8", "U8", "I64", "BOOL", "F8_E4M3", "F4", "C64", "X", "", None]

Mutation: TypeAlias = Callable[[Path, Random], None]
Content: TypeAlias = dict[str, Any]


class Result(NamedTuple):
    number: int
    kind: str
    outcome: str
    why: str = ""


def build(folder: Path, count: int = 3) -> list[dict[str, Tensor]]:
    """A store with something of everything, and its samples, decoded."""
    rng = torch.Generator().manual_seed(0)
    layers: dict[str, nn.Module] = {name: nn.Linear(5, 3) for name in [*FORMATS, "plain", "still", "ice"]}
    model = nn.Sequential(OrderedDict(layers | {"norm": nn.BatchNorm1d(3)}))
    for name, format in {**FORMATS, "ice": "bfp8"}.items():
        ql.pack(model, format, layers=name, rounding="nearest")
    for name in ("still", "ice"):
        model.get_submodule(name).requires_grad_(False)
    with ql.SampleStore.create(folder, model) as store, torch.no_grad():
        for step in range(count):
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=rng) if p.requires_grad else p)
            store.append(model, step)
    return [sample.decode() for sample in ql.SampleStore.open(folder)]


# ---- damage: checksums stay as they are


def targets(folder: Path) -> list[Path]:
    return [folder / "manifest.json", folder / "frozen.safetensors", *sorted((folder / "samples").iterdir())]


def bytewise(change: Callable[[bytearray, Random], bytes | bytearray]) -> Mutation:
    """A mutation of the bytes of any one file."""

    def mutate(folder: Path, rng: Random) -> None:
        path = rng.choice(targets(folder))
        path.write_bytes(change(bytearray(path.read_bytes()), rng))

    return mutate


def flip(data: bytearray, rng: Random) -> bytearray:
    for _ in range(rng.choice([1, 1, 1, 2, 8, 64])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def overwrite(data: bytearray, rng: Random) -> bytearray:
    length = rng.randint(1, 64)
    start = rng.randrange(len(data))
    data[start : start + length] = rng.choice([rng.randbytes(length), bytes(length), b"\xff" * length])
    return data


def new_length(data: bytearray, rng: Random) -> bytearray:
    length = struct.unpack("<Q", data[:8])[0]
    lengths = [0, 1, 7, length - 8, length + 8, len(data), 2**27, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
    data[:8] = struct.pack("<Q", max(rng.choice(lengths), 0) % 2**64)
    return data


def swap(folder: Path, rng: Random) -> None:
    one, other = rng.sample(targets(folder), 2)
    for old, new in ((one, folder / "kept"), (other, one), (folder / "kept", other)):
        old.rename(new)


def no_file(folder: Path, rng: Random) -> None:
    """Something else in a file's place, or nothing."""
    path = rng.choice(targets(folder))
    path.unlink()
    links = {"loop": path, "dangling": folder / "none", "zeros": Path("/dev/zero"), "folder": folder}
    what = rng.choice(["nothing", "empty", "pipe", "directory", *links])
    if what == "empty":
        path.touch()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what in links:
        path.symlink_to(links[what])


# ---- forgeries: checksums are made to fit


def seal(folder: Path, content: Content, raw: tuple[str, str] = ("", "")) -> None:
    """Write a manifest with its checksum; ``raw`` stands in the file and in what is hashed where content has '@@'."""
    content.pop("sha256", None)
    compact = json.dumps(content, sort_keys=True, separators=(",", ":")).replace('"@@"', raw[1])
    whole = json.dumps(content | {"sha256": hashlib.sha256(compact.encode()).hexdigest()}).replace('"@@"', raw[0])
    (folder / "manifest.json").write_text(whole)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every value in a JSON tree, as a container and a key."""
    for key in list(value) if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0):
        yield value, key
        yield from places(value[key])


def manifestwise(change: Callable[[Content, Random], Any]) -> Mutation:
    """A mutation of what the manifest says."""

    def mutate(folder: Path, rng: Random) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        del content["sha256"]
        change(content, rng)
        seal(folder, content)

    return mutate


def junk(content: Content, rng: Random) -> None:
    for _ in range(rng.choice([1, 1, 2, 5])):
        found = list(places(content))
        container, key = rng.choice(found) if found else (content, "x")
        how = rng.choice(["replace", "replace", "delete", "add", "copy"])
        if how == "replace":
            container[key] = copy.deepcopy(rng.choice(JUNK))
        elif how == "delete":
            container.pop(key, None) if isinstance(container, dict) else container.pop(key)
        elif how == "copy":
            container[key] = copy.deepcopy(rng.choice([value[name] for value, name in found] or [0]))
        elif isinstance(container, dict):
            container[rng.choice(NAMES)] = copy.deepcopy(rng.choice(JUNK))


def field(name: str, values: list[Any]) -> Mutation:
    """Another value for a field of one of the tensors."""
    return manifestwise(
        lambda content, rng: rng.choice(list(content["tensors"].values())).update({name: rng.choice(values)})
    )


def rename(content: Content, rng: Random) -> None:
    old = rng.choice(list(content["tensors"]))
    content["tensors"][rng.choice(NAMES)] = content["tensors"].pop(old)


def relist(content: Content, rng: Random) -> None:
    samples = content["samples"]
    choices = [samples[:1], [], samples * 2, samples[::-1], [samples[0]] * 3, samples + [samples[0]] * 30]
    content["samples"] = rng.choice(choices)


def rerecord(content: Content, rng: Random) -> None:
    record = rng.choice([*content["samples"], content["frozen"]])
    record[rng.choice(list(record))] = rng.choice(JUNK)


def odd_json(folder: Path, rng: Random) -> None:
    """What a parser may stumble over: depth, keys that stand there twice, infinities, digits without end."""
    content, deep = json.loads((folder / "manifest.json").read_text()), rng.choice([50, 300, 900, 1100, 200_000])
    nested = rng.choice(["[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep])
    digits = "9" * rng.choice([4000, 5000, 1_000_000])
    raws = [
        (nested, nested),
        ('1, "x": 1', "1"),
        ("1e999", "Infinity"),
        ("NaN", "NaN"),
        (digits, digits),
        ("1e5", "100000.0"),
    ]
    where = rng.choice([content, content["settings"], rng.choice(list(content["tensors"].values()))])
    where[rng.choice(["x", "x", *where])] = "@@"
    seal(folder, content, rng.choice(raws))


def tensorwise(change: Callable[[Content, bytearray, Random], Any]) -> Mutation:
    """A mutation of a safetensors file, whose size and checksum are then put into the manifest."""

    def mutate(folder: Path, rng: Random) -> None:
        path = rng.choice(targets(folder)[1:])
        whole = path.read_bytes()
        start = 8 + struct.unpack("<Q", whole[:8])[0]
        header, data = json.loads(whole[8:start]), bytearray(whole[start:])
        text = json.dumps(header).encode() if (text := change(header, data, rng)) is None else text
        record(folder, path, struct.pack("<Q", len(text)) + text + data)

    return mutate


def record(folder: Path, path: Path, whole: bytes, size: int | None = None) -> None:
    path.write_bytes(whole)
    content = json.loads((folder / "manifest.json").read_text())
    kept = content["frozen"] if path.name.startswith("frozen") else content["samples"][int(path.stem)]
    kept.update(bytes=size or len(whole), sha256=hashlib.sha256(whole).hexdigest())
    seal(folder, content)


def lie(header: Content, data: bytearray, rng: Random) -> None:
    """Of one tensor: other offsets, dtype, shape or name, or none of it."""
    name = rng.choice(list(header))
    about, (start, end) = header[name], header[name]["data_offsets"]
    what = rng.choice(["offsets", "offsets", "dtype", "shape", "missing", "rename", "more", "junk"])
    if what == "offsets":
        ends = [start, end, end - 1, end + 1, 0, len(data), len(data) + 1, 2**31, 2**63, 2**64 - 1, -1, 1.5]
        about["data_offsets"] = [rng.choice(ends), rng.choice(ends)]
    elif what in ("dtype", "shape"):
        about[what] = rng.choice(STORED if what == "dtype" else [*SHAPES, [end - start], [1, *about["shape"]]])
    elif what == "missing":
        del header[name]
    elif what == "rename":
        header[rng.choice(NAMES)] = header.pop(name)
    elif what == "more":
        header[rng.choice([*NAMES, "more"])] = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
        data += bytes(4)
    else:
        header[rng.choice(["__metadata__", name, "x"])] = rng.choice(JUNK)


def odd_header(header: Content, data: bytearray, rng: Random) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    nested = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return bytes(
        rng.choice([text + b" " * 4, text + b" " * 10**6, text[:-1], b"", b"{}", nested, text.upper(), text * 2])
    )


def numbers(header: Content, data: bytearray, rng: Random) -> None:
    """Other bits for the numbers: codes and exponents out of range, infinities and NaNs."""
    for name in rng.sample(list(header), rng.choice([1, 1, 3, len(header)])):
        start, end = header[name]["data_offsets"]
        size = end - start
        ones = bytes([rng.choice([0x80, 0x7F, 0xFF, 0x81, 0x00, 0x07, 0x88])]) * size
        nan, inf = (struct.pack("<f", float(x)) * size for x in ("nan", "-inf"))
        data[start:end] = rng.choice([ones, ones, rng.randbytes(size), nan[:size], inf[:size]])


def sparse(folder: Path, rng: Random) -> None:
    """A file said to be larger than anybody wants to read, as it is."""
    path, size = rng.choice(targets(folder)[1:]), 1 << rng.choice([36, 40])
    record(folder, path, path.read_bytes(), size)
    os.truncate(path, size)


def header_length(folder: Path, rng: Random) -> None:
    path = rng.choice(targets(folder)[1:])
    whole = bytes(new_length(bytearray(path.read_bytes()), rng))
    record(folder, path, whole)


DAMAGE: dict[str, Mutation] = {
    "bits flipped": bytewise(flip),
    "bytes replaced": bytewise(overwrite),
    "cut short": bytewise(lambda data, rng: data[: rng.randrange(len(data))]),
    "extended": bytewise(lambda data, rng: data + bytes(rng.choice([b" ", b"\0", rng.randbytes(99), data]))),
    "zeros": bytewise(lambda data, rng: bytes(len(data))),
    "noise": bytewise(lambda data, rng: rng.randbytes(len(data))),
    "header length": bytewise(new_length),
    "files swapped": swap,
    "no ordinary file": no_file,
}
FORGED: dict[str, Mutation] = {
    "manifest: junk": manifestwise(junk),
    "manifest: shape": field("shape", SHAPES),
    "manifest: dtype": field("dtype", DTYPES),
    "manifest: format": field("format", FORGED_FORMATS),
    "manifest: kind": field("kind", KINDS),
    "manifest: name": manifestwise(rename),
    "manifest: samples": manifestwise(relist),
    "manifest: record": manifestwise(rerecord),
    "manifest: odd JSON": odd_json,
    "tensors: a lie": tensorwise(lie),
    "tensors: numbers": tensorwise(numbers),
    "tensors: odd header": tensorwise(odd_header),
    "tensors: header length": header_length,
    "tensors: sparse": sparse,
}


# ---- what comes of it


def is_clear(error: Exception, folder: Path) -> bool:
    text = str(error)
    return (
        isinstance(error, (ql.DamagedError, OSError))
        and str(folder) in text
        and any(what in text for what in ("manifest", "sample", "frozen"))
    )


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        t.dtype == wanted[n].dtype and torch.equal(t, wanted[n]) for n, t in found.items()
    )


def well_formed(found: dict[str, Tensor], store: ql.SampleStore) -> bool:
    """Whether tensors are what the manifest declares. A buffer may hold anything."""
    for name, info in store.manifest.tensors.items():
        t = found[name]
        if t.shape != info.shape or str(t.dtype) != f"torch.{info.dtype}":
            return False
        if info.kind != "buffer" and not bool((t.float() if t.dtype.itemsize == 1 else t).isfinite().all()):
            return False
    return True


def outcome(folder: Path, wanted: list[dict[str, Tensor]], forged: bool) -> str:
    """What comes of reading everything, what is damaged twice, and of verifying it; raises what is not allowed."""
    worst = [IDENTICAL]

    def attempt(action: Callable[..., Any], *args: Any) -> Any:
        try:
            return action(*args)
        except Exception as error:
            if not is_clear(error, folder):
                raise
            worst.append(REFUSED)

    store = attempt(ql.SampleStore.open, folder)
    if store is None:
        return REFUSED
    for i in range(len(store)):
        found = attempt(lambda i: store[i].decode(), i)
        if found is None:
            assert attempt(lambda i: store[i].decode(), i) is None, f"sample {i} is damaged, but not when read again"
        elif not (i < len(wanted) and same(found, wanted[i])):
            assert forged, f"sample {i} is another, and nobody says so"
            assert well_formed(found, store), f"sample {i} is not what the manifest declares, and nobody says so"
            worst.append(WELL_FORMED)
    damaged = REFUSED in worst
    attempt(store.verify)
    assert not damaged or worst[-1] == REFUSED, "samples are damaged, and verify does not say so"
    if len(store) != len(wanted):
        assert forged, "samples are gone, and nobody says so"
        worst.append(WELL_FORMED)
    return next(o for o in (REFUSED, WELL_FORMED, IDENTICAL) if o in worst)


def kind_of(number: int, seed: int) -> str:
    return Random(f"{seed} {number} kind").choice([*DAMAGE, *FORGED])


def mutate(number: int, seed: int, pristine: Path, wanted: list[dict[str, Tensor]]) -> Result:
    """Mutation number so and so of a copy of the store."""
    kind, rng, folder = kind_of(number, seed), Random(f"{seed} {number}"), pristine.parent / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(pristine, folder)
    (DAMAGE | FORGED)[kind](folder, rng)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        result = Result(number, kind, outcome(folder, wanted, kind in FORGED))
    except Exception as error:
        return Result(number, kind, FAILED, f"{type(error).__name__}: {error}"[:200])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return result if grown < MEMORY else Result(number, kind, FAILED, f"it took {grown >> 20} MB")


def in_process(numbers: range, seed: int, pristine: Path, wanted: list[dict[str, Tensor]]) -> list[Result]:
    """Mutations in a process of their own, up to the one that it dies of."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # forking a process with threads: this one has none that matter
        child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for number in numbers:
                signal.alarm(SECONDS)  # whose default is to end the process, wherever it hangs
                os.write(write, (json.dumps(mutate(number, seed, pristine, wanted)) + "\n").encode())
        except BaseException:
            traceback.print_exc()  # a mistake of ours
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        results = [Result(*json.loads(line)) for line in pipe]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if len(results) < len(numbers):
        number = numbers[len(results)]
        why = f"it took more than {SECONDS} s" if -status == signal.SIGALRM else f"the process ended with {status}"
        results.append(Result(number, kind_of(number, seed), FAILED, why))
    return results


def fuzz(count: int, seed: int = 0, first: int = 0) -> list[Result]:
    """What came of each of so many mutations."""
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        pristine = Path(folder) / "store"
        wanted = build(pristine)
        while len(results) < count:
            start = first + len(results)
            results += in_process(range(start, min(start + BATCH, first + count)), seed, pristine, wanted)
    return results


def table_of(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("mutation", *OUTCOMES):
        table.add_column(name, justify="left" if name == "mutation" else "right", no_wrap=True)
    counts = Counter((r.kind, r.outcome) for r in results) + Counter(("all", r.outcome) for r in results)
    for kind in (*DAMAGE, *FORGED, "all"):
        table.add_row(kind, *(str(counts[kind, o] or "") for o in OUTCOMES), end_section=kind == list(FORGED)[-1])
    return table


@dataclass(frozen=True)
class Options:
    """Damage and forge files of a store of samples, and read it."""

    count: int = 10_000
    """How many mutations."""
    seed: int = 0
    """Of all of them; each also depends on its number only."""
    first: int = 0
    """The number of the first."""


def main(options: Options) -> int:
    start = time.perf_counter()
    results = fuzz(options.count, options.seed, options.first)
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table_of(results))
    failed = [r for r in results if r.outcome == FAILED]
    for r in failed[:50]:
        console.print(f"{r.number} {r.kind}: {r.why}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(failed)} of {len(results)} failed, {time.perf_counter() - start:.0f} s", highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, prog="python -m benchmarks.fuzz")))
