"""Tensors kept as codes for backward: which ones, how often, and that no gradient changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import native
from qlangevin.lowering import saved_tensors
from qlangevin.lowering.saved_tensors import SavedAsCodes, SavedCodes, SavedUnchanged
from qlangevin.quantization.codes import encode_exactly
from tests.helpers.networks import build, gradients, same_gradients, two_linear

FORMATS = ["bfp8", "bfp8/tensor", "bfp8/4", "fixed8.4", "fp8_e5m2", "bfp16"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["resnet", "imagenet", "transformer", "lstm", "unet"])
def test_codes_kept_for_backward_change_nothing(name: str, format: str) -> None:
    model, x, labels = build(name)
    other = copy.deepcopy(model)
    ql.lower(model, format, format)
    ql.lower(other, format, format, save_codes=False)
    for _ in range(2):
        assert same_gradients(gradients(model, x, labels), gradients(other, x, labels))


def test_layers_of_one_model_in_different_formats() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    other = copy.deepcopy(model)
    for one, save_codes in ((model, True), (other, False)):
        ql.lower(one, "fixed8.1", layers="0", save_codes=save_codes)
        ql.lower(one, "bfp8", "bfp8", skip="0", seed=1, save_codes=save_codes)
    x, labels = torch.randn(64, 64), torch.randint(64, (64,))
    for _ in range(2):
        assert same_gradients(gradients(model, x, labels), gradients(other, x, labels))


def saved_by(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what is kept for the tensors that a forward saves."""
    kept: list[Any] = []
    pack = SavedAsCodes.pack

    def record(self: SavedAsCodes, t: Tensor) -> Any:
        kept.append(pack(self, t))
        return kept[-1]

    monkeypatch.setattr(SavedAsCodes, "pack", record)
    model(x)
    return kept


def test_activations_are_kept_as_codes_once_and_relu_keeps_no_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    model.append(nn.Linear(8 * 16, 5))
    ql.lower(model, "bfp8", "bfp8")
    x = torch.randn(8, 3, 8, 8)
    for _ in range(2):
        kept = saved_by(model, x, monkeypatch)
        monkeypatch.undo()
        others = [t.tensor for t in kept if isinstance(t, SavedUnchanged) and t.tensor.numel() >= 1024]
        floats = [t for t in others if t.dtype == torch.float32 and not t.requires_grad]
        codes = {c.codes.data_ptr() for c in kept if isinstance(c, SavedCodes)}
        assert [tuple(t.shape) for t in floats] == [(8, 3, 8, 8)]  # the input, which is not on the grid
        # the outputs of both convolutions and of relu; without kernels also that of batch norm, which relu saves
        assert len(codes) == (3 if native.available else 4)


def test_outputs_that_were_saved_are_encoded_in_the_next_forward_by_their_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = ql.lower(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "bfp8"), torch.randn(64, 64)
    encoded: list[bool] = []

    def record(values: Tensor, format: ql.Format) -> Any:
        found = encode_exactly(values, format)
        encoded.append(found is not None)
        return found

    monkeypatch.setattr(saved_tensors, "encode_exactly", record)
    counts = []
    for _ in range(3):
        encoded.clear()
        model(x)
        counts.append(sum(encoded))
        model = copy.deepcopy(model)
    assert counts == ([1, 0, 0] if native.available else [1, 1, 1])


def test_relu_frees_its_codes_after_backward() -> None:
    model = two_linear()
    ql.lower(model, "bfp8", "bfp8")
    loss = model(torch.randn(32, 64)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_failing_forward_leaves_no_hooks_behind() -> None:
    model, x, _ = build("mlp")
    ql.lower(model, "bfp8")
    with pytest.raises(RuntimeError):
        model(x[:, :1])
    assert SavedAsCodes.innermost() is None
    saved: list[Tensor] = []
    y = torch.ones(2000, requires_grad=True) * torch.ones(2000)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y.square()
    assert isinstance(saved[0], Tensor)


def test_a_saved_tensor_changed_before_backward_raises() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sigmoid().mul_(2.0)  # type: ignore[no-any-return]

    x = torch.randn(64, 64)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ql.lower(Doubled(), "fixed16.12", functions=False)(x).sum().backward()
    for pack in (False, True):
        model = ql.lower(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "bfp8", rounding="nearest")
        model = ql.pack(model, "bfp8") if pack else model
        y = model(x).sum()
        sampler = ql.SGLD(model.parameters(), 0.1, 100, weights="bfp8")
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        sampler.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_inference_mode_and_disabled_hooks() -> None:
    model, x, _ = build("resnet")
    ql.lower(model, "bfp8", "bfp8").eval()
    expected = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        assert torch.equal(model(x), expected)


def test_views_of_weights_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ql.lower(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "bfp8", "bfp8")
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(ql.quantize(p, "bfp8"))
    kept = saved_by(model, torch.randn(64, 64), monkeypatch)
    weights = {layer.weight.untyped_storage().data_ptr() for layer in model if isinstance(layer, nn.Linear)}
    unchanged = {t.tensor.untyped_storage().data_ptr() for t in kept if isinstance(t, SavedUnchanged)}
    assert weights & unchanged  # that of the first is not needed, as the input requires no gradient
    assert sum(isinstance(t, SavedCodes) for t in kept) == 1
