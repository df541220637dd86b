"""Convolutions: PyTorch's derivatives, without the oneDNN primitive that writes out of bounds on CPUs without AVX-512."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qlangevin as ql

# All of them have fewer than 8 channels on the side that the stride steps over.
STRIDED_POINTWISE: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv1d(6, 12, 1, stride=2), (6, 6, 16)),
    (nn.Conv2d(6, 12, 1, stride=2, bias=False), (6, 6, 16, 16)),
    (nn.Conv2d(1, 6, 1, stride=(2, 1)), (2, 1, 16, 8)),
    (nn.Conv2d(6, 12, 1, stride=(2, 3), groups=2, dilation=2), (6, 6, 9, 7)),
    (nn.Conv2d(6, 12, 1, stride=2, padding="valid"), (6, 6, 16, 16)),
    (nn.Conv2d(6, 12, 1, stride=2), (6, 16, 16)),
    (nn.Conv3d(3, 4, 1, stride=2), (2, 3, 4, 4, 4)),
    (nn.ConvTranspose1d(12, 5, 1, stride=3, output_padding=2), (6, 12, 5)),
    (nn.ConvTranspose2d(12, 6, 1, stride=3, output_padding=2), (6, 12, 4, 8)),
    (nn.ConvTranspose2d(12, 6, 1, stride=(2, 1), bias=False), (6, 12, 4, 8)),
    (nn.ConvTranspose2d(12, 6, 1, stride=2, dilation=4, output_padding=3, groups=2), (6, 12, 4, 8)),
    (nn.ConvTranspose2d(12, 6, 1, stride=2, output_padding=1), (12, 4, 8)),
]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (3, 4, 9)),
        (nn.Conv2d(4, 6, (3, 2), dilation=2, bias=False), (3, 4, 9, 8)),
        (nn.Conv3d(2, 3, 2), (3, 2, 4, 5, 3)),
        (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (3, 4, 9)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False), (3, 4, 5, 6)),
        (nn.ConvTranspose3d(2, 3, 2), (3, 2, 4, 5, 3)),
        (nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), (3, 4, 9, 8)),
        (nn.Conv2d(4, 6, 3), (4, 9, 8)),  # one example without a batch
        *STRIDED_POINTWISE,
    ],
    ids=lambda value: str(value) if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("frozen", ["nothing", "weight", "input"])
def test_convolutions_have_the_gradients_of_pytorch(layer: nn.Module, shape: tuple[int, ...], frozen: str) -> None:
    layer = copy.deepcopy(layer)
    x = torch.randn(shape, requires_grad=frozen != "input")
    layer.get_parameter("weight").requires_grad_(frozen != "weight")
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]

    def derivatives() -> list[Tensor]:
        y = layer(x)
        first = torch.autograd.grad(y.sin().sum(), wanted, retain_graph=True)
        again = torch.autograd.grad(y.sin().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.square().sum() for g in again]).sum(), wanted, allow_unused=True)
        return [y, *first, *again, *(g for g in second if g is not None)]

    plain = derivatives()
    ql.lower(layer, activations="fp32", errors="fp32")
    for found, expected in zip(derivatives(), plain, strict=True):  # sums in float32, in another order
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.detach().abs().max()))


class WeightGradients(TorchDispatchMode):
    """Counts the calls that compute gradients of weights, and those of them that oneDNN may do out of bounds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.dangerous = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default and args[-1][1]:
            weight, stride = args[2], args[4]
            self.calls += 1
            self.dangerous += (
                weight.shape[1] < 8 and all(k == 1 for k in weight.shape[2:]) and any(s > 1 for s in stride)
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layer", "shape"), STRIDED_POINTWISE, ids=lambda v: str(v) if isinstance(v, nn.Module) else ""
)
@pytest.mark.parametrize("how", ["float32", "packed", "autocast", "bfloat16", "float64", "no kernels", "vmap"])
def test_no_weight_gradient_is_left_to_the_primitive(layer: Any, shape: tuple[int, ...], how: str) -> None:
    layer = copy.deepcopy(layer)
    if how in ("bfloat16", "float64"):
        layer.to(getattr(torch, how))
    model = ql.lower(nn.Sequential(layer), "fixed8.3", "fixed8.3")
    if how == "packed":
        ql.pack(model, "bfp8")
    channel = len(shape) - len(layer.stride) - 1
    x = torch.randn(*shape[:channel], *shape[channel + 1 :], shape[channel], dtype=layer.weight.dtype)
    x = x.movedim(-1, channel).requires_grad_()  # channels last
    seen = WeightGradients()
    kernels = ql.native.disabled() if how == "no kernels" else contextlib.nullcontext()
    with seen, kernels, torch.autocast("cpu", enabled=how == "autocast"):
        y = torch.vmap(model, randomness="same")(x[None])[0] if how == "vmap" else model(x)
        wanted = [x, *model.parameters()]
        first = torch.autograd.grad(y.float().square().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.float().square().sum() for g in first]).sum(), wanted)
    assert all(g.isfinite().all() for g in (*first, *second))
    assert seen.calls > 0
    assert seen.dangerous == 0


def test_a_transposed_convolution_of_a_given_size_is_gathered() -> None:
    layer, x = nn.ConvTranspose2d(12, 6, 1, stride=2), torch.randn(2, 4, 5, 12).movedim(-1, 1)
    expected = layer(x, output_size=[8, 9])
    y = ql.lower(layer, "fp32")(x, output_size=[8, 9])
    torch.testing.assert_close(y, expected)
    with WeightGradients() as seen:
        y.sum().backward()
    assert (seen.calls, seen.dangerous) == (1, 0)


TRAIN = """
import torch, qlangevin as ql
from torch import nn
torch.set_num_threads(1)
layers = (nn.Conv2d(6, 12, 1, stride=2, bias=False), nn.ConvTranspose2d(12, 4, 1, stride=3, output_padding=2))
x = torch.randn(6, 6, 16, 16).to(memory_format=torch.channels_last).requires_grad_()
for padding in ((0, 0), "valid"):
    layers[0].padding = padding
    model = ql.lower(nn.Sequential(*layers).to(memory_format=torch.channels_last), "bfp8", "bfp8")
    for i in range(60):
        (error,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=i % 2 == 0)
        (error.square().sum() if error.requires_grad else model(x).sum()).backward()
    ql.unlower(model)
"""


@pytest.mark.slow
def test_strided_pointwise_convolutions_stay_within_their_memory_without_avx512() -> None:
    """In plain PyTorch 2.13 this ends in "double free or corruption" or a segmentation fault."""
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MALLOC_PERTURB_": "7"}
    command = [sys.executable, "-W", "ignore", "-c", TRAIN]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
