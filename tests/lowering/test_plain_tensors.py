"""Kernels that write in place: only where no other reference sees it, in any memory format, with the right derivatives."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import native
from qlangevin.lowering import grid_relu, plain_tensors, tensor_owners
from qlangevin.lowering.memory_order import quantize_in_memory_order
from qlangevin.quantization import random
from tests.helpers.networks import build, gradients, same_gradients, two_linear


def test_errors_that_others_refer_to_are_not_overwritten() -> None:
    layer = ql.lower(nn.Linear(40, 40), errors="bfp4")
    mine = torch.randn(30, 40)
    before = mine.clone()
    layer(torch.randn(30, 40)).backward(mine)
    assert torch.equal(mine, before)

    seen: list[Tensor] = []
    x = torch.randn(30, 40)
    y = layer(x)
    z = y * 2.0
    z.register_hook(lambda e: seen.append(e))
    kept = torch.randn(30, 40)
    (z * kept).sum().backward()
    assert torch.equal(seen[0], kept)

    branches = ql.lower(nn.ModuleList([nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)]), errors="bfp4")
    a, b = branches[0](x), branches[1](x)  # one error for two layers, rounded for each with random bits of its own
    (a + b).backward(mine)
    grads = [layer.weight.grad for layer in branches]
    assert isinstance(grads[0], Tensor)
    assert isinstance(grads[1], Tensor)
    assert not torch.equal(grads[0], grads[1])
    assert torch.equal(mine, before)


@pytest.mark.parametrize("kind", ["input", "constant", "sigmoid", "global", "forward"])
def test_a_tensor_that_others_refer_to_is_not_overwritten(kind: str) -> None:
    layer, x, mine = nn.Linear(20, 20), torch.randn(20, 20), torch.randn(20, 20)
    before = (x.clone(), mine.clone())
    seen: list[tuple[Tensor, Tensor]] = []  # what a global hook, which comes first, got: the tensor and a copy
    if kind == "forward":
        layer.forward = lambda input: mine  # type: ignore[method-assign]
    elif kind != "global":
        give = {"input": lambda m, a, y: a[0], "constant": lambda m, a, y: mine, "sigmoid": lambda m, a, y: y.sigmoid()}
        layer.register_forward_hook(give[kind])
    ql.lower(layer, "fixed8.1")
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, a, y: seen.append((y, y.detach().clone())))
    y = layer(x)
    handle.remove()
    assert torch.equal(x, before[0])
    assert torch.equal(mine, before[1])
    assert kind == "sigmoid" or all(torch.equal(*pair) for pair in seen)
    if kind == "sigmoid":
        s = torch.nn.functional.linear(x, layer.weight, layer.bias).sigmoid().detach()
        (found,) = torch.autograd.grad(y.sum(), layer.bias)
        torch.testing.assert_close(found, (s * (1 - s)).sum(0))


def test_an_output_that_backward_reads_is_not_overwritten() -> None:
    class Gate(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).sigmoid()

    gate = Gate(5, 5)
    x = torch.randn(3, 5)
    s = gate(x).detach()
    ql.lower(gate, "fixed8.1")
    gate(x).sum().backward()
    assert gate.bias.grad is not None
    torch.testing.assert_close(gate.bias.grad, (s * (1 - s)).sum(0))


def test_only_tensors_without_other_references_may_be_overwritten() -> None:
    assert not tensor_owners.only_autograd_holds(torch.ones(3), "hook")
    assert not tensor_owners.only_autograd_holds(torch.ones(4, 4)[:2], "backward")


@pytest.mark.skipif(not native.available, reason="only the kernels write in place")
@pytest.mark.parametrize("watched", [False, True])
def test_errors_are_rounded_in_place_unless_another_hook_keeps_them(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwritten: list[bool] = []

    def record(*args: Any, overwrite: bool = False, **kwargs: Any) -> Tensor:
        if args[4] == random.ERROR:
            overwritten.append(overwrite)
        return quantize_in_memory_order(*args, overwrite=overwrite, **kwargs)

    for module in (plain_tensors, grid_relu):
        monkeypatch.setattr(module, "quantize_in_memory_order", record)
    model = ql.lower(two_linear(), "bfp8", "bfp8")
    kept: list[Tensor] = []
    if watched:

        def keep_error(module: nn.Module, args: Any, y: Tensor) -> None:
            y.register_hook(kept.append)

        model[1].register_forward_hook(keep_error)
    (model(torch.randn(64, 64)) * torch.randn(64, 64)).sum().backward()
    assert overwritten == [True, not watched]


def test_channels_last_stays_channels_last() -> None:
    model, x, labels = build("resnet")
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.to(memory_format=torch.channels_last)
    ql.lower(model, "bfp8", "bfp8")
    layouts: list[bool] = []
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, ql.Quantize)):
            module.register_forward_hook(
                lambda m, a, y: layouts.append(y.is_contiguous(memory_format=torch.channels_last))
            )
    other = copy.deepcopy(model)
    first = gradients(model, x, labels)
    assert all(layouts)
    with native.disabled():
        assert same_gradients(gradients(other, x, labels), first)


def test_the_derivative_of_a_derivative() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    ql.lower(model, "bfp16", "bfp16")
    x = torch.randn(4, 6, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    ql.unlower(model).zero_grad()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("format", ["bfp8", "fixed8.4", "fp8_e5m2"])
def test_a_nan_reaches_the_gradient(format: str) -> None:
    model = two_linear()
    with torch.no_grad():
        model.get_parameter("0.bias")[3] = torch.nan
    ql.lower(model, format, format)
    other, x = copy.deepcopy(model), torch.randn(64, 64)
    for _ in range(2):
        for one in (model, other):
            one.zero_grad()
            with native.disabled() if one is other else contextlib.nullcontext():
                one(x).sum().backward()
        spoilt = [one.get_parameter("2.weight").grad for one in (model, other)]
        assert spoilt[0] is not None
        assert spoilt[1] is not None
        assert spoilt[0].isnan().any()
        assert torch.equal(spoilt[0].isnan(), spoilt[1].isnan())


@pytest.mark.parametrize("errors", ["bfp8/4", "bfp8/tensor", "fixed8.4"])
def test_relu_masks_errors_whose_blocks_are_not_in_the_order_of_memory(errors: str) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 6), nn.Flatten())
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ql.lower(model, "fixed8.4", errors)
    other, x = copy.deepcopy(model), torch.randn(6, 4, 8, 8).to(memory_format=torch.channels_last)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    found = gradients(model, x, labels)
    with native.disabled():
        assert same_gradients(gradients(other, x, labels), found)
