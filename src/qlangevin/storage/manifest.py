"""What a folder of samples holds: which tensors, in which format, drawn how, and what each file is known by.

A manifest is JSON. Whatever it says is checked before it is used: it may have been written by anybody.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import torch

from ..quantization.formats import Format, check_holds, parse
from .files import DTYPES, DamagedError, Digest, Spec, parse_json
from .hashing import sha256

__all__ = ["Kind", "Manifest", "Record", "TensorInfo", "is_count"]

VERSION = 1  # of the layout of the folder
NAME = "qlangevin samples"

Kind: TypeAlias = Literal["parameter", "buffer", "frozen"]
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the model: parameters and buffers are in every sample, frozen parameters are kept once."""

    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    format: str | None = None  # codes of this format; None for the tensor as it is

    def __str__(self) -> str:
        return f"{self.kind} {self.format or self.dtype} {list(self.shape)}"

    def parts(self, name: str) -> dict[str, Spec]:
        """What a file holds of it."""
        if self.format is None:
            return {name: (NAMES[self.dtype], self.shape)}
        format, count = parse(self.format), math.prod(self.shape)
        shape = (-(-count // 2),) if format.storage_bits == 4 else self.shape
        specs: dict[str, Spec] = {f"{name}.codes": (format.code_dtype, shape)}
        if format.has_exponents:
            specs[f"{name}.exponents"] = (torch.int8, (format.block_count(torch.Size(self.shape)),))
        return specs

    @classmethod
    def of(cls, value: Any) -> TensorInfo:
        given = _object(value, "kind", "shape", "dtype", "format")
        kind, shape, dtype, format = given["kind"], given["shape"], given["dtype"], given["format"]
        known = isinstance(kind, str) and kind in get_args(Kind) and isinstance(dtype, str) and dtype in NAMES
        require(known, "a tensor is of no known kind or dtype")
        require(isinstance(shape, list) and all(is_count(n) for n in shape), "a tensor has no proper shape")
        require(math.prod(max(n, 1) for n in shape) < 2**60, "a tensor is larger than any disk")
        require(format is None or isinstance(format, str), "a format is not a name")
        if format is not None:
            parsed = _format(format)
            require(str(parsed) == format and parsed.storage_bits < 32, f"{format!r} is not a format that is stored")
            require(_holds(NAMES[dtype], parsed), f"{dtype} cannot hold every number of {format}")
        return cls(kind, tuple(shape), dtype, format)

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "shape": list(self.shape), "dtype": self.dtype, "format": self.format}


@dataclass(frozen=True)
class Record:
    """A file, and after how many steps of the sampler it was written."""

    step: int | None
    digest: Digest

    @classmethod
    def of(cls, value: Any) -> Record:
        given = _object(value, "step", "bytes", "sha256")
        require(given["step"] is None or is_count(given["step"]), "a step is not a number")
        digits = given["sha256"]
        proper = isinstance(digits, str) and len(digits) == 64 and set(digits) <= set("0123456789abcdef")
        require(is_count(given["bytes"]) and proper, "a file has no proper size and checksum")
        return cls(given["step"], Digest(given["bytes"], digits))

    def as_json(self) -> dict[str, Any]:
        return {"step": self.step, "bytes": self.digest.size, "sha256": self.digest.sha256}


@dataclass(frozen=True)
class Manifest:
    """All that is known of a store."""

    library: str
    tensors: Mapping[str, TensorInfo]
    settings: Mapping[str, Any]  # of the sampler and the schedule, and the seed: words and numbers
    frozen: Record | None = None
    samples: tuple[Record, ...] = ()

    def with_samples(self, samples: tuple[Record, ...]) -> Manifest:
        return replace(self, samples=samples)

    def to_json(self) -> bytes:
        """One line for each tensor and each sample."""
        content = {
            "store": NAME,
            "version": VERSION,
            "library": self.library,
            "settings": self.settings,
            "tensors": {name: info.as_json() for name, info in self.tensors.items()},
            "frozen": self.frozen.as_json() if self.frozen else None,
            "samples": [record.as_json() for record in self.samples],
        }
        lines = {
            **{
                name: json.dumps(content[name], allow_nan=False) for name in ("store", "version", "library", "settings")
            },
            "tensors": _lines_of(tuple(self.tensors.items())),
            "frozen": json.dumps(content["frozen"]),
            "samples": "[\n" + ",\n".join(json.dumps(record.as_json()) for record in self.samples) + "\n]",
            "sha256": json.dumps(_checksum(content)),
        }
        return ("{\n" + ",\n".join(f'"{name}": {line}' for name, line in lines.items()) + "\n}\n").encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        content = parse_json(text, "the manifest")
        require(isinstance(content, dict) and content.get("store") == NAME, "it is not of a store of samples")
        version = content.get("version")
        require(version == VERSION, f"its version is {version!r}, this release of qlangevin reads version {VERSION}")
        names = ("store", "version", "library", "settings", "tensors", "frozen", "samples", "sha256")
        given = _object(content, *names)
        require(given.pop("sha256") == _checksum(given), "its content is not what was written (SHA-256 differs)")
        require(
            isinstance(given["library"], str) and isinstance(given["settings"], dict), "it says nothing of its origin"
        )
        require(isinstance(given["tensors"], dict) and isinstance(given["samples"], list), "it lists no samples")
        tensors = {name: TensorInfo.of(info) for name, info in given["tensors"].items()}
        frozen = None if given["frozen"] is None else Record.of(given["frozen"])
        require(
            (frozen is not None) == any(t.kind == "frozen" for t in tensors.values()), "frozen tensors have no file"
        )
        parts = [part for name, info in tensors.items() for part in info.parts(name)]
        require(len(set(parts)) == len(parts), "two tensors have one name")
        return cls(given["library"], tensors, given["settings"], frozen, tuple(map(Record.of, given["samples"])))

    def of_kind(self, *kinds: Kind) -> dict[str, TensorInfo]:
        return {name: info for name, info in self.tensors.items() if info.kind in kinds}

    def specs(self, *kinds: Kind) -> dict[str, Spec]:
        """What a file with the tensors of these kinds holds."""
        chosen = [info.parts(name) for name, info in self.of_kind(*kinds).items()]
        return {part: spec for parts in chosen for part, spec in parts.items()}


@lru_cache(maxsize=4)  # every sample needs them again
def _lines_of(tensors: tuple[tuple[str, TensorInfo], ...]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(info.as_json())}" for name, info in tensors) + "\n}"


def require(condition: bool, why: str) -> None:
    if not condition:
        raise DamagedError(f"the manifest is damaged: {why}")


def _checksum(content: dict[str, Any]) -> str:
    try:
        return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    except RecursionError:
        raise DamagedError("the manifest is damaged: it is nested too deeply") from None


def _object(value: Any, *names: str) -> dict[str, Any]:
    require(isinstance(value, dict) and set(value) == set(names), f"an entry does not have just {', '.join(names)}")
    return dict(value)


def is_count(value: Any) -> bool:
    """Whether a value read from JSON is a number of things."""
    return type(value) is int and 0 <= value < 2**63


def _format(name: str) -> Format:
    try:
        return parse(name)
    except ValueError as error:
        raise DamagedError(f"the manifest is damaged: {error}") from None


def _holds(dtype: torch.dtype, format: Format) -> bool:
    try:
        check_holds(dtype, format)
    except (TypeError, ValueError):
        return False
    return True
