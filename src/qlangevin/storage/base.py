"""Frozen parameters that a store does not hold, but refers to by their checksums.

The checksum of a tensor is the SHA-256 of the bytes that a file would hold of it: its numbers, or its codes and exponents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..quantization.qtensor import QTensor
from . import files, model_tensors
from .manifest import TensorInfo
from .tensor_file import view_memory

__all__ = ["Frozen", "check_base", "check_same", "identify", "refer_to_base"]

Frozen: TypeAlias = Literal["once", "reference"]


def refer_to_base(tensors: Mapping[str, Tensor], infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the descriptions of a model's tensors with references in the place of frozen parameters."""
    return {
        name: replace(info, kind="reference", sha256=_hash_tensor(name, tensors[name], info))
        if info.kind == "frozen"
        else info
        for name, info in infos.items()
    }


def check_base(tensors: Mapping[str, Tensor], infos: Mapping[str, TensorInfo], what: str) -> None:
    """Raise ValueError if tensors, by the names of the store, are not those that it refers to."""
    refers = {name: info for name, info in infos.items() if info.kind == "reference"}
    odd = [name for name, info in refers.items() if not _is_referred(name, tensors[name], info)]
    if not odd:
        return
    names = ", ".join(map(repr, odd[:3])) + (", ..." if len(odd) > 3 else "")
    formats = {info.format for name in odd if (info := infos[name]).format and not isinstance(tensors[name], QTensor)}
    if formats:
        how = f", and pack it as then: qlangevin.pack(model, {min(map(str, formats))!r}, frozen=True)"
    else:
        how = ", with frozen parameters that are not packed" if _packed_now(tensors, infos, odd) else ""
    raise ValueError(
        f"{what} refers to a base that is not this model's: {len(odd)} of {len(refers)} frozen parameters differ from those it "
        f"was sampled with: {names}. Load the base that the chain was run with{how}"
    )


def check_same(tensors: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor is not what was stored of it."""
    for name, t in stored.items():
        if not torch.equal(model_tensors.to_plain(tensors[name]).cpu(), model_tensors.to_plain(t)):
            raise ValueError(f"{name!r} is frozen, but has changed since the store was created")


def identify(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return what tells that tensors were not replaced or written to: to hash a large base takes seconds.

    Writes through ``tensor.data`` bypass versions, and go undetected.
    """
    return {n: (id(t), -1 if t.is_inference() else t._version) for n in names for t in [tensors[n]]}


def _packed_now(tensors: Mapping[str, Tensor], infos: Mapping[str, TensorInfo], names: Sequence[str]) -> bool:
    return any(isinstance(tensors[name], QTensor) and infos[name].format is None for name in names)


def _is_referred(name: str, t: Tensor, info: TensorInfo) -> bool:
    try:
        return _hash_tensor(name, t, info) == info.sha256
    except ValueError:  # not on the grid, so that it has no such codes
        return False


def _hash_tensor(name: str, t: Tensor, info: TensorInfo) -> str:
    stored = model_tensors.encode_tensors({name: t}, {name: info})
    return files.sha256(*(view_memory(each) for each in stored.values()))
