"""Manifests are checked entry by entry, also if their checksum fits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qlangevin import DamagedError, SampleStore, pack, parse
from qlangevin.storage.files import Digest
from qlangevin.storage.manifest import Manifest, Record, TensorInfo
from tests.helpers.strategies import NAMES

INFO = TensorInfo("parameter", (3, 5), "float32", "bfp8")
RECORD = Record(4, Digest(100, "0" * 64))


def written() -> dict[str, Any]:
    tensors = {"w": INFO, "b": TensorInfo("buffer", (), "int64"), "f": TensorInfo("frozen", (2,), "float64")}
    content: dict[str, Any] = json.loads(Manifest("1.0", tensors, {"seed": 1}, RECORD, (RECORD,)).to_json())
    return content


def forged(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Change a manifest, and make its checksum fit."""
    content = written()
    del content["sha256"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps(content | {"sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_comes_back_as_it_was(name: str) -> None:
    format = name if parse(name).storage_bits < 32 else None
    shapes = [(), (0,), (3, 5), (2, 0, 3)]
    tensors = {f"t{i}": TensorInfo("parameter", shape, "float32", format) for i, shape in enumerate(shapes)}
    manifest = Manifest("1.0", tensors, {"seed": 2**63, "é": [None, 0.1]}, None, (RECORD, Record(None, RECORD.digest)))
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.to_json() == manifest.to_json()


def test_a_forgery_that_changes_nothing_is_read() -> None:
    whole = Manifest.from_json(forged(lambda c: None)).to_json()
    assert json.loads(whole) == written()
    assert len(whole.splitlines()) == 2 + len(written()) + sum(
        1 + len(written()[name]) for name in ("tensors", "samples")
    )


def test_every_byte_of_a_manifest_counts() -> None:
    whole = json.dumps(written()).encode()
    manifest = Manifest.from_json(whole)
    for i in range(len(whole)):
        changed = whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :]
        with suppress(DamagedError):
            assert Manifest.from_json(changed) == manifest  # a key's escape, say, may be written in another way


def entry(name: str, field: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda c: c["tensors"][name].update({field: value})


def record(field: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda c: c["samples"][0].update({field: value})


ODD: list[Any] = [None, [], {}, True, -1, 1.5, "x", "../x", 2**64, "\ud800"]
FORGERIES = [
    *(entry("w", "kind", x) for x in ODD),
    *(entry("w", "dtype", x) for x in [*ODD, "int8", "float128"]),
    *(
        entry("w", "format", x)
        for x in [*ODD[1:], "fp32", "bfp24e7", "bfp08", "bfp8/row", "fixed8.999", "BFP8", "bfp8\n"]
    ),
    *(entry("w", "shape", x) for x in [*ODD[:1], *ODD[2:], [-1], [1.0], [True], ["3"], [2**62], [2**30, 2**30], [[3]]]),
    *(record("step", x) for x in ODD[1:]),
    *(record("bytes", x) for x in ODD),
    *(record("sha256", x) for x in [*ODD, "0" * 63, "G" * 64, "０" * 64]),
    *((lambda c, k=k: c.pop(k)) for k in written() if k != "sha256"),
    *(
        (lambda c, k=k, x=x: c.update({k: x}))
        for k in ("tensors", "samples", "library")
        for x in ODD[:6]
        if x not in ([], {})
    ),
    lambda c: c.update(more=1),
    lambda c: c.update(frozen=None),
    lambda c: c.update(version=2),
    lambda c: c.update(store="other"),
    lambda c: c["tensors"].pop("f"),
    lambda c: c["tensors"].update({"w.codes": c["tensors"]["b"]}),
    lambda c: c["tensors"]["w"].pop("kind"),
    lambda c: c["samples"].append(None),
]


@pytest.mark.parametrize("i", range(len(FORGERIES)))
def test_a_forged_manifest_is_refused_in_words(i: int) -> None:
    with pytest.raises(DamagedError, match=r"^the manifest is damaged: .*\w"):
        Manifest.from_json(forged(FORGERIES[i]))


@pytest.mark.parametrize(
    ("format", "dtype"), [("bfp16", "float16"), ("bfp8", "float8_e5m2"), ("fixed16.12", "bfloat16")]
)
def test_a_dtype_that_cannot_hold_the_format_is_refused(format: str, dtype: str) -> None:
    with pytest.raises(DamagedError, match=r"the manifest is damaged: .*cannot hold"):
        Manifest.from_json(forged(lambda c: c["tensors"]["w"].update(format=format, dtype=dtype)))


def test_a_later_version_is_told_apart_from_damage() -> None:
    with pytest.raises(DamagedError, match="its version is 7, this release of qlangevin reads version 1"):
        Manifest.from_json(b'{"store": "qlangevin samples", "version": 7, "anything": "else"}')


@pytest.mark.parametrize("depth", [50, 500, 980, 100_000])
def test_depth_is_no_danger(depth: int) -> None:
    for opened, closed in (("[", "]"), ('{"a":', "}")):
        nested = opened * depth + "1" + closed * depth
        text = json.dumps(written()).replace('{"seed": 1}', f'{{"seed": {nested}}}')
        with pytest.raises(DamagedError):
            Manifest.from_json(text.encode())


@pytest.mark.parametrize("format", ["bfp8", "bfp8e3", "bfp4", "fixed2.0", "fp8_e4m3", "e2m1"])
def test_codes_that_stand_for_no_number_are_refused(format: str, tmp_path: Path) -> None:
    model = pack(nn.Linear(3, 2, bias=False), format)
    weight: Any = model.weight
    codes = {"bfp8": -128, "bfp4": 0x08, "fixed2.0": 0x77, "fp8_e4m3": 0x7F, "e2m1": 0x7F}
    if format == "bfp8e3":
        weight.exponents.fill_(4)
    else:
        weight.codes[:1] = codes[format]
    with SampleStore.create(tmp_path, model) as store:
        store.append(model)
    for sample in (store[0], SampleStore.open(tmp_path)[0]):
        with pytest.raises(
            DamagedError, match=f"sample 0 of .* is damaged: 'weight' holds what is no number of {format}"
        ):
            sample.decode()


def test_a_float_parameter_that_is_no_number_is_refused_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    with SampleStore.create(tmp_path, model) as store, monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "isfinite", lambda t: torch.ones_like(t, dtype=torch.bool))
        with torch.no_grad():
            model.weight[0, 0] = torch.nan
        store.append(model)
    with pytest.raises(DamagedError, match="'weight' holds what is no number of float32"):
        SampleStore.open(tmp_path)[0].decode()
