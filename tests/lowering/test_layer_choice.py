"""Layers by what they do: modules of the user's without children are lowered, but losses, rotary embeddings and the like."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import lowering
from tests.helpers.networks import gradients, is_on_grid, same_gradients


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class HandwrittenGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))


class Rotary(nn.Module):
    """Cosines of positions; the input only says how many."""

    frequency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.rand(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.arange(x.shape[0], dtype=x.dtype)[:, None] * self.frequency
        return angles.cos(), angles.sin()


class OwnLoss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.gelu, self.rotary, self.loss = (
            nn.Linear(8, 8),
            RMSNorm(),
            HandwrittenGELU(),
            Rotary(),
            OwnLoss(),
        )
        self.flat, self.same = nn.Flatten(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        cos, sin = self.rotary(y)
        y = y * cos + y.flip(-1) * sin
        return self.flat(self.same(self.gelu(y)))  # type: ignore[no-any-return]


def test_modules_of_the_user_are_layers() -> None:
    model = ql.lower(Net(), "bfp8", "bfp8")
    layers = {name for name in lowering.state_dict(model) if "/" not in name}
    assert layers == {"linear", "norm", "gelu", "rotary"}
    seen: dict[str, Tensor] = {}
    for name in ("norm", "gelu", "rotary"):
        model.get_submodule(name).register_forward_hook(
            lambda m, a, y, name=name: seen.update({name: y[0] if isinstance(y, tuple) else y})
        )
    x = torch.randn(5, 8)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            model.train(training)(x)
        assert is_on_grid(seen["norm"], "bfp8")
        assert is_on_grid(seen["gelu"], "bfp8")
        assert torch.equal(seen["rotary"], (torch.arange(5.0)[:, None] * model.rotary.frequency).cos())
    counts = lowering.state_dict(model)
    assert counts["norm"] == counts["gelu"] == 1
    assert counts["rotary"] == 0
    assert {name for name in counts if "/" in name} == {"/add/0"}  # the rotation


def test_the_functions_of_a_users_layer_are_not_rounded() -> None:
    model = nn.Sequential(nn.Linear(8, 8), RMSNorm())
    plain = copy.deepcopy(model)
    x = torch.randn(5, 8)
    ql.lower(model, "bfp8", rounding="nearest")
    expected = ql.quantize(plain[1](ql.quantize(plain[0](x), "bfp8")), "bfp8")
    assert torch.equal(model(x), expected)
    assert torch.equal(model.eval()(x), expected)


def test_a_skipped_module_is_left_alone_with_its_functions() -> None:
    model = Net()
    ql.lower(model, "bfp8", skip=["norm", "linear"])
    x = torch.randn(5, 8)
    norm = model.norm(model.linear(x))
    assert torch.equal(norm, copy.deepcopy(ql.unlower(model)).norm(model.linear(x)))


def test_subclasses_and_models_of_one_module() -> None:
    class Net1(nn.Module):
        """A whole model without children: its functions are lowered, and it is no layer."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(F.linear(x, self.weight))

    model = ql.lower(Net1(), "bfp8", "bfp8")
    model(torch.randn(5, 8))
    assert lowering.state_dict(model) == {"/linear/0": 1, "/relu/0": 1}


def test_parametrizations_are_no_layers() -> None:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).T

    model = nn.Sequential(nn.Linear(8, 8))
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", Symmetric())
    ql.lower(model, "bfp8")
    assert list(lowering.state_dict(model)) == ["0"]


@pytest.mark.parametrize("need_weights", [False, True])
def test_attention_rounds_its_queries_and_weights(need_weights: bool) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    ql.lower(model, "bfp8", "bfp8")
    x, mask = torch.randn(4, 5, 8), nn.Transformer.generate_square_subsequent_mask(5)
    y, weights = model(x, x, x, need_weights=need_weights, attn_mask=mask, average_attn_weights=False)
    assert is_on_grid(y, "bfp8")
    y.sum().backward()
    names = {name for name in lowering.state_dict(model) if "/" in name}
    assert "/linear/0" in names
    assert "/linear/1" not in names  # the output, which the module rounds
    if need_weights:
        assert is_on_grid(weights, "bfp8")
        assert float(weights.detach()[..., 0, 1:].abs().max()) == 0
    else:
        assert "/scaled_dot_product_attention/0" in names


def test_the_encoder_of_pytorch_in_training_keeps_codes_and_the_same_gradients() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Linear(16, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(80, 3)
    )
    other = copy.deepcopy(model)
    ql.lower(model, "bfp8", "bfp8")
    ql.lower(other, "bfp8", "bfp8", save_codes=False)
    x, labels = torch.randn(16, 5, 16), torch.arange(16) % 3
    for _ in range(2):
        assert same_gradients(gradients(model, x, labels), gradients(other, x, labels))
