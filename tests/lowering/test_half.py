"""Lowered models in bfloat16 and float16, and under autocast: the same bits on both paths, codes kept for backward."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import native
from qlangevin.lowering.saved_tensors import SavedAsCodes, SavedCodes
from tests.helpers.networks import build, gradients, same_gradients

HALVES = [torch.bfloat16, torch.float16]


def in_half(name: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    model, x, labels = build(name)
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x, labels


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("name", "format"),
    [("unet", "bfp8/4"), ("transformer", "fixed8.4"), pytest.param("resnet", "bfp8", marks=pytest.mark.slow)],
)
def test_codes_kept_for_backward_change_nothing(name: str, format: str, dtype: torch.dtype) -> None:
    model, x, labels = in_half(name, dtype)
    other, plain = copy.deepcopy(model), copy.deepcopy(model)
    for one, save_codes in ((model, True), (other, False), (plain, True)):
        ql.lower(one, format, format, save_codes=save_codes)
    for _ in range(2):
        found = gradients(model, x, labels)
        assert same_gradients(found, gradients(other, x, labels))
        with native.disabled():
            assert same_gradients(found, gradients(plain, x, labels))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_convolutions_and_relu_are_kept_as_codes(
    dtype: torch.dtype, autocast: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(8 * 144, 5))
    x = ql.quantize(torch.randn(8, 3, 16, 16), "bfp8")
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if not autocast:
        model, x = model.to(dtype), x.to(dtype)
    ql.lower(model, "bfp8", "bfp8")
    kept: list[tuple[Tensor, Any]] = []
    pack = SavedAsCodes.pack

    def record(self: SavedAsCodes, t: Tensor) -> Any:
        kept.append((t, pack(self, t)))
        return kept[-1][1]

    monkeypatch.setattr(SavedAsCodes, "pack", record)
    for _ in range(2):  # the second time layers make codes as they round
        kept.clear()
        with torch.autocast("cpu", dtype=dtype) if autocast else nullcontext():
            y = model(x)
        assert y.dtype == dtype
        large = [(t, k) for t, k in kept if t.is_floating_point() and t.numel() >= 1024 and len(t) == len(x)]
        coded = [k for _, k in large if isinstance(k, SavedCodes)]
        assert dtype in {codes.dtype for codes in coded}
        assert len(coded) == len(large)
        for t, codes in large:
            assert torch.equal(codes.decode(), t)
            assert codes.decode().dtype == t.dtype
            assert codes.decode().stride() == t.stride()
        y.float().square().sum().backward()


@pytest.mark.parametrize("dtype", HALVES)
def test_blocks_too_small_or_too_large_for_half_precision(dtype: torch.dtype) -> None:
    layer = ql.lower(nn.Identity(), "bfp8", "bfp8", layers=nn.Identity)
    info = torch.finfo(dtype)
    rows = [info.smallest_normal * info.eps, info.smallest_normal, info.max, torch.inf, 0.0]
    x = (torch.ones(5, 2000, dtype=torch.float64) * torch.tensor(rows, dtype=torch.float64).view(-1, 1)).to(dtype)
    x.requires_grad_()
    y = layer(x)
    assert torch.equal(y, ql.quantize(x.detach(), "bfp8"))
    assert y.isfinite().all()
    y.backward(x.detach())
    assert x.grad is not None
    assert bool(x.grad.isfinite().all()) == (dtype is torch.bfloat16)  # a GradScaler must see infinities of float16
