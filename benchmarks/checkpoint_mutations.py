"""The mutations of checkpoints for `fuzz`, and a reader that tells what became of the run it loads them into."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import qlangevin as ql
from qlangevin.storage import files, model_tensors
from qlangevin.storage.state_json import flatten, random_state
from qlangevin.storage.tensor_file import read_tensors, tensor_chunks

from .kills import SETUPS, Made, train
from .mutations import (
    JUNK,
    Content,
    Mutation,
    flip,
    junk,
    lie,
    new_length,
    numbers,
    odd_header,
    overwrite,
    put_no_file,
    walk_json,
)

STEPS = 56  # of a run: a multiple of kills.EVERY, so that its checkpoint comes after its last sample
FILE = "checkpoint.safetensors"


def build_run(setup: str, folder: Path) -> None:
    """Train a short run that ends with a checkpoint."""
    train(setup, folder, STEPS, lambda phase: None)


@contextmanager
def opened(setup: str, folder: Path) -> Iterator[tuple[Made, ql.SampleStore]]:
    """Yield a run as it is before its checkpoint is loaded, and its store."""
    made = SETUPS[setup](STEPS)
    with ql.SampleStore.open(folder, write=True) as store:
        yield made, store


def fingerprint(made: Made, store: ql.SampleStore) -> str:
    """Return a checksum of all that loading a checkpoint can change."""
    model, *components = made
    named = model_tensors.named_tensors(model)
    tensors = dict(model_tensors.encode_tensors(named, model_tensors.describe(named)))
    state = [ql.lowering.state_dict(model), *(c.state_dict() for c in components), random_state()]
    tree = json.dumps(flatten(state, tensors, "state"))
    manifest = (store.path / "manifest.json").read_bytes()
    return files.sha256(tree.encode(), manifest, *tensor_chunks(tensors))


# ---- mutations


def bytewise(change: Callable[[bytearray, Random], bytes | bytearray]) -> Mutation:
    """Return a mutation of the bytes of the file."""

    def mutate(folder: Path, rng: Random) -> None:
        path = folder / FILE
        path.write_bytes(change(bytearray(path.read_bytes()), rng))

    return mutate


def no_file(folder: Path, rng: Random) -> None:
    put_no_file(folder / FILE, folder, rng)


def of_another_run(folder: Path, rng: Random) -> None:
    """Put another file of the store in its place."""
    others = [folder / "manifest.json", *sorted((folder / "samples").iterdir())]
    (folder / FILE).write_bytes(rng.choice(others).read_bytes())


def headerwise(change: Callable[[Content, bytearray, Random], Any]) -> Mutation:
    """Return a mutation of header and tensors, with a checksum that fits if they can be read at all."""

    def mutate(folder: Path, rng: Random) -> None:
        header, data = take_apart(folder / FILE)
        text = header.pop("__metadata__")["qlangevin"]
        odd = change(header, data, rng)
        seal(folder / FILE, header, bytes(data), text, odd)

    return mutate


def textwise(change: Callable[[Content, Random], Any], part: str | None = None) -> Mutation:
    """Return a mutation of the JSON in the header, or of one entry of it, with a checksum that fits."""

    def mutate(folder: Path, rng: Random) -> None:
        header, data = take_apart(folder / FILE)
        about = json.loads(header.pop("__metadata__")["qlangevin"])
        change(about if part is None else about[part], rng)
        seal(folder / FILE, header, bytes(data), json.dumps(about))

    return mutate


def take_apart(path: Path) -> tuple[Content, bytearray]:
    whole = path.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    return json.loads(whole[8:start]), bytearray(whole[start:])


def seal(path: Path, header: Content, data: bytes, text: str, odd: bytes | None = None) -> None:
    """Write a checkpoint with its checksum; ``odd`` replaces the header."""

    def put(metadata: dict[str, str]) -> None:
        whole = json.dumps({"__metadata__": metadata, **header}).encode() if odd is None else odd
        path.write_bytes(struct.pack("<Q", len(whole)) + whole + data)

    put({"qlangevin": text})
    try:
        _, tensors = read_tensors(path, "it")
    except (ValueError, OSError):
        return  # it will be refused for more than its checksum
    put({"qlangevin": text, "sha256": files.sha256(*tensor_chunks(tensors, {"qlangevin": text}))})


def odd_json(folder: Path, rng: Random) -> None:
    """Write JSON that is hard to parse: deep nesting, a key twice, infinities, very many digits."""
    header, data = take_apart(folder / FILE)
    text, deep = header.pop("__metadata__")["qlangevin"], rng.choice([50, 300, 900, 1100, 50_000])
    nested = rng.choice(["[" * deep + "]" * deep, '{"tuple":' * deep + "[]" + "}" * deep])
    value = rng.choice([nested, "NaN", "1e999", "9" * 5000, '{"tensor":"none"}', '{"dict":[[{"dict":[]},1]]}'])
    about = json.loads(text)
    containers = [about, about["states"], about["counters"]]
    container = rng.choice([c for c in containers if isinstance(c, dict)])
    container[rng.choice([*container, "x"])] = "@@"
    seal(folder / FILE, header, bytes(data), json.dumps(about).replace('"@@"', value))


def swap_tensors(header: Content, data: bytearray, rng: Random) -> None:
    one, other = rng.sample(list(header), 2)
    header[one], header[other] = header[other], header[one]


def replace_values(about: Content, rng: Random) -> None:
    """Replace numbers and texts anywhere in the JSON, but not the lists and objects that hold them."""
    places = [(c, k) for c, k in walk_json(about) if not isinstance(c[k], (dict, list))]
    for container, key in rng.sample(places, min(len(places), rng.choice([1, 1, 3]))):
        container[key] = rng.choice(JUNK)


def sparse(folder: Path, rng: Random) -> None:
    """Extend the file by a hole, with a header that declares it or not."""
    path, size = folder / FILE, 1 << rng.choice([36, 40])
    header, data = take_apart(path)
    if rng.random() < 0.5:
        start = len(data)
        header["x"] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        whole = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(whole)) + whole + data)
        size += 8 + len(whole) + start
    os.truncate(path, size)


CHECKPOINT_DAMAGE: dict[str, Mutation] = {
    "checkpoint: bits flipped": bytewise(flip),
    "checkpoint: bytes replaced": bytewise(overwrite),
    "checkpoint: cut short": bytewise(lambda data, rng: data[: rng.randrange(len(data))]),
    "checkpoint: extended": bytewise(
        lambda data, rng: data + bytes(rng.choice([b" ", b"\0", rng.randbytes(99), data]))
    ),
    "checkpoint: zeros": bytewise(lambda data, rng: bytes(len(data))),
    "checkpoint: noise": bytewise(lambda data, rng: rng.randbytes(len(data))),
    "checkpoint: header length": bytewise(new_length),
    "checkpoint: no ordinary file": no_file,
    "checkpoint: another file": of_another_run,
    "checkpoint: sparse": sparse,
}
CHECKPOINT_FORGED: dict[str, Mutation] = {
    "checkpoint: junk": textwise(junk),
    "checkpoint: values": textwise(replace_values),
    "checkpoint: states": textwise(junk, "states"),
    "checkpoint: store": textwise(junk, "store"),
    "checkpoint: odd JSON": odd_json,
    "checkpoint: a lie": headerwise(lie),
    "checkpoint: numbers": headerwise(numbers),
    "checkpoint: tensors swapped": headerwise(swap_tensors),
    "checkpoint: odd header": headerwise(odd_header),
}
