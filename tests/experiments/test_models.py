"""The networks of the paper, and others: their sizes, and that they train in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qlangevin as ql
from qlangevin.experiments import models
from tests.helpers.networks import CASES, build


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_sizes_are_those_of_the_paper() -> None:
    assert size(models.LogisticRegression()) == 7850
    assert size(models.MLP()) == 79_510
    assert size(models.ResNet18()) == 11_173_962
    assert size(models.ResNet18(1000, "imagenet")) == 11_689_512  # He et al., as published everywhere
    assert size(models.LSTMClassifier()) == 25_000 * 100 + 4 * 256 * (100 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + 514


def test_stems() -> None:
    small, big = models.ResNet18(7, width=2), models.ResNet18(7, "imagenet", width=2)
    seen: list[torch.Size] = []
    for model, side in ((small, 32), (big, 224)):
        model.blocks[0].register_forward_hook(lambda module, args, y: seen.append(y.shape[2:]))
        assert model(torch.zeros(2, 3, side, side)).shape == (2, 7)
    assert [tuple(shape) for shape in seen] == [(32, 32), (56, 56)]
    with pytest.raises(ValueError, match="stem must be 'cifar' or 'imagenet', got 'mnist'"):
        models.ResNet18(stem="mnist")  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "last"), [(8, True), (4, False), (12, False)])
def test_channels_are_last_where_gradients_cannot_be_written_out_of_bounds(width: int, last: bool) -> None:
    model = models.ResNet18(3, width=width, channels_last=True)
    layouts: list[bool] = []
    convolution = model.get_submodule("blocks.2.conv1")
    convolution.register_forward_hook(
        lambda module, args, y: layouts.append(y.is_contiguous(memory_format=torch.channels_last))
    )
    model(torch.zeros(2, 3, 16, 16))
    ql.pack(model, "bfp8")(torch.zeros(2, 3, 16, 16))
    assert layouts == [last, last]


def test_the_text_classifier_does_not_read_padding() -> None:
    model = models.LSTMClassifier(50, 2, 4, 6)
    text = torch.tensor([[7, 8, 9], [3, 4, 0]])
    longer = torch.nn.functional.pad(text, (0, 4))
    torch.testing.assert_close(model(longer), model(text))
    changed = text.clone()
    changed[1, 1] = 5
    assert not torch.equal(model(changed)[1], model(text)[1])
    assert bool(model(torch.zeros(1, 3, dtype=torch.int64)).isfinite().all())


@pytest.mark.parametrize("format", ["bfp8", "bfp8/tensor"])
@pytest.mark.parametrize("name", CASES)
def test_it_trains_lowered_and_packed(name: str, format: str) -> None:
    model, x, labels = build(name)
    ql.pack(ql.lower(model, activations=format, errors=format), format)
    sampler = ql.SGLD(
        model.parameters(), lr=0.05, num_data=6, temperature=1e-4, weight_decay=1e-3, gradients=format,
        step_in_backward=True,
    )  # fmt: skip
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        sampler.step()
        losses.append(loss.item())
    assert all(isinstance(p, ql.QTensor) and p.grad is None for p in model.parameters())
    assert sampler.saturated() == 0
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "transformer", "unet", "tied"])
def test_it_trains_compiled(name: str) -> None:
    ends = []
    for compiled in (False, True):
        model, x, labels = build(name)
        ql.pack(ql.lower(model, "bfp8", "bfp8", functions=False), "bfp8")  # compiled code does not see functions
        run: Any = torch.compile(model, backend="aot_eager") if compiled else model
        sampler = ql.SGLD(model.parameters(), lr=0.05, num_data=100, gradients="bfp8", step_in_backward=True)
        for _ in range(3):
            sampler.zero_grad()
            nn.functional.cross_entropy(run(x), labels).backward()
        ends.append([p.detach().decode() for p in model.parameters()])  # type: ignore[attr-defined]
    torch._dynamo.reset()
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)
