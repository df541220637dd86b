"""ReLU and dropout that keep a bit a number for backward."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import lowering, native
from qlangevin.lowering.bit_masks import DropoutFunction, ReLUMaskFunction, pack_bits, unpack_bits

needs_kernels = pytest.mark.skipif(not native.available, reason="without kernels PyTorch keeps what it keeps")


@pytest.mark.parametrize("shape", [(1,), (8,), (3, 7), (2, 3, 5, 4)])
def test_bits_are_packed_and_unpacked(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    bits = pack_bits(mask)
    assert bits.nbytes == -(-mask.numel() // 8)
    assert torch.equal(unpack_bits(bits, mask.shape), mask)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_relu_has_the_gradient_of_pytorch(inplace: bool, channels_last: bool) -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0, 0], x[0, 0, 0, 1] = float("nan"), 0.0
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    e = torch.randn_like(x)
    results = []
    for function in (lambda t: ReLUMaskFunction.apply(t, inplace), lambda t: F.relu(t, inplace)):  # type: ignore[no-untyped-call]
        start = x.clone().requires_grad_()
        y = function(start * 1)
        (grad,) = torch.autograd.grad(y, start, e)
        results.append((y, grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_dropout_draws_and_derives_as_pytorch_does() -> None:
    x, e = torch.randn(8, 9), torch.randn(8, 9)
    results = []
    for function in (lambda t: DropoutFunction.apply(t, 0.3), lambda t: F.dropout(t, 0.3)):  # type: ignore[no-untyped-call]
        torch.manual_seed(1)
        start = x.clone().requires_grad_()
        y = function(start)
        results.append((y.detach(), torch.autograd.grad(y, start, e)[0]))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


class OffGrid(nn.Module):
    """A ReLU, as a module or a function, of numbers that are not on the grid, after a layer that is skipped."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.first, self.relu, self.last, self.functional = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), functional

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = F.relu(y) if self.functional else self.relu(y)
        return self.last(y)  # type: ignore[no-any-return]


@needs_kernels
@pytest.mark.parametrize("functional", [False, True])
def test_a_relu_off_the_grid_keeps_a_bit_a_number(functional: bool) -> None:
    model = ql.lower(OffGrid(functional), "bfp8", "bfp8", skip="first")
    x = torch.randn(64, 64)
    rows = {row.name: row for row in lowering.summary(model, x).rows}
    row = rows["/relu/0" if functional else "relu"]
    assert (row.lowered, row.code_bytes, row.float_bytes) == (True, 64 * 64 // 8, 0)


@needs_kernels
def test_dropout_keeps_a_bit_a_number() -> None:
    model = ql.lower(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), "bfp8", "bfp8")
    x = torch.randn(64, 64)
    assert lowering.summary(model, x).rows[1].code_bytes == 64 * 64 // 8
    y = model(x)
    assert 0.4 < float((y == 0).float().mean()) < 0.6
    model.eval()
    assert torch.equal(model(x), model[0](x))


@needs_kernels
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_dropout_that_drops_nothing_leaves_numbers_on_the_grid_where_they_are(p: float) -> None:
    model = ql.lower(nn.Sequential(nn.Linear(8, 8), nn.Dropout(p)), "bfp8", "bfp8").train(p == 0.0)
    outputs = list[Tensor]()
    model[0].register_forward_hook(lambda module, args, y: outputs.append(y))
    assert model(torch.randn(4, 8)) is outputs[0]


def test_errors_meet_the_handler_of_such_a_dropout_first() -> None:
    x, e, found = torch.randn(4, 8), torch.randn(4, 8), list[Tensor]()
    for enabled in (True, False):  # the PyTorch path rounds an error where the output was returned
        torch.manual_seed(0)
        model = ql.lower(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0)), "bfp8", "bfp8")
        with contextlib.nullcontext() if enabled else native.disabled():
            model(x).backward(e)
        gradient = next(model.parameters()).grad
        assert gradient is not None
        found.append(gradient)
    assert torch.equal(*found)
