"""Lowered models on a device that the host must not wait for: the CPU's bits, its codes, and few calls of kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import native
from qlangevin.lowering import plain_tensors
from qlangevin.lowering.saved_tensors import SavedAsCodes, SavedCodes
from tests.helpers.deferred_layers import DeferredKernels, NoWaiting, deferred_cpu
from tests.helpers.networks import CASES, build, gradients, same_gradients


@pytest.fixture
def deferred() -> Iterator[DeferredKernels]:
    with deferred_cpu() as kernels:
        yield kernels


def channels_last(model: nn.Module, x: Tensor) -> Tensor:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("format", ["bfp8", "fixed8.4", "bfp16"])
@pytest.mark.parametrize("name", [*CASES, "resnet channels-last"])
def test_the_bits_are_those_of_the_cpu_and_nothing_waits(name: str, format: str) -> None:
    model, x, labels = build(name.split()[0])
    x = channels_last(model, x) if "channels-last" in name else x
    ql.lower(model, format, format)
    other = copy.deepcopy(model)
    for _ in range(2):  # the second time, layers produce the codes with their outputs
        expected = gradients(model, x, labels)
        with deferred_cpu() as kernels, NoWaiting(other):
            found = gradients(other, x, labels)
        assert same_gradients(found, expected)
        assert kernels.calls


def test_waiting_would_be_noticed() -> None:
    with NoWaiting(nn.Identity()), pytest.raises(AssertionError, match="waits for the device"):
        bool(torch.ones(1))


# ---- what is kept for backward


class Kept:
    """The tensors that forwards save, and what is kept of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Tensor, Any]] = []
        pack = SavedAsCodes.pack

        def record(saving: SavedAsCodes, t: Tensor) -> Any:
            self.found.append((t, pack(saving, t)))
            return self.found[-1][1]

        monkeypatch.setattr(SavedAsCodes, "pack", record)

    def large(self) -> list[tuple[tuple[int, ...], bool]]:
        """Return the shape of each float tensor, and True if it is kept as codes; forget them."""
        found, self.found = self.found, []
        return [
            (tuple(t.shape), isinstance(kept, SavedCodes))
            for t, kept in found
            if t.dtype == torch.float32 and t.numel() >= 1024 and not is_weight(t if t._base is None else t._base)
        ]


def is_weight(t: Tensor) -> bool:
    return t.is_leaf and t.requires_grad


@pytest.mark.skipif(not native.available, reason="without kernels, relu saves its input as well")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", ["mlp", "resnet", "imagenet"])
def test_the_same_tensors_are_kept_as_codes(name: str, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = build(name)
    x = x.repeat(10, 1, 1, 1)  # so that the last layers are worth it
    x = channels_last(model, x) if last else x
    ql.lower(model, "bfp8", "bfp8")
    other, kept = copy.deepcopy(model), Kept(monkeypatch)
    for _ in range(2):
        model(x)
        expected = kept.large()
        with deferred_cpu():
            other(x)
        assert kept.large() == expected
        assert [is_codes for _, is_codes in expected].count(False) == 1  # the images


def kept_by(layers: list[nn.Module], monkeypatch: pytest.MonkeyPatch, x: Tensor) -> list[bool]:
    model, kept = ql.lower(nn.Sequential(*layers), "bfp8", "bfp8"), Kept(monkeypatch)
    with NoWaiting(model):
        model(x)
    monkeypatch.undo()
    return [is_codes for _, is_codes in kept.large()]


def test_outputs_are_known_by_their_memory(deferred: DeferredKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(inputs: int) -> nn.Module:
        return nn.Linear(inputs, 64)

    images, rows = torch.randn(16, 3, 8, 8), torch.randn(32, 64)
    convolution = nn.Conv2d(3, 8, 3, padding=1)
    # images, then a flattened view
    assert kept_by([convolution, nn.Flatten(), linear(512)], monkeypatch, images) == [False, True]
    pools: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), linear(128)]
    assert kept_by(pools, monkeypatch, images) == [False, True, True]  # images, of relu, of the pool
    assert kept_by([linear(64), nn.Dropout(0.5).eval(), linear(64)], monkeypatch, rows)[-1]
    frozen = linear(64).requires_grad_(False)
    assert kept_by([frozen, linear(64)], monkeypatch, rows) == [True]


