"""The mutations of `fuzz`: damage, which leaves the checksums of a store as they are, and forgeries, which come with new ones."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import qlangevin as ql

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


def build(folder: Path, count: int = 3) -> list[dict[str, Tensor]]:
    """Create a store with tensors of every kind; return its samples, decoded."""
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
    frozen = folder / "frozen.safetensors"
    return [folder / "manifest.json", *([frozen] if frozen.exists() else []), *sorted((folder / "samples").iterdir())]


def bytewise(change: Callable[[bytearray, Random], bytes | bytearray]) -> Mutation:
    """Return a mutation of the bytes of any one file."""

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
    """Remove a file, or replace it by something that is no ordinary file."""
    put_no_file(rng.choice(targets(folder)), folder, rng)


def put_no_file(path: Path, folder: Path, rng: Random) -> None:
    """Put nothing, a pipe, a folder or a link in the place of a file."""
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
    """Write a manifest with its checksum; for '@@' in the content, ``raw`` is put into the file and into what is hashed."""
    content.pop("sha256", None)
    compact = json.dumps(content, sort_keys=True, separators=(",", ":")).replace('"@@"', raw[1])
    whole = json.dumps(content | {"sha256": hashlib.sha256(compact.encode()).hexdigest()}).replace('"@@"', raw[0])
    (folder / "manifest.json").write_text(whole)


def walk_json(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every value in a JSON tree, as a container and a key."""
    for key in list(value) if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0):
        yield value, key
        yield from walk_json(value[key])


def manifestwise(change: Callable[[Content, Random], Any]) -> Mutation:
    """Return a mutation of the content of the manifest."""

    def mutate(folder: Path, rng: Random) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        del content["sha256"]
        change(content, rng)
        seal(folder, content)

    return mutate


def junk(content: Content, rng: Random) -> None:
    for _ in range(rng.choice([1, 1, 2, 5])):
        found = list(walk_json(content))
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
    """Return a mutation of a field of one of the tensors in the manifest."""
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
    record = rng.choice([*content["samples"], *([content["frozen"]] if content["frozen"] else [])])
    record[rng.choice(list(record))] = rng.choice(JUNK)


def odd_json(folder: Path, rng: Random) -> None:
    """Write JSON that is hard to parse: deep nesting, a key twice, infinities, very many digits."""
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
    """Return a mutation of a safetensors file; its new size and checksum are put into the manifest."""

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
    """Change offsets, dtype, shape or name of one tensor in the header, or remove it."""
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
    """Change numbers: codes and exponents out of range, infinities and NaNs."""
    for name in rng.sample(list(header), rng.choice([1, 1, min(3, len(header)), len(header)])):
        start, end = header[name]["data_offsets"]
        size = end - start
        ones = bytes([rng.choice([0x80, 0x7F, 0xFF, 0x81, 0x00, 0x07, 0x88])]) * size
        nan, inf = (struct.pack("<f", float(x)) * size for x in ("nan", "-inf"))
        data[start:end] = rng.choice([ones, ones, rng.randbytes(size), nan[:size], inf[:size]])


def sparse(folder: Path, rng: Random) -> None:
    """Extend a file by a hole to a size that takes many minutes to read, and record that size."""
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
