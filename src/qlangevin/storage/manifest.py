"""The manifest of a folder of samples: its tensors and their formats, the settings they were drawn with, a checksum of each file.

A manifest is JSON. A reader does not trust it: every entry is checked before it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..quantization.formats import Format, check_holds, parse
from ..sampling.sampler import Sampler
from ..sampling.schedules import Schedule
from .files import DamagedError, Digest, parse_json, sha256
from .tensor_file import DTYPES, Spec

__all__ = ["Kind", "Manifest", "Record", "TensorInfo", "count_steps", "is_count", "provenance"]

VERSION = 1  # of the layout of the folder
NAME = "qlangevin samples"

Kind: TypeAlias = Literal["parameter", "buffer", "frozen", "reference"]
UNSAID = {
    "prior_std": None,
    "stream": 0,
    "localization": 0.0,
    "masked": False,
}  # settings that go unsaid at these values
UNSAID |= dict.fromkeys(("box", "preconditioner", "friction", "velocity"))
NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class TensorInfo:
    """Kind, shape, dtype and format of a tensor.

    Parameters and buffers are in every sample, frozen parameters are stored once, or not at all: of a reference the store has
    the checksum.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    format: str | None = None  # in which it is stored as codes; None if it is stored as it is
    sha256: str | None = None  # of a reference

    def __str__(self) -> str:
        return f"{self.kind} {self.format or self.dtype} {list(self.shape)}"

    def stored_specs(self, name: str) -> dict[str, Spec]:
        """Return dtype and shape of the tensors that a file holds for it."""
        if self.format is None:
            return {name: (NAMES[self.dtype], self.shape)}
        format, count = parse(self.format), math.prod(self.shape)
        shape = (-(-count // 2),) if format.storage_bits == 4 else self.shape
        specs: dict[str, Spec] = {f"{name}.codes": (format.code_dtype, shape)}
        if format.has_exponents:
            specs[f"{name}.exponents"] = (torch.int8, (format.block_count(torch.Size(self.shape)),))
        return specs

    @classmethod
    def from_json(cls, value: Any) -> TensorInfo:
        refers = isinstance(value, dict) and value.get("kind") == "reference"
        given = _check_object(value, "kind", "shape", "dtype", "format", *(["sha256"] if refers else []))
        _require(not refers or _is_sha256(given["sha256"]), "a reference has no proper checksum")
        kind, shape, dtype, format = given["kind"], given["shape"], given["dtype"], given["format"]
        known = isinstance(kind, str) and kind in get_args(Kind) and isinstance(dtype, str) and dtype in NAMES
        _require(known, "a tensor is of no known kind or dtype")
        _require(isinstance(shape, list) and all(is_count(n) for n in shape), "a tensor has no proper shape")
        _require(math.prod(max(n, 1) for n in shape) < 2**60, "a tensor is larger than any disk")
        _require(format is None or isinstance(format, str), "a format is not a name")
        if format is not None:
            parsed = _parse_format(format)
            _require(str(parsed) == format and parsed.storage_bits < 32, f"{format!r} is not a format that is stored")
            _require(_can_hold(NAMES[dtype], parsed), f"{dtype} cannot hold every number of {format}")
        return cls(kind, tuple(shape), dtype, format, given.get("sha256"))

    def to_json(self) -> dict[str, Any]:
        found = {"kind": self.kind, "shape": list(self.shape), "dtype": self.dtype, "format": self.format}
        return found | ({"sha256": self.sha256} if self.kind == "reference" else {})


@dataclass(frozen=True)
class Record:
    """Checksum of a stored file, and the number of steps the sampler had made."""

    step: int | None
    digest: Digest

    @classmethod
    def from_json(cls, value: Any) -> Record:
        given = _check_object(value, "step", "bytes", "sha256")
        _require(given["step"] is None or is_count(given["step"]), "a step is not a number")
        proper = is_count(given["bytes"]) and _is_sha256(given["sha256"])
        _require(proper, "a file has no proper size and checksum")
        return cls(given["step"], Digest(given["bytes"], given["sha256"]))

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "bytes": self.digest.size, "sha256": self.digest.sha256}


@dataclass(frozen=True)
class Manifest:
    """Content of ``manifest.json``."""

    library: str
    tensors: Mapping[str, TensorInfo]
    settings: Mapping[str, Any]  # see `provenance`
    frozen: Record | None = None
    samples: tuple[Record, ...] = ()

    def with_samples(self, samples: tuple[Record, ...]) -> Manifest:
        return replace(self, samples=samples)

    def to_json(self) -> bytes:
        """Return the text of the file, with a line for each tensor and each sample."""
        content = {
            "store": NAME,
            "version": VERSION,
            "library": self.library,
            "settings": self.settings,
            "tensors": {name: info.to_json() for name, info in self.tensors.items()},
            "frozen": self.frozen.to_json() if self.frozen else None,
            "samples": [record.to_json() for record in self.samples],
        }
        lines = {
            **{
                name: json.dumps(content[name], allow_nan=False) for name in ("store", "version", "library", "settings")
            },
            "tensors": _format_tensors(tuple(self.tensors.items())),
            "frozen": json.dumps(content["frozen"]),
            "samples": "[\n" + ",\n".join(json.dumps(record.to_json()) for record in self.samples) + "\n]",
            "sha256": json.dumps(_hash_content(content)),
        }
        return ("{\n" + ",\n".join(f'"{name}": {line}' for name, line in lines.items()) + "\n}\n").encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Parse the text of a file; raise DamagedError if any of it is not as it should be."""
        content = parse_json(text, "the manifest")
        _require(isinstance(content, dict) and content.get("store") == NAME, "it is not of a store of samples")
        version = content.get("version")
        _require(version == VERSION, f"its version is {version!r}, this release of qlangevin reads version {VERSION}")
        names = ("store", "version", "library", "settings", "tensors", "frozen", "samples", "sha256")
        given = _check_object(content, *names)
        _require(given.pop("sha256") == _hash_content(given), "its content is not what was written (SHA-256 differs)")
        _require(
            isinstance(given["library"], str) and isinstance(given["settings"], dict), "it says nothing of its origin"
        )
        _require(isinstance(given["tensors"], dict) and isinstance(given["samples"], list), "it lists no samples")
        tensors = {name: TensorInfo.from_json(info) for name, info in given["tensors"].items()}
        frozen = None if given["frozen"] is None else Record.from_json(given["frozen"])
        _require(
            (frozen is not None) == any(t.kind == "frozen" for t in tensors.values()), "frozen tensors have no file"
        )
        stored = [each for name, info in tensors.items() for each in info.stored_specs(name)]
        _require(len(set(stored)) == len(stored), "two tensors have one name")
        return cls(given["library"], tensors, given["settings"], frozen, tuple(map(Record.from_json, given["samples"])))

    def select(self, *kinds: Kind) -> dict[str, TensorInfo]:
        """Return the tensors of these kinds."""
        return {name: info for name, info in self.tensors.items() if info.kind in kinds}

    def stored_specs(self, *kinds: Kind) -> dict[str, Spec]:
        """Return dtype and shape of all that a file holds for the tensors of these kinds."""
        each = (info.stored_specs(name) for name, info in self.select(*kinds).items())
        return {name: spec for specs in each for name, spec in specs.items()}


@lru_cache(maxsize=4)  # the same for every sample
def _format_tensors(tensors: tuple[tuple[str, TensorInfo], ...]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(info.to_json())}" for name, info in tensors) + "\n}"


def provenance(sampler: Optimizer | None, schedule: LRScheduler | None, ranks: int = 1) -> dict[str, Any]:
    """Return the settings of sampler and schedule as JSON, for the manifest; the number of ranks if there are several."""
    groups = [_group_settings(group) for group in sampler.param_groups] if sampler is not None else []
    known: dict[str, Any] = {
        "seed": next((group["seed"] for group in groups if "seed" in group), None),
        "sampler": None if sampler is None else {"class": type(sampler).__name__, "groups": groups},
        "schedule": None,
    }
    if schedule is not None:
        kind = {"schedule": type(schedule).__name__}
        known["schedule"] = schedule.settings() if isinstance(schedule, Schedule) else kind
    known |= {"ranks": ranks} if ranks > 1 else {}
    return dict(json.loads(json.dumps(known)))  # makes lists of tuples, to be comparable with what is read


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group before any schedule changed them."""
    found: dict[str, Any] = {"parameters": len(group["params"])}
    for name, value in group.items():
        if name in ("params", "param_names") or name.startswith("initial_"):
            continue
        if name in UNSAID and value == UNSAID[name]:
            continue  # so that the settings of chains that do not use them are what they were in earlier releases
        value = group.get(f"initial_{name}", value)
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        plain = value is None or isinstance(value, (bool, int, str, list, tuple))
        plain |= isinstance(value, float) and math.isfinite(value)
        found[name] = value if plain else str(value)
    return found


def count_steps(sampler: Optimizer) -> int:
    """Return the number of steps a sampler has made; wait for those that run on a device."""
    if isinstance(sampler, Sampler):
        sampler.check()
    return max((int(state["step"]) for state in sampler.state.values() if "step" in state), default=0)


def is_count(value: Any) -> bool:
    """Return True for an integer of JSON that can be a number of things."""
    return type(value) is int and 0 <= value < 2**63


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _require(condition: bool, why: str) -> None:
    if not condition:
        raise DamagedError(f"the manifest is damaged: {why}")


def _hash_content(content: dict[str, Any]) -> str:
    try:
        return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    except RecursionError:
        raise DamagedError("the manifest is damaged: it is nested too deeply") from None


def _check_object(value: Any, *names: str) -> dict[str, Any]:
    _require(isinstance(value, dict) and set(value) == set(names), f"an entry does not have just {', '.join(names)}")
    return dict(value)


def _parse_format(name: str) -> Format:
    try:
        return parse(name)
    except ValueError as error:
        raise DamagedError(f"the manifest is damaged: {error}") from None


def _can_hold(dtype: torch.dtype, format: Format) -> bool:
    try:
        check_holds(dtype, format)
    except (TypeError, ValueError):
        return False
    return True
