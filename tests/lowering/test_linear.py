"""Linear layers as one function: the bits of PyTorch's own, in memory of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import QTensor
from qlangevin.lowering.linear import has_linear_function, linear


def layer(bias: bool = True, packed: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    module = nn.Linear(24, 10, bias=bias)
    return ql.pack(module, "bfp8") if packed else module


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("shape", [(6, 24), (1, 24), (0, 24), (3, 5, 24)])
def test_outputs_and_gradients_are_those_of_pytorch(
    shape: tuple[int, ...], needs_grad: bool, bias: bool, packed: bool
) -> None:
    module, found = layer(bias, packed), []
    x = torch.randn(shape)
    if not has_linear_function(module, x):
        assert not packed or len(shape) == 3
        assert not bias or len(shape) == 2
        return
    for function in (nn.functional.linear, linear):
        given = x.clone().requires_grad_(needs_grad)
        module.zero_grad()
        y = function(given, module.weight, module.bias)
        y.square().sum().backward()
        found.append([y, given.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("packed", [True, False])
def test_outputs_and_errors_of_three_dims_are_no_views(packed: bool) -> None:
    module, errors = layer(packed=packed), list[Tensor]()
    x = torch.randn(3, 5, 24, requires_grad=True) * 1.0
    x.register_hook(errors.append)
    y = linear(x, module.weight, module.bias)
    assert not y._is_view()
    y.sum().backward()
    assert not errors[0]._is_view()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shape", [(4, 24), (2, 2, 24)])
def test_second_derivatives(shape: tuple[int, ...], packed: bool) -> None:
    module, found = layer(packed=packed), []
    for function in (nn.functional.linear, linear):
        x = torch.ones(shape, requires_grad=True)
        (g,) = torch.autograd.grad(function(x, module.weight, module.bias).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [x, *module.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_frozen_weights_and_a_step_before_backward() -> None:
    module, x = layer(), torch.randn(4, 24, requires_grad=True)
    y = linear(x, module.weight, module.bias)
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    for p in module.parameters():
        p.requires_grad_(False)
    linear(x, module.weight, module.bias).sum().backward()
    assert torch.equal(x.grad, module.weight.decode().sum(0).expand(4, 24))  # type: ignore[arg-type, attr-defined]


def test_a_lowered_layer_takes_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, dispatch = [], QTensor.dispatch

    def record(func: Any, args: Any, kwargs: Any) -> Any:
        calls.append(func)
        return dispatch(func, args, kwargs)

    model = ql.lower(ql.pack(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 10)), "bfp8"), "bfp8", "bfp8")
    model(torch.randn(4, 24)).sum().backward()
    monkeypatch.setattr(QTensor, "dispatch", staticmethod(record))
    model(torch.randn(4, 24)).sum().backward()
    assert calls == []
    model.eval()
    with torch.no_grad():
        assert model(torch.randn(4, 24)).shape == (4, 10)
    assert calls  # PyTorch's own way


@pytest.mark.parametrize("dim", [1, 4])
def test_other_inputs_take_the_usual_way(dim: int) -> None:
    module = layer()
    assert not has_linear_function(module, torch.randn([24] * dim))
    assert not has_linear_function(nn.Linear(24, 10), torch.randn(2, 24))
    assert not has_linear_function(nn.Linear(24, 10), torch.randn(2, 24, 24).transpose(0, 1))
    assert not has_linear_function(nn.Linear(24, 10, bias=False), torch.randn(2, 3, 24))
    assert not has_linear_function(module, torch.randn(2, 24, dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        assert not has_linear_function(module, torch.randn(2, 24))


def test_transposes_of_packed_matrices() -> None:
    q: Tensor = ql.encode(torch.randn(3, 5), "bfp8")
    assert isinstance(q.t(), QTensor)
    assert torch.equal(q.t().decode(), q.decode().t())  # type: ignore[attr-defined]
    assert torch.equal(q.t().t().decode(), q.decode())  # type: ignore[attr-defined]
    vector = ql.encode(torch.randn(5), "bfp8")
    assert torch.equal(vector.t().decode(), vector.decode())  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="2"):
        ql.encode(torch.randn(2, 3, 4), "bfp8").t()
