"""Operators and QTensors on devices with kernels of their own: few calls, no copies, and tensors that are apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from qlangevin import Key, corrected, encode, parse, quantize
from qlangevin.quantization import backend
from qlangevin.quantization.code_memory import _is_usual, code_layout
from qlangevin.quantization.codes import decode_values
from qlangevin.quantization.laws import Mean
from qlangevin.quantization.operators import draw
from tests.helpers.deferred_layers import DeferredKernels, deferred_cpu
from tests.helpers.qtensors import coded


@pytest.fixture
def deferred() -> Iterator[DeferredKernels]:
    with deferred_cpu() as kernels:
        yield kernels


class Operations(TorchDispatchMode):
    """The operations that run within this context, beside those of kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "corrected"])
def test_half_precisions_are_not_converted(dtype: torch.dtype, rounding: Any, deferred: DeferredKernels) -> None:
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(dtype)

    def rounded() -> Tensor:
        if rounding == "corrected":
            return corrected(x, 0.01, "fixed8.4", Key(1))
        return quantize(x, "fixed8.4", rounding, Key(1))

    with Operations() as operations:
        found = rounded()
    assert deferred.calls == ["quantize"]
    assert "_to_copy" not in operations.found or rounding == "corrected"  # which converts the variance
    with backend.suspended(deferred):
        assert torch.equal(rounded(), found)


def test_a_packed_weight_is_decoded_by_one_call(deferred: DeferredKernels) -> None:
    q, x = coded("bfp8", 4, 6), torch.randn(3, 6)
    deferred.calls.clear()
    with Operations() as operations:
        values = q.decode()
    assert (deferred.calls, operations.found) == (["decode"], ["empty"])
    deferred.calls.clear()
    assert torch.equal(functional.linear(x, q), functional.linear(x, values))
    assert deferred.calls == ["decode"]


def test_encoding_takes_two_calls(deferred: DeferredKernels) -> None:
    encode(torch.randn(4, 6), "bfp8")
    assert deferred.calls == ["quantize", "encode"]


@pytest.mark.parametrize("format", ["bfp8", "fixed8.4"])
def test_a_spoiled_tensor_decodes_to_nan(format: str) -> None:
    q = coded(format, 4, 6)
    for flag in (0, 1):
        spoiled = torch.full((1,), flag, dtype=torch.int32)
        values = decode_values(q.codes, q.exponents, q.format, spoiled)
        assert bool(values.isnan().all()) == bool(flag)
        with backend.suspended(kernels) if (kernels := backend.kernels_for(q.codes)) else torch.no_grad():
            assert torch.equal(decode_values(q.codes, q.exponents, q.format, spoiled).isnan(), values.isnan())


def test_codes_and_exponents_of_two_devices() -> None:
    q = coded("bfp8", 4, 6)
    assert q.exponents is not None
    with pytest.raises(ValueError, match="one device, got cpu and meta; move one of them"):
        decode_values(q.codes, q.exponents.to("meta"), q.format)
    with pytest.raises(ValueError, match="one device, got codes on cpu, exponents on meta"):
        q.with_codes(q.codes, q.exponents.to("meta"))


def test_a_mean_of_two_devices() -> None:
    with pytest.raises(ValueError, match="one device, got cpu and meta"):
        draw(Mean(torch.ones(3), torch.ones(3, device="meta")), torch.zeros(()), parse("fixed8.4"), Key(0))


def test_sound_codes_are_recognized_on_every_device() -> None:
    q = coded("bfp8", 4, 6)
    layout, codes, exponents = code_layout(q.format, torch.Size((4, 6))), q.codes, q.exponents
    assert exponents is not None
    assert _is_usual(layout, codes, exponents)
    assert _is_usual(layout, codes.to("meta"), exponents.to("meta"))
    assert not _is_usual(layout, codes.to("meta"), exponents)
    assert not _is_usual(layout, codes, exponents.to("meta"))