class Written(nn.Module):
    """A linear layer whose output is written to before the next one saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        y += 1e-3
        z: Tensor = self.layers[1](y)
        return z


def test_an_output_that_was_written_to_is_kept_unchanged(
    deferred: DeferredKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, kept = ql.lower(Written(), "bfp8", "bfp8"), torch.randn(32, 64), Kept(monkeypatch)
    for _ in range(2):
        y = model(x)
        assert [is_codes for _, is_codes in kept.large()] == [False, False]
        y.sum().backward()


class Product(nn.Module):
    """The product of two halves of an output, columns or rows."""

    def __init__(self, columns: bool) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, y: Tensor) -> Tensor:
        return y[:, :32] * y[:, 32:] if self.columns else y[:32] * y[32:]


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(512, 64)],
        [nn.Flatten(), nn.Linear(192, 64), Product(True)],
        [nn.Flatten(), nn.Linear(192, 64), Product(False)],
    ],
    ids=["a view", "columns", "rows"],
)
def test_views_and_parts_are_what_they_were(layers: list[nn.Module], deferred: DeferredKernels) -> None:
    model = nn.Sequential(*layers)
    other = copy.deepcopy(model)
    ql.lower(model, "bfp8", "bfp8")
    ql.lower(other, "bfp8", "bfp8", save_codes=False)
    x = torch.randn(64, 3, 8, 8)
    for _ in range(2):
        labels = torch.zeros(len(model(x)), dtype=torch.int64)
        other(x)
        assert same_gradients(gradients(model, x, labels), gradients(other, x, labels))


@pytest.mark.parametrize("format", ["bfp8", "fixed8.4", "fp8_e5m2"])
@pytest.mark.parametrize("relu", [False, True])
def test_a_tensor_that_held_a_nan_decodes_to_nan_throughout(format: str, relu: bool, deferred: DeferredKernels) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU() if relu else nn.Identity(), nn.Linear(64, 64))
    with torch.no_grad():
        model.get_parameter("0.bias")[3] = torch.nan
    ql.lower(model, format, format)
    for _ in range(2):  # encoded when it is saved, then by the layer; by relu both times
        model.zero_grad()
        with NoWaiting(model):
            model(torch.randn(64, 64)).sum().backward()
        weight = model.get_parameter("2.weight").grad
        assert weight is not None
        assert bool(weight.isnan().all())


# ---- errors and calls


def test_no_error_is_overwritten(deferred: DeferredKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> bool:
        raise AssertionError("references tell nothing about a device")

    monkeypatch.setattr(plain_tensors, "only_autograd_holds", refuse)
    model, x, labels = build("resnet")
    ql.lower(model, "bfp8", "bfp8")
    gradients(model, x, labels)


def test_convolution_norm_and_relu_take_one_call_each(deferred: DeferredKernels) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    ql.lower(model, "bfp8", "bfp8")
    x, e = torch.randn(8, 3, 8, 8), torch.randn(8, 8, 6, 6)
    for _ in range(3):
        deferred.calls.clear()
        y = model(x)
        forward = deferred.calls.copy()
        deferred.calls.clear()
        y.backward(e)
    assert forward == ["quantize_with_codes", "quantize", "relu_with_codes"]
    # relu with its mask, batch norm's input, the error of the convolution
    assert deferred.calls == ["quantize", "decode", "quantize"]


def test_a_saved_copy_takes_one_call(deferred: DeferredKernels) -> None:
    model = ql.lower(nn.Sequential(nn.Sigmoid(), nn.Linear(64, 64)), "bfp8")
    x = torch.randn(64, 64, requires_grad=True)
    calls = []
    for _ in range(2):
        deferred.calls.clear()
        model(x)
        calls.append(deferred.calls.copy())
    assert calls == [["quantize", "encode", "quantize"], ["quantize_with_codes", "quantize"]]


# ---- half precisions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_are_rounded_as_they_are(dtype: torch.dtype, deferred: DeferredKernels) -> None:
    format = "bfp8"
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Tanh(), nn.Linear(64, 3)).to(dtype)
    ql.lower(model, format, format)
    other, x, labels = copy.deepcopy(model), torch.randn(32, 64).to(dtype), torch.randint(3, (32,))
    single = copy.deepcopy(model).float()
    for _ in range(2):
        gradients(single, x.float(), labels)
        expected = deferred.calls.copy()
        deferred.calls.clear()
        with NoWaiting(model):
            found = gradients(model, x, labels)
        assert deferred.calls == expected  # codes are kept of half precision too
        deferred.calls.clear()
        with ql.quantization.backend.suspended(deferred):
            assert same_gradients(gradients(other, x, labels), found)


def test_a_format_that_does_not_fit_is_refused(deferred: DeferredKernels) -> None:
    model = ql.lower(nn.Linear(4, 4).to(torch.bfloat16), "fixed16.8")
    with pytest.raises(ValueError, match="bfloat16"):
        model(torch.ones(2, 4, dtype=torch.bfloat16))
