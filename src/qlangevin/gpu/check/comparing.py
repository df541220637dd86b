"""Run the same function on the kernels and on the PyTorch path, and compare the bits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from ... import native
from ..._warnings import QLangevinWarning
from ...quantization.backend import kernels_for
from .. import interpreted

__all__ = ["SPECIFICATION", "Case", "Comparison", "Place", "compare", "same_bits"]

Outputs: TypeAlias = Iterable[Tensor]


@dataclass(frozen=True)
class Place:
    """A device, and the path that its tensors take: PyTorch's, the kernels', or the kernels' in the interpreter."""

    device: torch.device
    path: str  # "pytorch", "kernels" or "interpreter"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have tensors on the device take the path within this context."""
        if self.path == "interpreter":
            with interpreted():
                yield
        elif self.path == "pytorch":
            with native.disabled():
                yield
        else:
            yield

    @property
    def has_kernels(self) -> bool:
        """True if tensors on the device take kernels of ours on this path."""
        with self.entered():
            return kernels_for(torch.empty(1, device=self.device)) is not None


SPECIFICATION = Place(torch.device("cpu"), "pytorch")


@dataclass(frozen=True)
class Case:
    """A function of a place whose results must be the same everywhere."""

    name: str
    run: Callable[[Place], Outputs]


@dataclass
class Comparison:
    """The number of cases of one kind that were run, and those of them that differ."""

    what: str
    cases: int = 0
    left_out: int = 0
    differ: list[str] = field(default_factory=list)


def compare(what: str, cases: Iterable[Case], place: Place, until: float) -> Comparison:
    """Run all cases that begin before the time ``until``, by `time.monotonic`."""
    result = Comparison(what)
    for case in cases:
        if time.monotonic() > until:
            result.left_out += 1
            continue
        result.cases += 1
        if problem := _difference(case, place):
            result.differ.append(f"{case.name}: {problem}")
    return result


def _difference(case: Case, place: Place) -> str:
    """Return what differs between a place and the specification, or nothing."""
    with SPECIFICATION.entered(), _without_advice():
        wanted = [t.cpu() for t in case.run(SPECIFICATION)]
    try:
        with place.entered(), _without_advice():
            got = [t.cpu() for t in case.run(place)]
    except Exception as error:  # a kernel that does not compile or launch: go on with the others
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    if len(got) != len(wanted):
        return f"{len(got)} results in place of {len(wanted)}"
    for number, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if not same_bits(ours, theirs):
            return f"result {number}: {_describe(ours, theirs)}"
    return ""


@contextmanager
def _without_advice() -> Iterator[None]:
    """Ignore the library's warnings within this context: random gradients are no sensible chain."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QLangevinWarning)
        yield


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits; a NaN equals any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(((_bits(a) == _bits(b)) | (a.isnan() & b.isnan())).all())


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def _describe(a: Tensor, b: Tensor) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} of shape {tuple(a.shape)} in place of {b.dtype} of shape {tuple(b.shape)}"
    wrong = (_bits(a) != _bits(b)).flatten().nonzero().flatten()
    first = int(wrong[0])
    values = f"{a.flatten()[first].item()!r} in place of {b.flatten()[first].item()!r}"
    return f"{len(wrong)} of {a.numel()} elements, the first at {first}: {values}"
