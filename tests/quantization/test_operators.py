"""The operators: any shape, dtype and device, autograd, torch.compile, fake tensors, wrong input."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qlangevin import BlockFloat, FixedPoint, Key, corrected, encode, quantize
from qlangevin.quantization.codes import decode_op, encode_op
from qlangevin.quantization.operators import corrected_op, quantize_op
from tests.helpers.strategies import NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (4, 3, 2)])
def test_shape_and_dtype_are_kept(name: str, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape) / 3
    for result in (quantize(x, name), quantize(x, name, "stochastic", Key(0)), corrected(x, 1e-3, name, Key(0))):
        assert result.shape == x.shape
        assert result.dtype == x.dtype
        assert result.data_ptr() != x.data_ptr() or x.numel() == 0


@pytest.mark.parametrize("name", ["fixed8.3", "bfp8", "bfp8/3", "fp8_e4m3"])
def test_strides_do_not_matter(name: str) -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    for view in (x.T, x[:, ::2], x.expand(2, 6, 10), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        same = view.contiguous()
        assert torch.equal(quantize(view, name), quantize(same, name))
        assert torch.equal(quantize(view, name, "stochastic", Key(1)), quantize(same, name, "stochastic", Key(1)))
        assert torch.equal(corrected(view, 0.01, name, Key(1)), corrected(same, 0.01, name, Key(1)))
        assert torch.equal(encode(view, name).decode(), encode(same, name).decode())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = x.to(torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(quantize(x, "fixed8.3"), quantize(wide, "fixed8.3").to(dtype))
    assert torch.equal(corrected(x, 0.01, "fixed8.3", Key(1)), corrected(wide, 0.01, "fixed8.3", Key(1)).to(dtype))


def test_float64_uses_its_digits() -> None:
    x = torch.tensor([0.0625 - 1e-12, 0.0625], dtype=torch.float64)
    assert quantize(x, "fixed8.3").tolist() == [0.0, 0.125]
    assert quantize(torch.tensor([1 / 3], dtype=torch.float64), "fp32").item() == torch.tensor(1 / 3).double().item()


def test_the_variance_may_be_a_number_a_scalar_or_a_tensor_that_broadcasts() -> None:
    mu, key = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), Key(2)
    expected = corrected(mu, 0.25, "bfp8", key)
    for variance in (torch.tensor(0.25), torch.full((8, 5), 0.25), torch.full((5,), 0.25), torch.full((8, 1), 0.25)):
        assert torch.equal(corrected(mu, variance, "bfp8", key), expected)


def test_at_full_precision_q_vc_adds_the_noise() -> None:
    mu = torch.zeros(100_000)
    drawn = corrected(mu, 4.0, "fp32", Key(0))
    assert float(drawn.std()) == pytest.approx(2.0, rel=0.01)
    assert len(drawn.unique()) > 90_000


def test_gradients_pass_straight_through() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    weights = torch.randn(4, 4)
    (quantize(x, "bfp4") * weights).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights)
    x.grad = None
    (corrected(x, 0.1, "bfp4", Key(0)) * weights).sum().backward()
    assert torch.equal(x.grad, weights)  # type: ignore[arg-type]


FORMAT, BLOCKS = FixedPoint(8, 3), BlockFloat(8)


def everything(x: Tensor, key: Key) -> Tensor:
    y = quantize(x * 2, FORMAT) + quantize(x, "e4m3", "stochastic", key)
    return y + corrected(x, 0.01, BLOCKS, key) + corrected(x, x.abs(), "bfp8", key, "paper")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_has_no_graph_break_and_the_same_result(backend: str) -> None:
    x = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(everything, backend=backend, fullgraph=True)
    for step in range(3):
        key = Key(3, 1, step)
        assert torch.equal(compiled(x, key), everything(x, key))


@pytest.mark.parametrize("utility", ["test_schema", "test_faketensor", "test_autograd_registration"])
def test_the_operators_keep_torchs_rules(utility: str) -> None:
    x = torch.randn(5, 6, requires_grad=True)
    check = torch.library.opcheck
    check(quantize_op, (x, "bfp8", "stochastic", 1, 2, 3, 0), test_utils=utility)
    check(corrected_op, (x, torch.tensor(0.1), "fixed8.3", "exact", -1, 2, 3), test_utils=utility)
    values = quantize(x.detach(), "bfp8")
    check(encode_op, (values, "bfp8"), test_utils=utility)
    check(decode_op, (*encode_op(values, "bfp8"), "bfp8"), test_utils=utility)


def test_fake_tensors_are_enough_to_know_the_result() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4, dtype=torch.bfloat16)
        assert quantize(x, "fixed8.3").shape == (3, 4)
        assert corrected(x, 0.1, "fixed8.3", Key(0)).dtype == torch.bfloat16
        codes, exponents = encode_op(torch.empty(3, 4), "bfp8")
        assert (codes.dtype, exponents.shape) == (torch.int8, (3,))


X = torch.ones(3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: quantize(X, "fixed9"), ValueError, "unknown format 'fixed9'"),
        (lambda: quantize(X, "fixed8.3", "corrected"), ValueError, "one of 'nearest', 'stochastic', got 'corrected'"),
        (lambda: quantize(X, "fixed8.3", "stochastic"), ValueError, r"pass key=Key\(seed\)"),
        (lambda: quantize(X.int(), "fixed8.3"), TypeError, r"convert it with .float\(\)"),
        (lambda: quantize(X.bfloat16(), "fixed16.8"), ValueError, "cannot hold every number of fixed16.8"),
        (lambda: corrected(X, -1.0, "fixed8.3", Key(0)), ValueError, "variance must be .* not negative, got -1.0"),
        (lambda: corrected(X, float("nan"), "fixed8.3", Key(0)), ValueError, "got nan"),
        (lambda: corrected(X, float("inf"), "fixed8.3", Key(0)), ValueError, "got inf"),
        (lambda: corrected(X, 1e60, "fixed8.3", Key(0)), ValueError, "got 1e\\+60"),
        (lambda: corrected(X, torch.tensor([1.0, -2.0, 1.0]), "bfp8", Key(0)), ValueError, "got -2.0"),
        (lambda: corrected(X, 1.0, "bfp8", Key(0), "best"), ValueError, "algorithm must be one of"),  # type: ignore[arg-type]
        (lambda: corrected(X, torch.ones(4), "bfp8", Key(0)), RuntimeError, "must match"),
    ],
)
def test_wrong_input_is_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
