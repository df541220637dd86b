"""A lowered model is a module like any other: it prints, copies, pickles, and `unlower` restores it."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import lowering
from tests.helpers.networks import CASES, build, gradients, same_gradients


def test_repr_names_the_formats_and_unlower_restores_everything() -> None:
    for name in CASES:
        model, _, _ = build(name)
        text, keys = repr(model), list(model.state_dict())
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        attributes = [set(m.__dict__) for m in model.modules()]
        ql.lower(model, "bfp8", "fixed8.4")
        assert "activations=bfp8, errors=fixed8.4" in repr(model)
        assert list(model.state_dict()) == keys
        ql.unlower(model)
        assert repr(model) == text
        assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
        assert [set(m.__dict__) for m in model.modules()] == attributes
        ql.lower(model, "bfp8")


def test_unlower_restores_methods_that_the_instance_had() -> None:
    layer = nn.Linear(3, 3)
    forward = layer.forward = lambda input: input + 1  # type: ignore[method-assign]
    extra_repr = layer.extra_repr = lambda: "mine"  # type: ignore[method-assign]
    ql.lower(layer, "bfp8")
    assert repr(layer) == "Linear(mine, activations=bfp8, errors=fp32)"
    ql.unlower(layer)
    assert layer.__dict__["forward"] is forward
    assert layer.__dict__["extra_repr"] is extra_repr


def test_a_forward_put_over_a_lowered_one_survives_unlower() -> None:
    model, x, _ = build("mlp")
    plain = copy.deepcopy(model)
    ql.lower(model, "bfp8")
    relu = model[2]  # type: ignore[index]
    below = relu.forward
    relu.forward = lambda input: below(input) + 1
    ql.unlower(model)
    assert torch.equal(relu(x), x.relu() + 1)
    del relu.forward
    assert torch.equal(model(x), plain(x))


def test_a_deep_copy_counts_for_itself() -> None:
    for name in ["mlp", "lstm", "resnet"]:
        model, x, labels = build(name)
        ql.lower(model, "bfp8", "bfp8")
        other = copy.deepcopy(model)
        first = gradients(model, x, labels)
        assert set(lowering.state_dict(other).values()) == {0}
        assert same_gradients(gradients(other, x, labels), first)


def test_a_pickled_model_computes_the_same() -> None:
    for name in ["resnet", "lstm"]:
        model, x, labels = build(name)
        ql.lower(model, "bfp8", "bfp8")
        other = pickle.loads(pickle.dumps(model))
        assert same_gradients(gradients(other, x, labels), gradients(model, x, labels))


@pytest.mark.parametrize("name", ["mlp", "resnet", "lstm", "transformer"])
def test_functional_call(name: str) -> None:
    model, x, _ = build(name)
    ql.lower(model, "bfp8")
    other = copy.deepcopy(model)
    values = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
    expected = torch.func.functional_call(model, values, (x,))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    assert torch.equal(other(x), expected)


def test_a_forward_set_by_the_user_is_called_and_kept() -> None:
    layer = nn.Conv2d(3, 4, 3)
    layer.forward = MethodType(lambda self, x: torch.full((1, 4), 0.3), layer)  # type: ignore[method-assign]
    x = torch.randn(2, 3, 8, 8)
    assert ql.lower(layer, "fixed8.1").eval()(x).tolist() == [[0.5] * 4]
    assert ql.unlower(layer)(x).shape == (1, 4)


class Documented(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, input_ids: Tensor, mask: Tensor | None = None, *, scale: int = 1) -> Tensor:
        """Compute something."""
        y: Tensor = self.layers(input_ids)
        return y * scale


def test_forward_keeps_its_signature_and_its_name() -> None:
    model = Documented()
    expected, relu = (inspect.signature(m.forward) for m in (model, model.layers[1]))
    ql.lower(model, "bfp8", "bfp8")
    found: Any
    for found in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert inspect.signature(found.forward) == expected
        assert inspect.signature(found.layers[1].forward) == relu  # its forward is replaced by that of a handler
        assert found.forward.__name__ == "forward"
        assert found.forward.__qualname__ == "Documented.forward"
        assert found.forward.__doc__ == "Compute something."
        assert inspect.unwrap(found.forward).__self__ is found
        assert found(torch.randn(2, 4), scale=0).abs().max() == 0
    layer = nn.Linear(3, 3)

    def forward(input: Tensor, more: int = 2) -> Tensor:
        return input + more

    layer.forward = forward  # type: ignore[method-assign]
    assert list(inspect.signature(ql.lower(layer, "bfp8").forward).parameters) == ["input", "more"]
