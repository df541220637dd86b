"""The operator and the kernels in place give the same bits; the operator also for compilers and other dtypes."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import lowering, native
from qlangevin.lowering import operator
from tests.helpers.networks import CASES, build, gradients, is_on_grid, same_gradients

COMPILED = ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in ("mlp", "imagenet"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("format", ["bfp8", "bfp8/tensor", "fixed8.4"])
def test_the_kernels_and_the_operators_give_the_same_bits(name: str, format: str, threads: int) -> None:
    model, x, labels = build(name)
    ql.lower(model, format, format)
    other = copy.deepcopy(model)
    for _ in range(2):  # the second time, layers produce the codes with their outputs
        fast = gradients(model, x, labels)
        with native.disabled():
            assert same_gradients(gradients(other, x, labels), fast)


def test_transposed_outputs_keep_their_layout_compiled_and_not() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quantize = ql.Quantize()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.quantize((x * 2).t())
            return y * 2

    model = ql.lower(Transposed(), "bfp8", "bfp8")
    x = torch.randn(16, 32)
    with torch.no_grad():
        y = copy.deepcopy(model)(x)
        fake = torch.library.opcheck(
            operator.lower_op,
            ((x * 2).t(), "bfp8", "bfp8", "nearest", 0, 0, torch.tensor(1)),
            test_utils="test_faketensor",
        )
        assert fake == {"test_faketensor": "SUCCESS"}
        with native.disabled():
            assert torch.equal(model(x), y)
            assert y.stride() == (1, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = ql.lower(nn.Sequential(nn.Tanh(), nn.LayerNorm(8), nn.ReLU()), "bfp8e7", "bfp8e7").to(dtype)
    x = torch.randn(4, 8, dtype=dtype, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == y.dtype == dtype
    assert is_on_grid(y.detach().float(), "bfp8e7")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of an LSTM, by dynamo
def test_it_compiles(name: str) -> None:
    model, x, labels = build(name)
    ql.lower(model, "bfp8", "bfp8", functions=False)  # compiled code does not see them
    other = copy.deepcopy(model)
    compiled: Any = torch.compile(other, backend="aot_eager")
    for _ in range(2):
        assert same_gradients(gradients(compiled, x, labels), gradients(model, x, labels))
    assert lowering.state_dict(other) == lowering.state_dict(model)
    assert name == "lstm" or not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.slow
@pytest.mark.skipif(not native.available, reason="there may be no compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own
def test_it_compiles_to_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # PyTorch's cache does not tell instruction sets apart: code compiled under another ATEN_CPU_CAPABILITY would be loaded.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x, labels = build("mlp")
    ql.lower(model, "bfp8", "bfp8")
    other = copy.deepcopy(model)
    compiled: Any = torch.compile(other)
    for _ in range(2):
        torch.testing.assert_close(gradients(compiled, x, labels), gradients(model, x, labels))
    torch._dynamo.reset()


@pytest.mark.parametrize("errors", [False, True])
@pytest.mark.parametrize("kernels", [True, False])
def test_the_smallest_activations_and_errors_are_rounded_without_bias(errors: bool, kernels: bool) -> None:
    # 16 random bits would make 2^-18 of a gap 0 for ever. Here the number of ones is binomial: 5.5 s.e., false alarms 4e-8 each.
    model = ql.lower(nn.Sequential(ql.Quantize()), *((None, "fixed8.0") if errors else ("fixed8.0", None)))
    count = 1 << 22
    for value in (2.0**-18, 1.2 * 2.0**-17, -(2.0**-16), 1 - 2.0**-18):
        x = torch.full((count,), value if not errors else 1.0, requires_grad=True)
        with contextlib.nullcontext() if kernels else native.disabled():
            y = model(x)
            if errors:
                y.backward(torch.full((count,), value))
        drawn = x.grad if errors else y.detach()
        assert drawn is not None
        share = float(drawn.double().mean())
        p = abs(value) % 1
        assert abs(share - value) < 5.5 * (p * (1 - p) / count) ** 0.5
